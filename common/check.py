"""`launch.py check`."""
