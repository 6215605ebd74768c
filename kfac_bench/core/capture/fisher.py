"""What to send backward so that G becomes the Fisher's, not the empirical one.

The empirical Fisher uses the gradient of the training loss. The true one takes the expectation
over labels drawn from the *model's* distribution: by one sampled label per position ("mc"), or
exactly ("type2"), by sending each column of a root of the loss' Hessian backward (the generalised
Gauss-Newton matrix, which is the Fisher for these likelihoods: Martens 2014, section 9). Where a
sample has several classified positions (tokens, pixels), a column goes back from all of them at
once, with random signs: exact for layers that do not mix positions, elsewhere without bias.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

FISHERS = ("empirical", "mc", "type2")
LIKELIHOODS = ("categorical", "gaussian", "bernoulli")


def seeds(
    output: Tensor,
    fisher: str,
    likelihood: str = "categorical",
    *,
    dim: int = -1,
    mask: Tensor | None = None,
    curvature: float = 1.0,
) -> tuple[Iterator[Tensor], int]:
    """Gradients to send backward from ``output``, each K times that of the loss; and K.

    categorical: the loss is cross entropy of logits along ``dim``, mean over all other positions,
    or over those where ``mask`` (``output``'s shape without ``dim``) is not 0.
    gaussian: ``curvature / 2`` times the squared error; bernoulli: binary cross entropy of logits;
    both summed over all dimensions but the first, mean over the first.

    The sum over "type2" seeds s of s s^T, or the expectation of it over "mc" samples, is K^2 times
    the loss' Hessian at each position, up to the factor 1/positions of the mean.
    """
    if likelihood not in LIKELIHOODS:
        raise ValueError(f"likelihood={likelihood!r}: choose one of {', '.join(LIKELIHOODS)}")
    x = output.detach().float() if output.dtype != torch.float64 else output.detach()
    if likelihood == "categorical":
        positions = output.numel() // output.shape[dim]
        weight = torch.ones((), device=x.device)
        if mask is not None:
            weight = (mask.to(x.dtype) * (positions / mask.sum().clamp_min(1))).unsqueeze(dim)
        made = _categorical(x, fisher, dim)
        return ((s * weight).to(output.dtype) for s in made), positions
    made = _bernoulli(x, fisher) if likelihood == "bernoulli" else _gaussian(x, fisher, curvature)
    return (s.to(output.dtype) for s in made), len(output)


def _categorical(logits: Tensor, fisher: str, dim: int) -> Iterator[Tensor]:
    """Of cross entropy: p - onehot(y), y from p; or sqrt(p_c) (p - onehot(c)) for each class c."""
    p = logits.softmax(dim)
    if fisher == "mc":
        uniform = torch.rand_like(p).clamp_min(torch.finfo(p.dtype).tiny)
        drawn = (logits - (-uniform.log()).log()).argmax(dim)  # Gumbel: nothing waits for it
        yield p - F.one_hot(drawn, logits.shape[dim]).to(p.dtype).movedim(-1, dim)
        return
    many = logits.numel() > len(logits) * logits.shape[dim]  # positions in a sample
    for c in range(logits.shape[dim]):
        column = p.clone()
        column.select(dim, c).sub_(1)
        root = p.narrow(dim, c, 1).sqrt()
        yield column * (root * _signs_like(root) if many else root)


def _signs_like(x: Tensor) -> Tensor:
    """1 or -1 at random: labels of several positions are independent, so no pair may add up."""
    return torch.randint_like(x, 2).mul_(2).sub_(1)


def _gaussian(mean: Tensor, fisher: str, curvature: float) -> Iterator[Tensor]:
    """Of curvature / 2 (mean - y)^2 with y of variance 1 / curvature: sqrt(curvature) noise."""
    root = curvature**0.5
    if fisher == "mc":
        yield root * torch.randn_like(mean)
        return
    yield from _one_by_one(torch.full_like(mean, root))


def _bernoulli(logits: Tensor, fisher: str) -> Iterator[Tensor]:
    """Of binary cross entropy: p - y, y from p; its variance is p (1 - p)."""
    p = logits.sigmoid()
    if fisher == "mc":
        yield p - (torch.rand_like(p) < p).to(p.dtype)
        return
    yield from _one_by_one((p * (1 - p)).sqrt())


def _one_by_one(root: Tensor) -> Iterator[Tensor]:
    """A diagonal root, one of its columns per element of a sample."""
    flat = root.flatten(1)
    for i in range(flat.shape[1]):
        column = torch.zeros_like(flat)
        column[:, i] = flat[:, i]
        yield column.view_as(root)
