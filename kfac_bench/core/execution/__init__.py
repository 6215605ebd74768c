"""Run a plan on tensors: batch statistics, running factors, decompositions, messages, gradients."""
