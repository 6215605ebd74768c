"""Whether ranks still hold one and the same model: checked by sums of its bits, not of its numbers.

What may differ is left out: parts of parameters that no other rank holds (FSDP2), buffers (batch
norm's statistics are of a rank's own examples between evaluations) and the optimizer's state.
"""

from __future__ import annotations

import json
from functools import cache

import torch
from torch import Tensor, nn

from kfac_bench.core import KFAC
from kfac_bench.core.distributed.dtensor import is_sharded
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import RunFailedError

CHUNK = 1 << 16
"""Elements summed up at a time: on a CPU they stay in its cache."""
BITS = {1: torch.uint8, 2: torch.int16}
"""By bytes of an element; larger ones are looked at as 32 bits and 32 bits."""
ODD = 0x1F3D_5B79_9B77_3D25
"""5 modulo 8: of all numbers, powers of such repeat themselves last."""


def check(model: nn.Module, kfac: KFAC | None, ranks: Ranks, step: int) -> None:
    """Raise :class:`RunFailedError` if ranks do not agree after ``step``; all ranks call it."""
    if (line := difference(model, kfac, ranks)) is not None:
        raise RunFailedError(
            f"after step {step} {line}: the run goes on from its last checkpoint if it is "
            "started again; on unlike machines set trainer.check_ranks=false"
        )


def difference(model: nn.Module, kfac: KFAC | None, ranks: Ranks) -> str | None:
    """A line on which ranks hold another plan or model than rank 0; None if all agree.

    All ranks call it with the bare model. It reads each parameter once and sends one message of
    8 bytes a rank; only where ranks differ a second one says where.
    """
    if ranks.world_size == 1:
        return None
    mine = fingerprint(model, kfac)
    others = ranks.unlike_main(json.dumps(mine))
    if not others:
        return None
    each: list[dict[str, object]] = [json.loads(m) for m in ranks.gather(json.dumps(mine).encode())]
    first, lines = each[0], []
    for rank in others:
        unlike = [name for name in first if each[rank].get(name) != first[name]]
        more = f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
        lines.append(f"rank {rank} has another {unlike[0] if unlike else 'set of names'}{more}")
    return f"ranks do not agree: {', '.join(lines)} than rank 0"


def fingerprint(model: nn.Module, kfac: KFAC | None) -> dict[str, object]:
    """By name: the K-FAC plan's digest and damping, a checksum of each parameter that is whole."""
    sums: dict[str, object] = {}
    if kfac is not None:
        sums |= kfac.fingerprint()
    whole = {name: p for name, p in model.named_parameters() if not _is_part(p)}
    if whole:
        with torch.no_grad():
            values = torch.stack([checksum(p) for p in whole.values()]).tolist()
        sums |= dict(zip(whole, values, strict=True))
    return sums


def checksum(x: Tensor) -> Tensor:
    """A number of 64 bits of the bits of ``x``, int64 []; it waits for no device.

    s = sum_i w_i b_i mod 2^64 with the bits b_i of element i as an integer and odd w_i: so one
    element with other bits always changes it, and integers sum up alike in any order. Other bits
    in several hide from random w_i in one case of 2^32 at the most (all of them signs).
    """
    bits = x.detach().contiguous().reshape(-1)
    bits = bits.view(BITS.get(bits.element_size(), torch.int32))
    weights = _weights(x.device)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in torch.split(bits, CHUNK):
        total = total * ODD + (part * weights[: len(part)]).sum()
    return total


@cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=generator)
    return (drawn | 1).to(device)


def _is_part(p: Tensor) -> bool:
    """Whether this rank holds what others do not; replicated DTensors are whole."""
    return is_sharded(p) and not all(x.is_replicate() for x in p.placements)  # type: ignore[attr-defined]
