"""On the PYTHONPATH of processes that tests start: what Python imports as it starts."""
