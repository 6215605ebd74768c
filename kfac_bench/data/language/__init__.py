"""Datasets of text: masked language modelling, SQuAD, and the Python reference."""
