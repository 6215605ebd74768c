"""Checks of options, models and optimizers. An error says in one line why, and what to do.

An object of another kind than a model or an optimizer is a ``TypeError``. All other errors are a
``ValueError``.
"""

import re
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from kfac_bench.core.attachment import innermost
from kfac_bench.core.damping import adaptive
from kfac_bench.core.distributed.dtensor import any_tensor_parallel, is_offloaded
from kfac_bench.core.execution.adam import AdamRule
from kfac_bench.core.execution.gradients import any_sharded
from kfac_bench.core.kfac_options import OPTIONS, KFACOptions, state_dtypes, unused_by_eigen_adam
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.layers.coverage import SkippedModule
from kfac_bench.core.options import types
from kfac_bench.core.planning.plan import EIGEN_ADAM, IDENTITY, STRATEGY_TABLE, Plan

MOST_ROWS = 10
"""Most kinds of skipped modules that a message lists."""


def check_options(options: KFACOptions) -> None:
    """Check all options that need neither the model nor the optimizer."""
    values: Mapping[str, object] = options
    hints = types(KFACOptions)
    names = ["factor_init", "factor_convention", "fisher", "weight_sharing"]
    names += ["grad_worker_fraction", "trust_ratio", "max_dim", "block_size", "max_overhead"]
    for name in names:
        OPTIONS[name].check(name, values[name], hints[name])
    dtype, dtypes = options["state_dtype"], state_dtypes().values()
    if dtype not in dtypes:
        raise ValueError(f"state_dtype={dtype!r}: choose one of {', '.join(map(str, dtypes))}")
    row, fraction = STRATEGY_TABLE.get(options["strategy"]), options["grad_worker_fraction"]
    if row is not None and fraction is not None and not row.adjustable:
        raise ValueError(
            f"grad_worker_fraction={fraction} has no effect with strategy={options['strategy']}, "
            "which has a fraction of its own: choose strategy=hybrid_opt"
        )
    if options["block_size"] is not None and options["method"] == EIGEN_ADAM:
        raise ValueError(
            f"block_size={options['block_size']} with method=eigen_adam, which needs whole "
            "eigenvectors: leave block_size=None; max_dim limits the size of its factors"
        )
    _check_skip(options["skip"])
    _check_background(options)
    _check_budget(options)


