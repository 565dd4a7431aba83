"""The networks of XTTS v2 and their features, one network a file: no processes, no sockets, no
settings.
"""
