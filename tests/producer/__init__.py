"""Tests of `producer`, in one process but for a few children that a test compares with itself."""
