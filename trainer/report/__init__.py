"""What a run says of itself: metrics, speed and its causes, pictures, TensorBoard, the summary."""
