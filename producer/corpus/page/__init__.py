"""The scan's report as one self-contained page, with charts and clips to listen to."""
