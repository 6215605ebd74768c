"""Measure the peak memory of a few full steps, above the memory before the model existed."""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

# peaks() starts this file directly, and then it does not find its package.
if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.measure import Case, Variant, set_precision, synchronize
from benchmarks.models import Size
from kfac_bench.errors import UsageError

STEPS = 3


def peaks(
    case: Case, methods: Sequence[str], *, steps: int = STEPS, in_process: bool = False
) -> dict[str, int]:
    """Return the peak bytes by method, and for `sgd`.

    The peak includes weights, gradients, momentum, activations and K-FAC. Every K-FAC step updates
    the factors and decomposes them. On a GPU torch's allocator counts. On a CPU the resident memory
    counts, which is exact only in a new process per variant.
    """
    if in_process or case.device == "cuda":
        return {m or "sgd": peak_bytes(case, m, steps) for m in (None, *methods)}
    found = {}
    for method in (None, *methods):
        spec = json.dumps(
            {"case": asdict(case), "method": method, "steps": steps}
            | {"threads": torch.get_num_threads()}
        )
        done = subprocess.run(  # noqa: S603
            [sys.executable, __file__, spec], capture_output=True, text=True
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise UsageError(f"memory of {case.name}, {method or 'sgd'}: {reason}")
        found[method or "sgd"] = int(done.stdout.split()[-1])
    return found


def peak_bytes(case: Case, method: str | None, steps: int) -> int:
    """Return the peak of the steps above the memory after all imports and a tiny model's step."""
    set_precision(case.precision)
    tiny = Variant(replace(case, size=Size(quick=True)), method)
    tiny.step()
    del tiny
    gc.collect()
    before = _reset_peak(case.device)
    variant = Variant(case, method)
    for _ in range(steps):
        variant.step()
    synchronize(case.device)
    return _peak(case.device) - before


def _reset_peak(device: str) -> int:
    """Reset the peak, and return the bytes in use now."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    # glibc returns the memory that the tiny model has freed.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    clear = Path("/proc/self/clear_refs")
    # Only Linux can reset the peak. Elsewhere the peak of the imports is the baseline.
    if not clear.exists():
        return _peak(device)
    clear.write_text("5")
    return _resident("VmRSS")


def _peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if Path("/proc/self/status").exists():
        # ru_maxrss is of no use: a process inherits it from the process that started it.
        return _resident("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    size = Size(**spec["case"].pop("size"))
    try:
        print(peak_bytes(Case(**spec["case"], size=size), spec["method"], spec["steps"]))
    except UsageError as error:
        sys.exit(str(error))
