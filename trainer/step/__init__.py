"""The training step of each stage and what it computes with: losses, optimizer, precision,
transfers.
"""
