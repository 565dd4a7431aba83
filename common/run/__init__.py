"""The run folder: its settings, its files, its identity, and the bundle made from it for another
host.
"""
