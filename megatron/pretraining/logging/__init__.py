"""What a run says: console, TensorBoard, throughput."""
