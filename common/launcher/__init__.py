"""The parent's side: what the command line says, who owns the run, and the processes that are
started, watched and stopped.
"""