def check_is_model(model: object, call: str) -> None:
    """Check that ``model`` is a module.

    Args:
        model: What the caller passed as the model.
        call: The right call, for the message.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"the model is an object of class {type(model).__name__}, expected a torch.nn.Module. "
            f"Pass the model itself, not its parameters: {call}"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "the model is compiled by torch.jit, which hides its layers: pass the original model"
        )


def check_model(model: nn.Module) -> None:
    """Check that K-FAC can see the layers inside the wrappers of ``model``."""
    check_is_model(model, "KFAC(model, optimizer)")
    for name, p in model.named_parameters():
        if nn.parameter.is_lazy(p):
            raise ValueError(
                f"{name} has no shape yet: run a batch through the model before you build KFAC"
            )
    for module in model.modules():
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise ValueError(
                f"DataParallel on {len(module.device_ids)} devices: K-FAC cannot see the copies of "
                "the model; use DistributedDataParallel"
            )
        if _is_fsdp1(module):
            raise ValueError(
                "FullyShardedDataParallel (FSDP1) hides the layers of the model: use FSDP2, that "
                "is torch.distributed.fsdp.fully_shard(model)"
            )


def _is_fsdp1(module: nn.Module) -> bool:
    # A model with FSDP1 has imported this package already; no other model needs it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def check_optimizer(optimizer: Optimizer) -> None:
    """Check that the optimizer uses each gradient once."""
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"the optimizer is {optimizer!r}, expected an optimizer object: "
            "KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))"
        )
    if isinstance(innermost(optimizer), torch.optim.LBFGS):
        raise ValueError(
            "LBFGS computes several gradients in a step and has its own curvature: use K-FAC with "
            "an optimizer such as SGD or Adam"
        )


def check_collective(name: str, collective: object) -> None:
    """Check that a communication backend is one, and not a group of torch or a class."""
    if isinstance(collective, type) or not hasattr(collective, "world_size"):
        raise TypeError(
            f"{name}={collective!r} is no communication backend of K-FAC. For a process group of "
            f"torch pass {name}=TorchCollective(group), which is in "
            "kfac_bench.core.distributed.collective"
        )


def check_eigen_adam(options: KFACOptions, rule: AdamRule | None) -> None:
    """Check that the options and the optimizer fit method eigen_adam, or another method.

    ``rule`` is that of the optimizer, None if it is no EigenAdam.
    """
    if options["method"] != EIGEN_ADAM:
        if rule is not None:
            raise ValueError(
                f"method={options['method']} with the optimizer EigenAdam, which needs "
                "method=eigen_adam: choose another optimizer, or this method"
            )
        return
    if rule is None:
        raise ValueError(
            "method=eigen_adam needs the optimizer EigenAdam: another optimizer would apply a "
            "second momentum or a second scale; kfac_bench.eigen_adam(model) builds both"
        )
    values: Mapping[str, object] = options
    unused = [
        name if values[name] is True else f"{name}={values[name]}"
        for name in unused_by_eigen_adam(options)
    ]
    if unused:
        raise ValueError(
            f"method=eigen_adam has no use for {' and '.join(unused)}: Adam's second moment sets "
            "the size of each step; set damping=None, kl_clip=None, "
            "trust_ratio=None, grafting=False"
        )


def _check_skip(skip: Sequence[str]) -> None:
    """Check the patterns of the layers that K-FAC leaves out."""
    if isinstance(skip, str):
        raise ValueError(f"skip={skip!r}: give a list of patterns, such as skip=[{skip!r}]")
    for pattern in skip:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(f"skip: {pattern!r} is no regular expression: {error}") from None


def _check_background(options: KFACOptions) -> None:
    """Check that work beside training fits the other options."""
    if options["background"] and options["overlap"]:
        raise ValueError(
            "overlap=True sends statistics during backward, background=True sends them in step(): "
            "choose one of them"
        )
    if options["background"] and options["spread"] is False:
        raise ValueError(
            "spread=False makes all decompositions at once, background=True one slice after the "
            "other: leave spread unset"
        )


def _check_budget(options: KFACOptions) -> None:
    """Check that the other options leave a budget something to choose."""
    budget = options["max_overhead"]
    if budget is None:
        return
    if options["method"] == IDENTITY:
        raise ValueError(
            f"max_overhead={budget} with method=identity, which has no factors: choose another "
            "method, or max_overhead=None"
        )
    if options["background"]:
        raise ValueError(
            f"max_overhead={budget} with background=True, whose work takes no time of a step: "
            "choose one of them"
        )


def check_layers(
    layers: Sequence[Layer],
    skipped: Sequence[SkippedModule],
    model: nn.Module,
    world_size: int,
    options: KFACOptions,
) -> None:
    """Check that the layers can be preconditioned on ``world_size`` ranks."""
    if not layers:
        raise ValueError(f"the model has no layer to precondition: {_why(skipped)}")
    double = [layer.name for layer in layers if layer.weight.dtype == torch.float64]
    if world_size > 1 and double:
        # Messages are float32 at most, so ranks would mix float32 with their own float64.
        raise ValueError(
            f"layer {double[0]} has float64 weights: on several ranks K-FAC works in float32; "
            "use model.float()"
        )
    devices = sorted({str(layer.weight.device) for layer in layers})
    if len(devices) > 1 and (world_size > 1 or options["background"]):
        raise ValueError(
            f"layers are on {' and '.join(devices)}: several ranks, and background=True, need all "
            "layers of a process on one device"
        )
    if not any_sharded(layers):
        return
    if offloaded := [layer.name for layer in layers if is_offloaded(layer.weight)]:
        raise ValueError(
            f"layer {offloaded[0]} has its weight on the CPU, but FSDP2 computes elsewhere: K-FAC "
            "does not work with CPUOffloadPolicy; remove the policy"
        )
    if options["overlap"]:
        raise ValueError(
            "overlap=True needs whole gradients, but ranks hold parts of the parameters; "
            "use overlap=False"
        )
    if options["strategy"] == "local_factors" and any_tensor_parallel(model):
        raise ValueError(
            "strategy=local_factors: ranks that share a tensor-parallel layer must all see it; "
            "choose owner_reduce"
        )


def _why(skipped: Sequence[SkippedModule]) -> str:
    """Return the skipped modules with reasons: one line for all modules of one kind."""
    if not skipped:
        return "no module of it has parameters"
    names: dict[str, list[str]] = {}
    for s in skipped:
        names.setdefault(f"{s.kind}: {s.reason}", []).append(s.name or "the model itself")
    rows = [f"  {len(each)} {kind} ({each[0]})" for kind, each in names.items()]
    if len(rows) > MOST_ROWS:
        rows[MOST_ROWS:] = [f"  and {len(rows) - MOST_ROWS} other kinds"]
    return "\n".join(["K-FAC skips all modules", *rows])


def check_damping(plan: Plan, options: KFACOptions, *, is_pipeline: bool) -> None:
    """Check that a rank has the factors and layers that its damping needs.

    ``is_pipeline`` says that other ranks hold further layers of the model.
    """
    is_adaptive = adaptive(options["damping"]) is not None
    if is_pipeline and is_adaptive:
        raise ValueError(
            "damping=LevenbergMarquardt(...) needs all layers of the model on each rank: "
            "with model_parallel give a number or a function of the step"
        )
    splits = options["factored_damping"] and plan.method == "inverse"
    if not plan.colocated and (splits or is_adaptive):
        name = "factored_damping" if splits else "an adaptive damping"
        raise ValueError(
            f"{name} needs both factors of a layer on one rank: set colocate_factors=True"
        )
    is_relative = options["damping"] is None and plan.method == "inverse"
    is_divided = any(p.layer.is_divided for p in plan.placements)
    if not plan.colocated and is_relative and is_divided:
        raise ValueError(
            f"strategy={plan.strategy}: block_size with method=inverse and damping=None needs all "
            "blocks of a factor on one rank: set colocate_factors=True, or damping to a number"
        )
