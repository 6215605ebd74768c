"""Runs a plan on tensors: statistics, running factors, decompositions, messages, gradients."""
