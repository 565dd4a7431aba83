"""How a run folder is created, or found to hold the same run."""
