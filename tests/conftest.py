"""Tiny tensors: a second thread would only wait."""

import torch

torch.set_num_threads(1)
