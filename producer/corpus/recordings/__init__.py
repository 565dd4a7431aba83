"""Turns long recordings into a corpus: transcribes them, and cuts them at pauses."""
