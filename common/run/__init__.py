"""The run folder: its settings, its files, what identifies it, and the bundle that another host
gets of it.
"""
