"""The page of a run: curves, settings, corpus and every sample to listen to, in one HTML file."""
