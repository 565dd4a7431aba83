"""Reads and writes Coqui's checkpoint files without PyTorch."""
