"""Create a run folder, or find that it holds the same run."""
