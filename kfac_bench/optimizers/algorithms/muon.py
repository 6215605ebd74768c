"""Muon for the hidden weights of a model, and Adam for all its other parameters."""

from collections.abc import Iterable
from typing import Any

from pytorch_optimizer import Muon
from torch import nn

from kfac_bench.core.validation import check_is_model


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
        The optimizer of pytorch_optimizer.

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
