"""What every process needs of the operating system: errors and exit codes, signals, locks, logs,
status, files, cores.
"""
