"""Views of the event stream: console, W&B, TensorBoard."""
