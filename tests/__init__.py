"""Tests by what they test; benchmarks, which are run by hand; golden values; and what
tests share.
"""
