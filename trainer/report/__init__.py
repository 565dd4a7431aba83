"""What a run reports: metrics, speed and its causes, pictures, TensorBoard, the summary."""
