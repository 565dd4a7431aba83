"""The scan's report as one self-contained page: figures drawn, clips to listen to."""
