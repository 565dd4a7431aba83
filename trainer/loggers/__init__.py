"""Curves for services besides TensorBoard, sent by processes of their own while a run trains."""
