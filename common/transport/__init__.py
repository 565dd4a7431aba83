"""Batches from producers to the trainer: messages, keys, sockets, leases, and the two ends of the
channel.
"""
