"""GPUs: the parent chooses and pins them through NVML, the child proves its own by computing."""
