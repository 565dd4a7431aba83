"""What launcher, producers and trainer share; it imports neither `producer` nor `trainer`."""
