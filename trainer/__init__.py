"""Batches to weights: the process that owns a run's position and trains its stages."""
