"""PyTorch's FSDP2 (``fully_shard``): each rank holds a part of every parameter."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

from kfac_bench.core.distributed.collective import Collective, TorchCollective
from kfac_bench.core.distributed.dtensor import full, shard_like
from kfac_bench.distributed.backend import Backend
from kfac_bench.distributed.ddp import launched


class FSDP2(Backend):
    """Parameters are whole while their block computes, gradients averaged into parts."""

    lockstep = True

    def collective(self) -> Collective:
        """See :meth:`Backend.collective`."""
        return TorchCollective()

    def shard(self, model: nn.Module) -> nn.Module:
        """See :meth:`Backend.shard`: blocks are gathered one by one, the rest with the root."""
        mesh = init_device_mesh(self.ranks.device.type, (self.ranks.world_size,))
        for block in blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        # PyTorch warns of outputs that are views, for one that is changed in place has no gradient.
        # Those of the whole model go to a loss, which changes nothing; those of blocks are told of.
        root = f"FSDP2-wrapped module ({type(model).__name__}) returned a view"
        warnings.filterwarnings("ignore", re.escape(root), UserWarning)
        return model

    def part(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """See :meth:`Backend.part`."""
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last)
        return nullcontext()

    def state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """See :meth:`Backend.state`: tensor by tensor put together, and kept by rank 0 alone."""
        kept = optimizer.state_dict()
        states = {
            i: {k: self._whole(v) for k, v in entry.items()} for i, entry in kept["state"].items()
        }
        saved = {
            "model": {k: self._whole(v) for k, v in model.state_dict().items()},
            "optimizer": kept | {"state": states},
        }
        return saved if self.ranks.is_main else {}

    def _whole(self, x: Any) -> Any:
        """A tensor on the CPU; elsewhere than on rank 0 nothing is kept of it."""
        if not isinstance(x, Tensor):
            return x
        whole = full(x.detach())
        return whole.cpu() if self.ranks.is_main else None

    def load(
        self, model: nn.Module, optimizer: Optimizer, shards: Sequence[Mapping[str, Any]]
    ) -> None:
        """See :meth:`Backend.load`: every rank has read the whole and keeps its part."""
        now, saved = model.state_dict(), shards[0]["model"]
        model.load_state_dict(
            {k: shard_like(v, now[k]) if k in now else v for k, v in saved.items()}
        )
        params = [p for group in optimizer.param_groups for p in group["params"]]
        saved = shards[0]["optimizer"]
        states = {
            i: {k: shard_like(v, params[i]) if isinstance(v, Tensor) else v for k, v in s.items()}
            for i, s in saved["state"].items()
            if i < len(params)
        }
        optimizer.load_state_dict({**saved, "state": states})


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Members of the outermost lists and sequences of modules, if they have parameters."""
    for child in model.children():
        if not _is_list(model) or _is_list(child):
            yield from blocks(child)
        elif any(True for _ in child.parameters()):
            yield child


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList)


join = partial(launched, make=FSDP2)
