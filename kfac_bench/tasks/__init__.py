"""The tasks: a loss that a model is trained for, and metrics of its quality."""
