"""What a run has behind it: ledger, checkpoints, and the schedule that they are positions of."""
