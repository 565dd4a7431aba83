"""GPUs: chosen and pinned by the parent through NVML, proved by the child with a real operation."""
