"""Reports a run on console and TensorBoard, with throughput."""
