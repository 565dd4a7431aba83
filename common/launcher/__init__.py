"""The parent's side: reads the command line, decides who owns the run, and starts, watches and
stops the processes.
"""
