"""Tests of `trainer`, in one process."""
