"""The corpus in numbers: manifest, buckets, the plan from a batch's number to its utterances, and
the fields of a batch.
"""
