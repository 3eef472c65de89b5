"""What is saved: the training state of a model in coordinates that no parallel layout has touched."""
