"""The check that all ranks hold the same model, by sums over the bits of its weights.

Some things may differ, so they are not checked: parts of parameters that no other rank holds
(FSDP2), buffers (between evaluations, batch norm has statistics of a rank's own examples), and the
state of the optimizer.
"""

import json
from functools import cache

import torch
from torch import Tensor, nn

from kfac_bench.core import KFAC
from kfac_bench.core.distributed.dtensor import is_sharded
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import RunFailedError

CHUNK = 1 << 16
"""Elements that are summed at a time; they stay in the cache of a CPU."""
BITS = {1: torch.uint8, 2: torch.int16}
"""Integer dtypes by the bytes of an element. Larger elements count as pieces of 32 bits."""
ODD = 0x1F3D_5B79_9B77_3D25
"""A multiplier that is 5 modulo 8: the powers of such numbers have the longest period."""


def check(model: nn.Module, kfac: KFAC | None, ranks: Ranks, step: int) -> None:
    """Check that ranks agree after ``step``. All ranks call this.

    Raises:
        RunFailedError: They do not.
    """
    if (line := difference(model, kfac, ranks)) is not None:
        raise RunFailedError(
            f"after step {step} {line}: start the run again to continue from its last checkpoint; "
            "on machines of different kinds set trainer.check_ranks=false"
        )


def difference(model: nn.Module, kfac: KFAC | None, ranks: Ranks) -> str | None:
    """Return a line that names the ranks that differ from rank 0, or None if all agree.

    All ranks call this with the bare model. It reads each parameter once and sends one message of 8
    bytes per rank. Only if ranks differ, a second message says where.
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
    """Return K-FAC's fingerprint, and a checksum of each whole parameter, by name."""
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
    """Return a checksum of the bits of ``x`` as int64 [], without a wait for the device.

    It is s = sum_i w_i b_i mod 2^64, where b_i are the bits of element i as an integer, and w_i are
    odd random numbers. A single element with other bits always changes s. Sums of integers do not
    depend on their order. If several elements differ, s is equal with a probability of 2^-32 at
    most (when all differences are signs).
    """
    bits = x.detach().contiguous().reshape(-1)
    bits = bits.view(BITS.get(bits.element_size(), torch.int32))
    weights = _weights(x.device)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    # Horner's scheme: each part has another power of ODD, so that the order of parts matters.
    for part in torch.split(bits, CHUNK):
        total = total * ODD + (part * weights[: len(part)]).sum()
    return total


@cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=generator)
    return (drawn | 1).to(device)


def _is_part(p: Tensor) -> bool:
    """Return whether this rank holds only a part of ``p``; replicated DTensors are whole."""
    return is_sharded(p) and not all(x.is_replicate() for x in p.placements)  # type: ignore[attr-defined]
