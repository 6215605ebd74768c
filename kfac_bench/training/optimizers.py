"""The first-order optimizers, and others that a preconditioner is compared with."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from kfac_bench.config import (
    AdamConfig,
    LAMBConfig,
    LARSConfig,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
    ShampooConfig,
    SOAPConfig,
)
from kfac_bench.distributed import apex
from kfac_bench.errors import UsageError

Group = dict[str, Any]


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    """The optimizer over all parameters that are trained.

    Its groups' ``initial_lr`` are the rates that a schedule scales.
    """
    optimizer = _build(config, model, _groups(config.no_decay, model))
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def _build(config: OptimizerConfig, model: nn.Module, groups: list[Group]) -> Optimizer:
    common: Group = {"lr": config.lr, "weight_decay": config.weight_decay}
    if isinstance(config, MuonConfig):
        return _muon(config, model, groups)
    if isinstance(config, SGDConfig):
        common |= {"momentum": config.momentum, "nesterov": config.nesterov}
        if isinstance(config, LARSConfig):
            from pytorch_optimizer import LARS  # slow to import

            return LARS(groups, **common, trust_coefficient=config.trust_coefficient)
        return SGD(groups, **common)
    assert isinstance(config, AdamConfig)
    common["betas"] = (config.beta1, config.beta2)
    if isinstance(config, ShampooConfig):
        return _shampoo(config, groups, common)
    common["eps"] = config.eps
    if isinstance(config, SOAPConfig):
        from pytorch_optimizer import SOAP

        return SOAP(groups, **common, precondition_frequency=config.precondition_freq)
    if isinstance(config, LAMBConfig):
        return _lamb(config, groups, common)
    kinds: dict[str, Callable[..., Optimizer]] = {"adam": Adam, "adamw": AdamW}
    if config.name == "fused_lamb":
        kinds["fused_lamb"] = apex.find("apex.optimizers", "FusedLAMB")
    try:
        return kinds[config.name](groups, **common)
    except RuntimeError as error:  # Apex without its extensions
        raise UsageError(f"optimizer={config.name}: {error}") from None


def _lamb(config: LAMBConfig, groups: list[Group], common: Group) -> Optimizer:
    from pytorch_optimizer import Lamb

    return Lamb(
        groups,
        **common,
        weight_decouple=False,
        pre_norm=config.max_grad_norm > 0,
        max_grad_norm=config.max_grad_norm,
        adam_debias=True,  # or first steps are 1 / (1 - beta1) times too long
    )


def _shampoo(config: ShampooConfig, groups: list[Group], common: Group) -> Optimizer:
    from pytorch_optimizer import ScalableShampoo

    return ScalableShampoo(
        groups,
        **common,
        start_preconditioning_step=config.precondition_freq,
        preconditioning_compute_steps=config.precondition_freq,
        block_size=config.block_size,
        matrix_eps=config.eps,
    )


def _muon(config: MuonConfig, model: nn.Module, groups: list[Group]) -> Optimizer:
    """Muon for hidden weights; Adam for vectors, embeddings and the last layer."""
    from pytorch_optimizer import Muon

    weights = [
        (module, p)
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False)
        if name == "weight" and p.ndim > 1
    ]
    apart = {id(p) for module, p in weights if isinstance(module, nn.Embedding)}
    apart |= {id(p) for _, p in weights[-1:]}
    split: list[Group] = []
    for group in groups:
        decay = group.get("weight_decay", config.weight_decay)
        hidden = [p for p in group["params"] if p.ndim > 1 and id(p) not in apart]
        rest = [p for p in group["params"] if p.ndim <= 1 or id(p) in apart]
        own = {"lr": config.lr, "momentum": config.momentum, "nesterov": config.nesterov}
        adam = {"lr": config.adam_lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
        split.append({"params": hidden, "use_muon": True, "weight_decay": decay, **own})
        split.append({"params": rest, "use_muon": False, "weight_decay": decay, **adam})
    return Muon([group for group in split if group["params"]])


def _groups(no_decay: Sequence[str], model: nn.Module) -> list[Group]:
    """Trained parameters with weight decay, and those without it."""
    groups: list[Group] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    seen: set[nn.Parameter] = set()  # tied weights have two names
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                found = (re.search(p, s) for p in no_decay for s in (name, type(module).__name__))
                groups[any(found)]["params"].append(parameter)
    return [group for group in groups if group["params"]]
