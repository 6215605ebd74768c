"""DeepSpeed with ZeRO stages 0 to 2, started by torchrun or by the deepspeed launcher."""

from __future__ import annotations

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

from kfac_bench.config import BackendConfig, DeepSpeedConfig
from kfac_bench.core.distributed import deepspeed_zero
from kfac_bench.core.distributed.collective import Collective, TorchCollective
from kfac_bench.distributed.backend import Backend
from kfac_bench.distributed.ddp import launched
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import UsageError

BUCKET_NUMEL = 1 << 25
"""Elements of gradients that ZeRO reduces at once; it allocates as much (DeepSpeed's own: 2 GB)."""

_NO_SETTINGS = ("params", "step")
"""Of a parameter group; some optimizers count their steps there."""


class DeepSpeed(Backend):
    """The engine works on a copy of the optimizer, whose parameters ZeRO replaces by parts.

    So the optimizer that the run and K-FAC know keeps whole parameters and says the learning
    rate; its ``step`` is the engine's. The model runs outside of the engine, which is given the
    loss alone: it would turn autocast off, and take ``fisher_backward`` for its own backward.
    """

    def __init__(self, ranks: Ranks, zero_stage: int) -> None:
        super().__init__(ranks)
        self._stage = zero_stage
        self._engine: Any = None

    def collective(self) -> Collective:
        """See :meth:`Backend.collective`."""
        return TorchCollective()

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """See :meth:`Backend.wrap`."""
        self._parts = copy.copy(optimizer)  # torch drops what a subclass keeps beside its state
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
                "gradient_clipping": 0.0,  # 1 if nothing is said
                "zero_optimization": stage,
                "zero_allow_untested_optimizer": True,
            },
        )
        optimizer.register_step_pre_hook(lambda *_: self._step(optimizer))
        return model, optimizer

    def part(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """See :meth:`Backend.part`; ZeRO 2, which keeps no whole gradient, meets at each part."""
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """See :meth:`Backend.backward`."""
        self._engine.backward(self._engine(loss), scale_wrt_gas=False)

    def synchronize(self, optimizer: Optimizer) -> None:
        """See :meth:`Backend.synchronize`."""
        deepspeed_zero.gather_gradients(self._engine)

    def _step(self, optimizer: Optimizer) -> None:
        """Before ``optimizer.step()``, which then finds no gradient."""
        for whole, parts in zip(optimizer.param_groups, self._parts.param_groups, strict=True):
            parts.update({k: v for k, v in whole.items() if k not in _NO_SETTINGS})
        deepspeed_zero.scatter_gradients(self._engine)
        self._engine.step()

    def state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """See :meth:`Backend.state`."""
        whole = optimizer.state_dict()
        whole["state"] = self._whole_state(optimizer)
        for group, parts in zip(whole["param_groups"], self._parts.param_groups, strict=True):
            group.update({k: parts[k] for k in ("step",) if k in parts})
        return {"model": model.state_dict(), "optimizer": whole} if self.ranks.is_main else {}

    def _whole_state(self, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        """Of the optimizer by number of the parameter; all ranks call it."""
        if self._stage == 0:
            return dict(self._parts.state_dict()["state"])
        from deepspeed.utils import safe_get_full_optimizer_state

        params = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = {p: i for i, p in enumerate(params)}
        state = {}
        for group, part in self._groups(optimizer):
            for p in group if part in self._parts.state else []:
                state[numbers[p]] = {
                    key: safe_get_full_optimizer_state(p, key)
                    if _is_part(value, part)
                    else copy.deepcopy(value)  # a count of steps: each parameter has its own
                    for key, value in self._parts.state[part].items()
                }
        return state

    def load(
        self, model: nn.Module, optimizer: Optimizer, shards: Sequence[Mapping[str, Any]]
    ) -> None:
        """See :meth:`Backend.load`."""
        super().load(model, optimizer, shards)
        if self._stage == 0:
            self._parts.load_state_dict(optimizer.state_dict())
        else:
            self._engine.optimizer.refresh_fp32_params()  # from the model's
            for group, part in self._groups(optimizer):
                self._load_part(group, part, optimizer.state)
        optimizer.state.clear()

    def _load_part(
        self, group: Sequence[nn.Parameter], part: Tensor, state: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """Of the whole ``state`` of a group's parameters, this rank's part."""
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
        """Parameters that ZeRO trains, and this rank's part of them: one flat tensor a group."""
        for whole, parts in zip(optimizer.param_groups, self._parts.param_groups, strict=True):
            yield [p for p in whole["params"] if p.requires_grad], parts["params"][0]

    def close(self) -> None:
        """Before the process group goes: else gloo now and then aborts at exit."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
            gc.collect()


class _Loss(nn.Module):
    """What the engine sees: the parameters of a model, and a loss that passes through."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: Tensor) -> Tensor:
        """The loss as a tensor of its own, for the engine's hooks."""
        return loss.clone()


def _is_part(value: object, of: Tensor) -> bool:
    """Whether an entry of the state is a number for each of a tensor's; a count of steps is not."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == of.shape


def _initialize(**arguments: Any) -> Any:
    """``deepspeed.initialize``: the engine; without what it says of any optimizer but Adam."""
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
def join(config: BackendConfig, device: str) -> Iterator[Backend]:
    """The ranks that torchrun or the deepspeed launcher started."""
    assert isinstance(config, DeepSpeedConfig)
    if importlib.util.find_spec("deepspeed") is None:
        raise UsageError(
            "backend=deepspeed: DeepSpeed is not installed: DS_BUILD_OPS=0 pip install "
            "'kfac-bench[deepspeed]'"
        )
    stage = config.zero_stage

    def make(ranks: Ranks) -> Backend:
        prepare(ranks.device)
        return DeepSpeed(ranks, stage)

    with launched(config, device, make) as backend, warnings.catch_warnings():
        # torch's deprecations of what DeepSpeed calls
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
        try:
            yield backend
        finally:
            if isinstance(backend, DeepSpeed):
                backend.close()


def prepare(device: torch.device) -> None:
    """Before DeepSpeed is first used: tell it the device.

    On CPUs it would compile, for a minute or two, a message that only its inference sends.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed.ops

    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}
