"""What checkpoints and failures will cost a model of ours, told without a GPU and without torch."""
