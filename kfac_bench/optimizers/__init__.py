"""The optimizers: their options, and the algorithms that other packages lack."""
