"""Sends curves to services besides TensorBoard, by separate processes while a run trains."""
