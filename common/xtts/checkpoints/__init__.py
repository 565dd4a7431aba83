"""Coqui's checkpoint files in and out, without PyTorch."""
