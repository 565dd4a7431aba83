"""The launcher's commands on a run or on weights: synthesize, import-coqui,
export-coqui, profile.
"""
