"""Checks of K-FAC on a GPU: its step is correct, and the host does not wait for the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import measure
from benchmarks.measure import KINDS, Case, Variant
from benchmarks.models import Size
from kfac_bench.core import KFAC
from kfac_bench.core.schedule import Schedule

TOLERANCE = 1e-3
"""Largest ||fp32 - float64|| / ||float64|| of any tensor. Rounding alone leaves about 1e-5."""
Tensors = dict[str, Tensor]


def check_step(device: str, method: str) -> dict[str, Any]:
    """Compare gradients and factors of three steps in fp32 with float64 on the CPU."""
    measure.set_precision("fp32")
    result: dict[str, Any] = {"check": f"{method}: fp32 on {device} against float64 on the CPU"}
    try:
        found = _train(device, torch.float32, method)
    except RuntimeError as error:
        return result | {"passed": False, "message": str(error).splitlines()[0]}
    expected = _train("cpu", torch.float64, method)
    errors = [_worst(*pair) for pair in zip(found, expected, strict=True)]
    return result | {
        "gradient_error": errors[0],
        "factor_error": errors[1],
        "tolerance": TOLERANCE,
        "passed": all(error <= TOLERANCE for error in errors),
    }


def _train(device: str, dtype: torch.dtype, method: str) -> tuple[Tensors, Tensors]:
    """Return the last gradients and the running factors of a small convolutional network."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 3 * 3, 10),
    )
    batches = torch.randn(3, 16, 3, 8, 8)
    labels = torch.randint(10, (3, 16), device="cpu").to(device)
    model = model.to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(
        model, optimizer, method=method, damping=0.03, update_freq=1, factor_update_freq=1
    )  # fmt: skip
    for x, y in zip(batches.to(device, dtype), labels, strict=True):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        kfac.step()
        optimizer.step()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return grads, dict(_factors(kfac.state_dict()["layers"], ""))


def _factors(state: Mapping[str, Any], path: str) -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if key == "factor" and isinstance(value, Tensor):
            yield path, value
        elif isinstance(value, Mapping):
            yield from _factors(value, f"{path}.{key}")


def _worst(found: Tensors, expected: Tensors) -> float:
    if not expected or found.keys() != expected.keys():
        return float("inf")
    pairs = [(found[name].cpu().double(), expected[name].double()) for name in expected]
    errors = [(a - b).norm() / b.norm() for a, b in pairs]
    # Python's maximum would pass over an error that is NaN.
    return float(torch.stack(errors).max())


def check_sync(device: str, method: str, kind: str) -> dict[str, Any]:
    """Check whether `kfac.step()` makes the host wait for the GPU.

    A step without a decomposition must not wait, so torch raises at a synchronizing call. In a step
    with a decomposition the synchronizing calls are counted.
    """
    # The second step fills caches, the third is checked.
    schedule = ("decompose", kind, kind)

    def every(*kinds: str) -> Schedule:
        return lambda step: 1 if schedule[min(step, 2)] in kinds else step + 1

    case = Case("resnet32", Size(quick=True), device)
    variant = Variant(case, method, every("factors", "decompose"), every("decompose"), spread=False)
    assert variant.kfac is not None
    for _ in schedule[1:]:
        variant.step()
    variant.backward()
    allowed = kind == "decompose"
    what = f"waits in a {kind} step, counted" if allowed else f"no waiting in a {kind} step"
    found = {"check": f"{method}: {what}"}
    if device != "cuda":
        return found | {"passed": None, "message": "needs CUDA"}
    return found | watch(variant.kfac.step, allowed)


def watch(step: Callable[[], None], allowed: bool) -> dict[str, Any]:
    """Run `step`. torch raises at a call that waits for the GPU, or counts it if `allowed`."""
    try:
        with _sync_debug("warn" if allowed else "error") as caught:
            step()
    except RuntimeError as error:
        return {"passed": False, "message": str(error).splitlines()[0]}
    # torch also warns, once, that this mode does not detect all synchronizing operations.
    waits = sum("called a synchronizing" in str(w.message) for w in caught)
    return {"passed": True, "waits": waits}


@contextmanager
def _sync_debug(mode: str) -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode(mode)
        try:
            yield caught
        finally:
            torch.cuda.set_sync_debug_mode("default")


def run_all(device: str, methods: tuple[str, ...]) -> list[dict[str, Any]]:
    """Run all checks. A failed check is a row of the result, not an exception."""
    results = []
    for method in methods:
        results.append(check_step(device, method))
        results += [check_sync(device, method, kind) for kind in KINDS]
    return results
