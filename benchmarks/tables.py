"""Markdown tables of a measurement, from the dict that the JSON file holds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CROWDED = 0.95
"""If a process gets a smaller share of its core, its wall seconds are in doubt."""
Results = Mapping[str, Any]
Entry = Mapping[str, Any]
"""The results of one model."""


def render(results: Results, *, head: bool = True, body: bool = True) -> str:
    """Return the machine and all tables, each with an explanation."""
    entries = results["models"]
    parts = [_machine(results)] if head else []
    if body:
        parts += [*_steps(entries), *_stages(results), *_intervals(entries), *_memory(entries)]
    return "\n\n".join(parts) + "\n"


def render_together(measurements: Sequence[Results]) -> str:
    """Return the machine of each measurement, and tables of all models together.

    Args:
        measurements: At least one, all of the same device and clock.
    """
    entries = [entry for results in measurements for entry in results["models"]]
    heads = [render(results, body=False) for results in measurements]
    return "\n".join([*heads, render({**measurements[0], "models": entries}, head=False)])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first column is left-aligned and the others right-aligned."""
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
    has_rates = rates and results["device"] == "cpu"
    speed = f"; a product of 2048x2048 fp32 runs at {gemm} GFLOP/s" if has_rates else ""
    alone = min((e["cpu_share"] for e in results["models"]), default=1.0)
    if results["clock"] == "cpu":
        speed += "; seconds are of CPU time"
    elif results["device"] == "cpu" and hardware["threads"] == 1 and alone < CROWDED:
        speed += f"; **other programs used the core: this process had {100 * alone:.0f} % of it**"
    quick = " **Tiny models: the numbers mean nothing.**" if results["quick"] else ""
    return (
        f"{on}, {hardware['threads']} of {hardware['cpu_count']} CPU threads, torch "
        f"{versions['torch']}, {results['date']}, commit {found['git_commit'][:9] or 'unknown'}"
        f"{speed}. `{found['command']}`{quick}"
    )


def _steps(entries: Sequence[Entry]) -> Iterator[str]:
    rows = []
    for e in entries:
        sgd, rounds = statistics.median(e["sgd_s"]), len(e["sgd_s"])
        for method, settings in e["settings"].items():
            for s in settings:
                rows.append(
                    [
                        label(e), method, "{}, {}".format(*s["setting"]),
                        ms(sgd), ms(s["mean_s"]),
                        f"**{s['ratio']:.2f}**{span(s) if rounds > 1 else ''}",
                        str(rounds),
                    ]
                )  # fmt: skip
    yield "### Mean step time over SGD"
    yield table(
        ["model", "method", "factors, decompositions every", "SGD ms", "K-FAC ms",
         "K-FAC / SGD (range)", "rounds"], rows,
    )  # fmt: skip
    yield (
        "Numbers are medians over interleaved rounds. The range covers single rounds. A round "
        "times three kinds of steps: plain (precondition only), factors (also update factors) and "
        "decompose (also decompose). The mean step is plain + (factors - plain) / f + (decompose - "
        "factors) / d, for factors every f steps and decompositions every d steps. SGD and K-FAC "
        "share the process, the batch and the optimizer (SGD, momentum 0.9)."
    )


def span(setting: Mapping[str, float]) -> str:
    """Return the lowest and the highest round in brackets."""
    return f" ({setting['low']:.2f} \N{EN DASH} {setting['high']:.2f})"


def _stages(results: Results) -> Iterator[str]:
    # On a GPU the rate of a product varies too much for a floor.
    has_floor = results["device"] == "cpu"
    header = ["model", "method", "stage", "ms", "SGD steps"]
    if has_floor:
        header += ["floor ms", "measured / floor"]
    rows = []
    for e in results["models"]:
        sgd = statistics.median(e["sgd_s"])
        for method in e["methods"]:
            for name, seconds, floor in stages(e, method, host=results["clock"] == "wall"):
                row = [label(e), method, name, ms(seconds), f"{seconds / sgd:.3f}"]
                if has_floor:
                    row += [ms(floor), f"{seconds / floor:.1f}"] if floor else ["", ""]
                rows.append(row)
    yield "### Stages, each time they run"
    yield table(header, rows)
    yield (
        "A row with a minus is the difference between two kinds of steps, so it has the whole cost "
        "of a stage."
    )
    if has_floor:
        yield (
            "Other rows (only without `--clock cpu`) are wall seconds within the stage "
            "(`statistics()`). The floor is the time of the unavoidable FLOPs (half of a symmetric "
            "product, no patches for 3x3 convolutions of stride 1) at the rate of one fp32 product "
            "that was measured beside the row."
        )


FLOORS = {
    "factors - plain": ("ComputeFactor", "ComputeSecondMoment"),
    "decompose - factors": ("Decompose",),
    "plain - SGD": ("Precondition",),
}


def stages(entry: Entry, method: str, *, host: bool) -> Iterator[tuple[str, float, float]]:
    """Yield each stage with its seconds and the seconds of its floor (0 if it has none).

    With `host` the host's own seconds within each op follow.
    """
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
        # Take the op's time from the simplest kind of step in which the op does its full work.
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
        yield "The first step makes every decomposition. No other column includes it."


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
            "The peak of three steps that update factors, decompose and precondition. On a CPU it "
            "is the growth of a new process' resident memory, on a GPU the growth of torch's "
            "allocated memory."
        )


def rate(entry: Entry) -> float:
    """Return the FLOP/s of the matrix product, as the median over rounds."""
    return float(statistics.median(entry["gemm_flop_s"]))


def label(entry: Entry) -> str:
    """Return model, batch and precision in words."""
    precision = "" if entry["precision"] == "fp32" else f", {entry['precision']}"
    return f"{entry['name']} ({entry['shape']}{precision})"


def ms(seconds: float) -> str:
    """Return milliseconds with about three digits."""
    x = 1e3 * seconds
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.2f}" if abs(x) >= 1 else f"{x:.3f}"
