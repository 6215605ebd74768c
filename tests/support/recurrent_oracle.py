"""Recurrent modules in float64, one sample and one time step at a time, written for clarity."""

from collections import defaultdict

import torch
from torch import nn


class Sample:
    """The forward of one sequence [T, d] through a module, with every product W a + b kept."""

    def __init__(self, module, x, state):
        self.module = module
        self.products = defaultdict(list)
        """By name of the linear map: (a, W a + b) at each time step."""
        self.output, self.state = self._forward(x, state)

    def _product(self, name, a):
        weight = getattr(self.module, f"weight_{name}")
        bias = getattr(self.module, f"bias_{name}", None)
        y = weight @ a
        if bias is not None:
            y = y + bias
        y.retain_grad()
        self.products[name].append((a.detach(), y))
        return y

    def _step(self, suffix, x, h, c):
        module = self.module
        i, j = self._product(f"ih{suffix}", x), self._product(f"hh{suffix}", h)
        if isinstance(module, nn.LSTM | nn.LSTMCell):
            enter, forget, new, out = (i + j).chunk(4)
            c = forget.sigmoid() * c + enter.sigmoid() * new.tanh()
            h = out.sigmoid() * c.tanh()
            if getattr(module, "proj_size", 0):
                h = self._product(f"hr{suffix}", h)
            return h, c
        if isinstance(module, nn.GRU | nn.GRUCell):
            (r_i, z_i, n_i), (r_j, z_j, n_j) = i.chunk(3), j.chunk(3)
            n = (n_i + (r_i + r_j).sigmoid() * n_j).tanh()
            z = (z_i + z_j).sigmoid()
            return (1 - z) * n + z * h, c
        return ((i + j).relu() if module.nonlinearity == "relu" else (i + j).tanh()), c

    def _forward(self, x, state):
        """``state`` is (h, c), each with one row per layer and direction."""
        ends = []
        for layer in range(self.module.num_layers):
            outputs = []
            for suffix in ("", "_reverse")[: 1 + self.module.bidirectional]:
                h, c = state[0][len(ends)], state[1][len(ends)]
                each = []
                for one in x.flip(0) if suffix else x:
                    h, c = self._step(f"_l{layer}{suffix}", one, h, c)
                    each.append(h)
                outputs.append(torch.stack(each[::-1] if suffix else each))
                ends.append((h, c))
            x = torch.cat(outputs, 1)
        return x, tuple(torch.stack(parts) for parts in zip(*ends, strict=True))


def zero_state(module):
    """(h, c) of one sample."""
    count = module.num_layers * (1 + module.bidirectional)
    return (
        torch.zeros(count, module.proj_size or module.hidden_size),
        torch.zeros(count, module.hidden_size),
    )


def rows(samples, name):
    """Per sample, after backward: a [T, a_dim] with a one for the bias, and g [T, g_dim]."""
    made = []
    for sample in samples:
        pairs = sample.products[name]
        a = torch.stack([a for a, _ in pairs])
        if getattr(sample.module, f"bias_{name}", None) is not None:
            a = torch.cat([a, torch.ones(len(a), 1)], 1)
        made.append((a, torch.stack([y.grad for _, y in pairs])))
    return made


def factors(samples, name, reduce=False):
    """A and G of kfc: the loss is a mean over samples, which may differ in length."""
    n, each = len(samples), rows(samples, name)
    if reduce:
        each = [(a.mean(0, keepdim=True), g.sum(0, keepdim=True)) for a, g in each]
    a, g = (torch.cat(parts) for parts in zip(*each, strict=True))
    return a.T @ a / len(a), (n * g).T @ (n * g) / n


def gradient(module, name):
    """[g_dim, a_dim] of one linear map, a copy."""
    grad = getattr(module, f"weight_{name}").grad
    bias = getattr(module, f"bias_{name}", None)
    if bias is not None:
        grad = torch.cat([grad, bias.grad.unsqueeze(1)], 1)
    return grad.clone()
