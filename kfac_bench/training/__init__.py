"""The parts of a training run: the loop, one update, batches, events, checkpoints and the end."""
