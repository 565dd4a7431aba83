"""Long recordings made into a corpus: what is said in them written down, and cut at pauses."""
