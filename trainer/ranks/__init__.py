"""Several trainers that make each step together: who computes which
batch, and what they say to each other.
"""
