"""DeepSpeed with ZeRO stages 0 to 2, started by torchrun, srun or the deepspeed launcher."""

import copy
import gc
import importlib.util
import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kfac_bench.config.groups import BackendConfig
from kfac_bench.core.distributed import deepspeed_zero
from kfac_bench.core.distributed.collective import Collective, TorchCollective
from kfac_bench.distributed.backend import Backend, refuse_scalars
from kfac_bench.distributed.backends.ddp import launched
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import MissingPackageError

BUCKET_NUMEL = 1 << 25
"""Gradient elements in one message of ZeRO, which allocates them (DeepSpeed's default: 2 GB)."""

_NOT_SETTINGS = ("params", "step")
"""Entries of a parameter group that are no settings. Some optimizers count their steps there."""


class DeepSpeed(Backend):
    """The backend that trains with DeepSpeed's engine.

    ZeRO replaces an optimizer's parameters by parts of them. The engine therefore gets a copy of
    the optimizer. The run and K-FAC keep the original, which has whole parameters and the learning
    rate, and whose `step` calls the engine's.

    The model runs outside the engine, which sees the loss alone. Otherwise the engine would turn
    autocast off, and would take K-FAC's `fisher_backward` for its own backward.
    """

    def __init__(self, ranks: Ranks, zero_stage: int) -> None:
        super().__init__(ranks)
        self._stage = zero_stage
        self._engine: Any = None

    def collective(self) -> Collective:
        return TorchCollective()

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        refuse_scalars(model, "deepspeed")
        self._parts = copy.copy(optimizer)
        # torch's copy of an optimizer drops the attributes of a subclass, so add them again.
        vars(self._parts).update(
            {k: v for k, v in vars(optimizer).items() if k not in vars(self._parts)}
        )
        self._parts.param_groups = [dict(g, params=[*g["params"]]) for g in optimizer.param_groups]
        self._parts.state = defaultdict(dict)
        numel = sum(p.numel() for p in model.parameters())
        stage = {"stage": self._stage, "reduce_bucket_size": min(numel, BUCKET_NUMEL)}
        self._engine = _initialize(
            model=_Loss(model),
            optimizer=self._parts,
            config={
                "train_micro_batch_size_per_gpu": 1,
                # The engine would clip at norm 1 by default.
                "gradient_clipping": 0.0,
                "zero_optimization": stage,
                "zero_allow_untested_optimizer": True,
            },
        )
        optimizer.register_step_pre_hook(lambda *_: self._step(optimizer))
        return model, optimizer

    def part(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Average in each part with ZeRO 2, which keeps no whole gradient; see `Backend.part`."""
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(self._engine(loss), scale_wrt_gas=False)

    def synchronize(self, optimizer: Optimizer) -> None:
        deepspeed_zero.gather_gradients(self._engine)

    def _step(self, optimizer: Optimizer) -> None:
        """Step the engine. A hook calls this before `optimizer.step()`, which finds no gradient."""
        for whole, parts in zip(optimizer.param_groups, self._parts.param_groups, strict=True):
            parts.update({k: v for k, v in whole.items() if k not in _NOT_SETTINGS})
        deepspeed_zero.scatter_gradients(self._engine)
        self._engine.step()

    def state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        whole = optimizer.state_dict()
        whole["state"] = self._whole_state(optimizer)
        for group, parts in zip(whole["param_groups"], self._parts.param_groups, strict=True):
            group.update({k: parts[k] for k in ("step",) if k in parts})
        return {"model": model.state_dict(), "optimizer": whole} if self.ranks.is_main else {}

    def _whole_state(self, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        """Return the optimizer's state by number of the parameter. All ranks call it together."""
        if self._stage == 0:
            return dict(self._parts.state_dict()["state"])
        from deepspeed.utils import safe_get_full_optimizer_state

        params = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = {p: i for i, p in enumerate(params)}
        state = {}
        for group, part in self._groups(optimizer):
            for p in group if part in self._parts.state else []:
                # An entry that is no part is a count of steps. Each parameter gets its own copy,
                # because the whole optimizer would count up a shared one several times.
                state[numbers[p]] = {
                    key: safe_get_full_optimizer_state(p, key)
                    if _is_part(value, part)
                    else copy.deepcopy(value)
                    for key, value in self._parts.state[part].items()
                }
        return state

    def load(
        self, model: nn.Module, optimizer: Optimizer, shards: Sequence[Mapping[str, Any]]
    ) -> None:
        super().load(model, optimizer, shards)
        if self._stage == 0:
            self._parts.load_state_dict(optimizer.state_dict())
        else:
            # ZeRO trains its own copy of the weights: take the loaded ones over.
            self._engine.optimizer.refresh_fp32_params()
            for group, part in self._groups(optimizer):
                self._load_part(group, part, optimizer.state)
        optimizer.state.clear()

    def _load_part(
        self, group: Sequence[nn.Parameter], part: Tensor, state: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """Keep this rank's part of the whole `state` of a group's parameters."""
        from deepspeed.utils import (
            lazy_init_hp_params_optimizer_state,
            safe_set_full_optimizer_state,
        )

        stated = [p for p in group if state.get(p)]
        if not stated:
            return
        first = stated[0]
        self._parts.state[part] = {
            key: torch.zeros_like(part) if _is_part(value, first) else value
            for key, value in state[first].items()
        }
        lazy_init_hp_params_optimizer_state(group, part, self._parts.state)
        for p in stated:
            for key, value in state[p].items():
                if _is_part(value, p):
                    safe_set_full_optimizer_state(p, value, key)

    def _groups(self, optimizer: Optimizer) -> Iterator[tuple[list[nn.Parameter], Tensor]]:
        """Yield the trained parameters of each group, and this rank's part as one flat tensor."""
        for whole, parts in zip(optimizer.param_groups, self._parts.param_groups, strict=True):
            yield [p for p in whole["params"] if p.requires_grad], parts["params"][0]

    def close(self) -> None:
        """Destroy the engine, before the process group ends: else gloo sometimes aborts at exit."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
            gc.collect()


class _Loss(nn.Module):
    """A module for the engine: it has a model's parameters and passes a loss through."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: Tensor) -> Tensor:
        """Return the loss as a new tensor, on which the engine can put its hooks."""
        return loss.clone()


def _is_part(value: object, of: Tensor) -> bool:
    """Return whether an entry of the state has one number per element of the tensor `of`.

    A count of steps has not.
    """
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == of.shape


def _initialize(**arguments: Any) -> Any:
    """Return the engine of `deepspeed.initialize`, without its warnings about the optimizer."""
    import deepspeed

    log = logging.getLogger("DeepSpeed")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        engine, *_ = deepspeed.initialize(**arguments)
    finally:
        log.setLevel(level)
    return engine


@contextmanager
def join(config: BackendConfig, device: str, stage: int) -> Iterator[Backend]:
    """Join the ranks that torchrun, srun or the deepspeed launcher started."""
    if importlib.util.find_spec("deepspeed") is None:
        raise MissingPackageError("deepspeed", "backend=deepspeed")

    def make(ranks: Ranks) -> Backend:
        prepare(ranks.device)
        return DeepSpeed(ranks, stage)

    with launched(config, device, make) as backend, warnings.catch_warnings():
        # DeepSpeed calls functions of torch that are deprecated.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
        try:
            yield backend
        finally:
            if isinstance(backend, DeepSpeed):
                backend.close()


def prepare(device: torch.device) -> None:
    """Tell DeepSpeed the device, before its first use.

    On CPUs it would otherwise compile an operation for a minute or two that only inference needs.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed.ops

    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}
