"""PyTorch's FSDP2 (`fully_shard`): each rank holds a part of every parameter."""

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
from kfac_bench.distributed.backend import Backend, refuse_scalars
from kfac_bench.distributed.backends.ddp import launched


class FSDP2(Backend):
    """The backend in which each rank holds a part of every parameter.

    A block's parameters are whole only while the block computes.
    """

    lockstep = True

    def collective(self) -> Collective:
        return TorchCollective()

    def shard(self, model: nn.Module) -> nn.Module:
        """Distribute each block alone and the other parameters together; see `Backend.shard`."""
        refuse_scalars(model, "fsdp2")
        mesh = init_device_mesh(self.ranks.device.type, (self.ranks.world_size,))
        for block in blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        # PyTorch warns if a wrapped module returns a view, because a view that is changed in place
        # gets no gradient. The model's own output goes to a loss, which changes nothing in place.
        # The warning stays for outputs of blocks.
        root = f"FSDP2-wrapped module ({type(model).__name__}) returned a view"
        warnings.filterwarnings("ignore", re.escape(root), UserWarning)
        return model

    def part(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last)
        return nullcontext()

    def state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Gather one tensor after the other, for rank 0 alone; see `Backend.state`."""
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
        """Return `x`; a tensor comes back whole and on the CPU, on rank 0 only."""
        if not isinstance(x, Tensor):
            return x
        # All ranks take part in gathering a tensor, also those that do not keep it.
        whole = full(x.detach())
        return whole.cpu() if self.ranks.is_main else None

    def load(
        self, model: nn.Module, optimizer: Optimizer, shards: Sequence[Mapping[str, Any]]
    ) -> None:
        """Keep this rank's part of the state, which each rank has read; see `Backend.load`."""
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
    """Yield the members of the outermost lists of modules, if they have parameters."""
    for child in model.children():
        if not _is_list(model) or _is_list(child):
            yield from blocks(child)
        elif any(True for _ in child.parameters()):
            yield child


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList)


join = partial(launched, make=FSDP2)
