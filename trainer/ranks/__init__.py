"""Several trainers that make each step together: who computes which batch, and the messages between
them.
"""
