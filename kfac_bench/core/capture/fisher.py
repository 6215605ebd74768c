"""Gradients that are sent backward so that G belongs to the true Fisher matrix.

The *empirical* Fisher uses the gradient of the training loss. The true Fisher takes the expectation
over labels of the model's own distribution. There are two ways:

* ``mc`` draws one label per position.
* ``type2`` is exact. It sends each column of a root of the loss' Hessian backward. The result is
  the generalized Gauss-Newton matrix, which equals the Fisher for these likelihoods (Martens 2014,
  section 9).

A sample may have several classified positions (tokens, pixels). ``type2`` then sends a column back
from all positions at once, with random signs. That is exact for layers that do not mix positions,
and unbiased for others. The calls of layers wait in :class:`WaitingCalls` for these gradients.
"""

import math
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from kfac_bench.core.capture.calls import SeenCall

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
    """Return gradients to send backward from ``output``, and their magnitude K.

    Each seed s is K times a gradient of the loss. The sum of s s^T over the ``type2`` seeds, or its
    expectation over ``mc`` samples, is K^2 times the Hessian of the loss at each position, up to
    the factor 1/positions of the mean.

    Args:
        output: The model's output.
        fisher: ``mc`` or ``type2``.
        likelihood: ``categorical``, ``gaussian`` or ``bernoulli``; see
            :meth:`KFAC.fisher_backward`.
        dim: The dimension of the classes, for ``categorical``.
        mask: Shape of ``output`` without ``dim``. Positions with 0 are not in the loss.
        curvature: Second derivative of the loss, for ``gaussian``.

    Raises:
        ValueError: The likelihood is unknown.
    """
    if likelihood not in LIKELIHOODS:
        raise ValueError(f"likelihood={likelihood!r}: choose one of {', '.join(LIKELIHOODS)}")
    x = output.detach().float() if output.dtype != torch.float64 else output.detach()
    if likelihood == "categorical":
        positions = output.numel() // output.shape[dim]
        weight = torch.ones((), device=x.device)
        if mask is not None:
            # The loss is a mean over the masked positions only, so their weight grows.
            weight = (mask.to(x.dtype) * (positions / mask.sum().clamp_min(1))).unsqueeze(dim)
        made = _categorical(x, fisher, dim)
        return ((s * weight).to(output.dtype) for s in made), positions
    made = _bernoulli(x, fisher) if likelihood == "bernoulli" else _gaussian(x, fisher, curvature)
    return (s.to(output.dtype) for s in made), len(output)


def _categorical(logits: Tensor, fisher: str, dim: int) -> Iterator[Tensor]:
    """Yield p - onehot(y) with y drawn from p, or sqrt(p_c) (p - onehot(c)) for each class c."""
    p = logits.softmax(dim)
    if fisher == "mc":
        uniform = torch.rand_like(p).clamp_min(torch.finfo(p.dtype).tiny)
        # The Gumbel trick draws a class without waiting for the device.
        drawn = (logits - (-uniform.log()).log()).argmax(dim, keepdim=True)
        # Not F.one_hot: on some devices it reads its argument.
        yield p - torch.zeros_like(p).scatter_(dim, drawn, 1.0)
        return
    has_positions = logits.numel() > len(logits) * logits.shape[dim]
    for c in range(logits.shape[dim]):
        column = p.clone()
        column.select(dim, c).sub_(1)
        root = p.narrow(dim, c, 1).sqrt()
        yield column * (root * _signs_like(root) if has_positions else root)


def _signs_like(x: Tensor) -> Tensor:
    """Return random signs: labels of positions are independent, so products must cancel."""
    return torch.randint_like(x, 2).mul_(2).sub_(1)


def _gaussian(mean: Tensor, fisher: str, curvature: float) -> Iterator[Tensor]:
    """Yield gradients of curvature / 2 (mean - y)^2, where y has variance 1 / curvature."""
    root = curvature**0.5
    if fisher == "mc":
        yield root * torch.randn_like(mean)
        return
    yield from _one_by_one(torch.full_like(mean, root))


def _bernoulli(logits: Tensor, fisher: str) -> Iterator[Tensor]:
    """Yield p - y with y drawn from p, or the columns of its standard deviation."""
    p = logits.sigmoid()
    if fisher == "mc":
        yield p - (torch.rand_like(p) < p).to(p.dtype)
        return
    yield from _one_by_one((p * (1 - p)).sqrt())


def _one_by_one(root: Tensor) -> Iterator[Tensor]:
    """Yield the columns of a diagonal root, one per element of a sample."""
    # Not -1, which is ambiguous in a batch without examples.
    flat = root.reshape(len(root), math.prod(root.shape[1:]))
    for i in range(flat.shape[1]):
        column = torch.zeros_like(flat)
        column[:, i] = flat[:, i]
        yield column.view_as(root)


class WaitingCalls:
    """The calls that wait for :meth:`KFAC.fisher_backward`. They are gone with their graph.

    A forward whose output is dropped, for example a rollout, thus leaves nothing in memory.
    """

    def __init__(self) -> None:
        self._calls: WeakSet[SeenCall] = WeakSet()
        self._key = f"kfac_bench {id(self)}"
        self._sent: list[tuple[GradientEdge, str]] = []  # calls of this forward that got labels

    def add(self, edge: GradientEdge, call: SeenCall) -> None:
        """Let the node of the graph hold the call."""
        _metadata(edge.node).setdefault(self._key, []).append((edge.output_nr, call))
        self._calls.add(call)

    def forget(self, call: SeenCall) -> None:
        """Forget one call."""
        self._calls.discard(call)

    def pop(self, output: Tensor) -> list[tuple[GradientEdge, SeenCall]]:
        """Return and forget the calls that lead to ``output``, in their order."""
        stack, visited, taken = [output.grad_fn], set(), []
        while stack:  # a walk without recursion, as graphs can be deeper than Python's stack
            node = stack.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            for output_nr, call in _metadata(node).pop(self._key, ()):
                if call in self._calls:  # else it belongs to an earlier step
                    taken.append((GradientEdge(node, output_nr), call))
                    self._calls.discard(call)
            stack += [following for following, _ in node.next_functions]
        return sorted(taken, key=lambda each: each[1].number)

    def note_sent(self, edge: GradientEdge, name: str) -> None:
        """Note that labels were sent through a call of a layer."""
        self._sent.append((edge, name))

    def check_not_sent(self, output: Tensor) -> None:
        """Check that no layer of this forward gets labels twice: A would count once, G partly.

        Raises:
            RuntimeError: A layer would.
        """
        if not self._sent:
            return
        edges = [edge for edge, _ in self._sent]
        grads = torch.autograd.grad(
            output, edges, torch.zeros_like(output), retain_graph=True, allow_unused=True
        )
        twice = [name for (_, name), g in zip(self._sent, grads, strict=True) if g is not None]
        if twice:
            raise RuntimeError(
                f"fisher_backward() has reached layer {twice[0]!r} twice in one forward: join the "
                "outputs into one tensor and call it once, or use fisher=empirical"
            )

    def begin_forward(self) -> None:
        """Forget the calls of the forward before that got labels."""
        self._sent.clear()

    def layers(self) -> set[str]:
        """Return the names of layers whose calls wait: they feed another output."""
        return {call.layer.name for call in self._calls}

    def clear(self) -> None:
        """Forget all calls: a step has ended."""
        self._calls.clear()
        self._sent.clear()


def _metadata(node: Node) -> dict[str, Any]:
    metadata: Any = node.metadata  # a property, which torch's types call a method
    return metadata  # type: ignore[no-any-return]
