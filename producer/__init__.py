"""Files to batches: the process that decodes, computes features and answers the
trainer's leases.
"""
