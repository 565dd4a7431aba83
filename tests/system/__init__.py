"""Tests of real processes: the launcher, its children, and whatever is killed on the way."""
