"""The samples that a run speaks, and the process that makes them while it trains."""
