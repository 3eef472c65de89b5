"""The training state of a model in the coordinates of the unpartitioned model, independent of any layout."""
