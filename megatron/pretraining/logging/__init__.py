"""Reports of a run: console, TensorBoard, throughput."""
