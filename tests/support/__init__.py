"""What tests share: corpora, runs, channels, processes."""
