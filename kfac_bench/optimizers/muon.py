"""Muon for the hidden weights of a model, and Adam for all its other parameters."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kfac_bench.core.distributed.dtensor import full, is_sharded, shard_like
from kfac_bench.core.kernels import linalg
from kfac_bench.core.validation import check_is_model

NEWTON_SCHULZ_STEPS = 5


class Muon(Optimizer):
    """Muon (Jordan et al. 2024) for groups with ``use_muon``, AdamW for the other groups.

    A parameter [n, ...] of Muon counts as a matrix of n rows.
    """

    def __init__(self, params: Iterable[dict[str, Any]]) -> None:
        super().__init__(params, {"step": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1
            alike: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    shape = p.shape if group["use_muon"] else None
                    alike[is_sharded(p), p.device, p.dtype, shape].append(p)
            for params in alike.values():
                if group["weight_decay"]:
                    torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                grads = [p.grad for p in params if p.grad is not None]
                (self._muon if group["use_muon"] else self._adam)(group, params, grads)
        return loss

    def _muon(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Update parameters of one shape: their matrices are orthogonalized as one batch."""
        momenta = self._moments(params, "momentum_buffer")
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        if group["nesterov"]:
            momenta = list(torch._foreach_lerp(grads, momenta, group["momentum"]))
        matrices = torch.stack([full(each).flatten(1) for each in momenta])
        # Rounding to bfloat16 does no harm, but it costs time where products in it are slow.
        is_fast = linalg.has_fast_bfloat16(matrices.device)
        dtype = torch.bfloat16 if is_fast else torch.float32
        updates = linalg.orthogonalize(matrices, NEWTON_SCHULZ_STEPS, dtype).to(matrices.dtype)
        rate = group["lr"] * max(1.0, matrices.shape[1] / matrices.shape[2]) ** 0.5
        parts = [shard_like(u.reshape(p.shape), p) for p, u in zip(params, updates, strict=True)]
        torch._foreach_add_(params, parts, alpha=-rate)

    def _adam(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        means, squares = (self._moments(params, name) for name in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_lerp_(squares, torch._foreach_mul(grads, grads), 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - beta2 ** group["step"]) ** 0.5)
        torch._foreach_add_(roots, group["eps"])
        rate = group["lr"] / (1 - beta1 ** group["step"])
        torch._foreach_addcdiv_(params, means, roots, value=-rate)

    def _moments(self, params: list[Tensor], name: str) -> list[Tensor]:
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p)
        return [self.state[p][name] for p in params]


def muon(
    model: nn.Module,
    lr: float = 0.02,
    momentum: float = 0.95,
    *,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    adam_lr: float = 3e-4,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-10,
    params: Iterable[dict[str, Any]] | None = None,
) -> Muon:
    """Return an optimizer of the whole model: Muon for hidden weights, Adam for the rest.

    Adam trains vectors, embeddings and the last layer. The call replaces the line that builds
    AdamW::

        optimizer = muon(model, lr=0.02, adam_lr=1e-3)

    Args:
        model: The model.
        lr: The learning rate of Muon.
        momentum: Muon's decay of the momentum.
        nesterov: Whether Muon's momentum is Nesterov's.
        weight_decay: The decoupled weight decay of both.
        adam_lr: The learning rate of Adam.
        betas: Adam's decay of the running means of the gradient and of its square.
        eps: Adam's, added to the root of the second moment.
        params: Parameter groups, which may have their own ``weight_decay`` but no other options; by
            default all trained parameters of the model are one group.

    Returns:
        The optimizer. It needs no package but torch.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``.
        ValueError: A group has other options than ``weight_decay``.
    """
    check_is_model(model, "muon(model)")
    if params is None:
        params = [{"params": [p for p in model.parameters() if p.requires_grad]}]
    for_adam = _embeddings_and_last_layer(model)
    split: list[dict[str, Any]] = []
    for group in params:
        if other := group.keys() - {"params", "weight_decay"}:
            raise ValueError(
                f"muon(): a group has the options {sorted(other)}, which would be ignored. A group "
                "may have params and weight_decay"
            )
        every = list(group["params"])
        decay = group.get("weight_decay", weight_decay)
        # A class token [1, 1, d] or positions [1, n, d] have one row: they are vectors.
        hidden = [p for p in every if p.ndim > 1 and len(p) > 1 and id(p) not in for_adam]
        taken = {id(p) for p in hidden}
        rest = [p for p in every if id(p) not in taken]
        of_muon = {"lr": lr, "momentum": momentum, "nesterov": nesterov}
        of_adam = {"lr": adam_lr, "betas": betas, "eps": eps}
        split.append({"params": hidden, "use_muon": True, "weight_decay": decay, **of_muon})
        split.append({"params": rest, "use_muon": False, "weight_decay": decay, **of_adam})
    return Muon([group for group in split if group["params"]])


def _embeddings_and_last_layer(model: nn.Module) -> set[int]:
    """Return the ids of matrices that Adam trains.

    Muon orthogonalizes the update of a matrix between hidden layers. Embeddings and the last layer
    are matrices, too, but learn better with Adam, as Muon's authors found.
    """
    weights = [
        (module, p)
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False)
        if name == "weight" and p.ndim > 1
    ]
    embeddings = {id(p) for module, p in weights if isinstance(module, nn.Embedding)}
    return embeddings | {id(p) for _, p in weights[-1:]}
