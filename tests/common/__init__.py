"""Tests of `common`, in one process but for a few children that a test compares with itself."""
