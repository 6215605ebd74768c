"""The cost of a checkpoint: processor seconds within the step, and in the thread beside it."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from kfac_bench.distributed.ranks import Ranks
from kfac_bench.report.tables import Table, Value
from kfac_bench.training import checkpoint
from kfac_bench.training.saving import CHECKPOINT_INTERVAL_S

SIZES_MB = (1, 5, 50, 200)
TENSORS = 20


def table() -> Table:
    """Measure checkpoints of several sizes in a temporary folder.

    The times are processor time, because other programs may run on this machine.
    """
    columns = (
        "MB",
        "ms in the step",
        "ms in the thread",
        "share of a minute in the step",
        "share of a minute in the thread",
    )
    rows: list[list[Value]] = []
    for size in SIZES_MB:
        step_s, thread_s = _measure(size)
        shares = [f"{s / CHECKPOINT_INTERVAL_S:.2%}" for s in (step_s, thread_s)]
        rows.append([size, 1000 * step_s, 1000 * thread_s, *shares])
    return Table("What a checkpoint costs", columns, rows)


def _measure(megabytes: int) -> tuple[float, float]:
    """Measure the second of two checkpoints: the first also takes memory from the system."""
    numel = megabytes * 10**6 // 4 // TENSORS
    state = {"model": {str(i): torch.randn(numel) for i in range(TENSORS)}}
    step_s, thread_s = 0.0, 0.0
    with tempfile.TemporaryDirectory(prefix="kfac-faults-") as folder:
        writer = checkpoint.Writer(Path(folder), Ranks(torch.device("cpu")), keep_last=1)
        for step in (1, 2):
            began = time.thread_time()
            writer.start(step, state)
            step_s = time.thread_time() - began
            writer.finish()
            saved = writer.pop_saved()
            assert saved is not None
            thread_s = saved.cpu_s
    return step_s, thread_s
