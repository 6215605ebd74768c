"""Markdown tables from the figures of a measurement: the dict that the JSON file holds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CROWDED = 0.95
"""With less of its core, wall seconds of a process are in doubt."""
Results = Mapping[str, Any]
Entry = Mapping[str, Any]
"""One model's figures."""


def render(results: Results, *, head: bool = True, body: bool = True) -> str:
    """The machine and all tables, with the sentences without which they cannot be read."""
    entries = results["models"]
    parts = [_machine(results)] if head else []
    if body:
        parts += [*_steps(entries), *_stages(results), *_intervals(entries), *_memory(entries)]
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; all columns but the first to the right."""
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ruler, *rows))


def _machine(results: Results) -> str:
    found = results["machine"]
    hardware, versions = found["hardware"], found["versions"]
    on = hardware["cpu"] if results["device"] == "cpu" else hardware["gpus"]
    rates: dict[str, list[float]] = {}
    for e in results["models"]:
        rates.setdefault(e["precision"], []).append(rate(e))
    gemm = ", ".join(f"{statistics.median(x) / 1e9:,.0f} ({name})" for name, x in rates.items())
    speed = f"; a product of 2048x2048 fp32 runs at {gemm} GFLOP/s" if rates else ""
    alone = min((e["cpu_share"] for e in results["models"]), default=1.0)
    if results["clock"] == "cpu":
        speed += "; seconds are of CPU time"
    elif results["device"] == "cpu" and hardware["threads"] == 1 and alone < CROWDED:
        speed += f"; **others took the core: this process had {100 * alone:.0f} % of it**"
    quick = " **Tiny models: the figures mean nothing.**" if results["quick"] else ""
    return (
        f"{on}, {hardware['threads']} of {hardware['cpu_count']} CPU threads, torch "
        f"{versions['torch']}, {results['date']}, commit {found['git_commit'][:9] or 'unknown'}"
        f"{speed}. `{found['command']}`{quick}"
    )


def _steps(entries: Sequence[Entry]) -> Iterator[str]:
    rows = []
    for e in entries:
        sgd = statistics.median(e["sgd_s"])
        for method, settings in e["settings"].items():
            for s in settings:
                rows.append(
                    [
                        label(e), method, "{}, {}".format(*s["setting"]),
                        ms(sgd), ms(s["mean_s"]),
                        f"**{s['ratio']:.2f}** ({s['low']:.2f} \N{EN DASH} {s['high']:.2f})",
                        str(len(e["sgd_s"])),
                    ]
                )  # fmt: skip
    yield "### Mean step time over SGD"
    yield table(
        ["model", "method", "factors, decompositions every", "SGD ms", "K-FAC ms",
         "K-FAC / SGD (range)", "rounds"], rows,
    )  # fmt: skip
    yield (
        "Medians over interleaved rounds, of blocks of steps of one kind (plain: precondition "
        "only; factors: update them, too; decompose: do that, too), put together as plain + "
        "(factors - plain) / f + (decompose - factors) / d for every f and d steps; the range is "
        "of single rounds. Both variants share the process, the batch and the optimizer (SGD, "
        "momentum 0.9)."
    )


def _stages(results: Results) -> Iterator[str]:
    rows = []
    for e in results["models"]:
        sgd = statistics.median(e["sgd_s"])
        for method in e["methods"]:
            for name, seconds, floor in stages(e, method, host=results["clock"] == "wall"):
                measured = [ms(seconds), f"{seconds / sgd:.3f}"]
                against = [ms(floor), f"{seconds / floor:.1f}"] if floor else ["", ""]
                rows.append([label(e), method, name, *measured, *against])
    yield "### Stages, each time they run"
    yield table(
        ["model", "method", "stage", "ms", "SGD steps", "floor ms", "measured / floor"], rows
    )
    yield (
        "Rows with a minus are differences of whole steps and so hold all that a stage costs; the "
        "others are the host's wall seconds inside the stage (`statistics()`): on a CPU, without "
        "`--clock cpu`. Floor: "
        "FLOPs at the rate of the matrix product above, half of a symmetric product, 3x3 "
        "convolutions of stride 1 without patches."
    )


FLOORS = {
    "factors - plain": ("ComputeFactor", "ComputeSecondMoment"),
    "decompose - factors": ("Decompose",),
    "plain - SGD": ("Precondition",),
}


def stages(entry: Entry, method: str, *, host: bool) -> Iterator[tuple[str, float, float]]:
    """Stage, its seconds and the seconds of its floor (0: none); the ``host``'s own, too."""
    times = {kind: statistics.median(x) for kind, x in entry["methods"][method].items()}
    times["SGD"] = statistics.median(entry["sgd_s"])
    floor = {op: n / rate(entry) for op, n in entry["floor_flop"][method].items()}
    for name, ops in FLOORS.items():
        minuend, subtrahend = name.split(" - ")
        seconds = times[minuend] - times[subtrahend]
        yield name, seconds, sum(floor.get(op, 0.0) for op in ops)
    if not host:
        return
    by_kind = {
        kind: {op: statistics.median(x) for op, x in by_op.items()}
        for kind, by_op in entry["stage_s"][method].items()
    }
    for op in sorted({op for by_op in by_kind.values() for op in by_op}):
        most = max(by_op.get(op, 0.0) for by_op in by_kind.values())
        # where it runs with the least else: the first kind of step with about its full time
        seconds = next(x for b in by_kind.values() if (x := b.get(op, 0.0)) >= most / 2)
        yield op, seconds, floor.get(op, 0.0)


def _intervals(entries: Sequence[Entry]) -> Iterator[str]:
    rows = []
    for e in entries:
        for interval in e["intervals"]:
            for name, s in interval["summary"].items():
                rows.append(
                    [
                        label(e), name, "{}, {}".format(*interval["setting"]),
                        ms(s["mean_s"]), ms(s["median_s"]), ms(s["slowest_s"]),
                        f"{s['slowest_over_median']:.2f}", ms(s["first_s"]),
                    ]
                )  # fmt: skip
    if rows:
        yield "### Whole intervals, step by step"
        yield table(
            ["model", "variant", "factors, decompositions every", "mean ms", "median ms",
             "slowest ms", "slowest / median", "first ms"], rows,
        )  # fmt: skip
        yield "The first step makes every decomposition; it is in no other column."


def _memory(entries: Sequence[Entry]) -> Iterator[str]:
    rows = []
    for e in entries:
        found = e["memory_bytes"]
        for method in e["methods"]:
            if method in found:
                over = 100 * (found[method] / max(1, found["sgd"]) - 1)
                sizes = [f"{found[x] / 1e6:,.0f}" for x in ("sgd", method)]
                rows.append([label(e), method, *sizes, f"{over:+.0f} %"])
    if rows:
        yield "### Peak memory"
        yield table(["model", "method", "SGD MB", "K-FAC MB", "over SGD"], rows)
        yield (
            "Of three steps that do everything: weights, gradients, momentum, activations and "
            "K-FAC; on a CPU the growth of a fresh process' resident set, on a GPU of the "
            "allocator."
        )


def rate(entry: Entry) -> float:
    """FLOP/s of the matrix product, median over rounds."""
    return float(statistics.median(entry["gemm_flop_s"]))


def label(entry: Entry) -> str:
    """Model, batch and precision."""
    precision = "" if entry["precision"] == "fp32" else f", {entry['precision']}"
    return f"{entry['name']} ({entry['shape']}{precision})"


def ms(seconds: float) -> str:
    """Milliseconds with about three digits."""
    x = 1e3 * seconds
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.2f}" if abs(x) >= 1 else f"{x:.3f}"
