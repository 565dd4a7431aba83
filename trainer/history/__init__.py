"""The history of a run: ledger, checkpoints, and the schedule in which they mark positions."""
