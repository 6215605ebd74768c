"""The results of benchmarks/peers.py: the file that keeps finished runs, and the tables."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import tables
from kfac_bench.errors import UsageError
from kfac_bench.whole_files import around_marks, write_text

BEGIN = "<!-- made by benchmarks/peers.py --into -->"
END = "<!-- end of what benchmarks/peers.py made -->"
ALONE = "kfac"
"""The competitor whose seconds the others' seconds are divided by."""
EASIER_TARGET = 17.0
"""A second, larger error: the order of the competitors depends on the target."""
MORE_THAN_A_CORE = 1.05
"""A process with a larger share of a core has used more than one thread."""
Run = Mapping[str, Any]
"""A finished run: what ran, and the result of :func:`benchmarks.peers_loop.train`."""


@dataclass(frozen=True)
class Competitor:
    """One optimizer, and the space of its options; a row of benchmarks/peers.yaml."""

    name: str
    label: str
    package: str
    runs: str
    """Who builds the optimizer: ``options``, ``torch`` or ``jax``."""
    note: str
    space: dict[str, Any]

    @property
    def library(self) -> str:
        """The library of the model: ``torch`` or ``jax``."""
        return library_of(self.runs)

    @property
    def ranges(self) -> dict[str, Any]:
        """The options that are tuned."""
        return {k: v for k, v in self.space.items() if isinstance(v, dict)}


def library_of(runs: str) -> str:
    """Return the library of the model of a kind of competitor."""
    return "jax" if runs == "jax" else "torch"


def seconds(run: Run) -> float:
    """Return the seconds to the target, infinite if it was missed."""
    return float(run["seconds"]) if run["end"] == "target" else math.inf


def steps(run: Run) -> float:
    """Return the steps to the target, infinite if it was missed."""
    return float(run["steps"]) if run["end"] == "target" else math.inf


def seconds_to(run: Run, error: float) -> float:
    """Return the seconds at the first evaluation with this error or less, infinite if none is."""
    curve = run.get("curve", [])
    return next((s for _, s, found in curve if found is not None and found <= error), math.inf)


def merit(run: Run) -> tuple[float, float]:
    """Return the sort key of a run, best first: seconds to the target, then the best error."""
    error = run.get("best_error")
    return seconds(run), math.inf if error is None else error


class Results:
    """Finished runs in a JSON file, which is written after each run.

    Args:
        path: The file.
        work: What all runs have in common.

    Raises:
        UsageError: The file cannot be read, or it has runs of other work.
    """

    def __init__(self, path: Path, work: Mapping[str, Any]) -> None:
        self._path, self.work = path, dict(work)
        self.runs: list[Run] = []
        if not path.exists():
            return
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.runs, kept_work = list(kept["runs"]), dict(kept["work"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"--out {path}: is no results of this command ({error}). Delete the file or name "
                "another one"
            ) from None
        for key, value in self.work.items():
            if kept_work.get(key) != value:
                raise UsageError(
                    f"--out {path}: has runs with {key}={kept_work.get(key)}, not {value}. Delete "
                    "the file or name another one"
                )
        self.work = {**kept_work, **self.work}

    def find(self, kind: str, name: str, seed: int, settings: Mapping[str, Any]) -> Run | None:
        """Return the finished run, or None."""
        wanted = {"kind": kind, "competitor": name, "seed": seed, "settings": settings}
        return next((r for r in self.runs if wanted.items() <= r.items()), None)

    def add(self, run: Run) -> None:
        """Keep a finished run."""
        self.runs.append(run)
        text = json.dumps({"work": self.work, "runs": self.runs}, indent=1)
        write_text(self._path, text + "\n", make_folder=True)


@dataclass(frozen=True)
class Row:
    """The trials of a competitor, and its runs on fresh seeds."""

    competitor: Competitor
    trials: Sequence[Run]
    finals: Sequence[Run]

    @property
    def winner(self) -> Run:
        """The best trial."""
        return min(self.trials, key=merit)

    @property
    def median_s(self) -> float:
        """The median of the seconds to the target over the seeds."""
        return statistics.median(map(seconds, self.finals))


def render(rows: Sequence[Row], head: str) -> str:
    """Return the tables in Markdown.

    Args:
        rows: The competitors with trials and final runs.
        head: A paragraph about the machine and the work.
    """
    runs = [run for row in rows for run in (*row.trials, *row.finals)]
    # Several versions of a package are listed if runs were made with both.
    versions = {f"{k} {v}": None for run in runs for k, v in run.get("versions", {}).items()}
    parts = [head, _times(rows), _what_each_got(rows)]
    parts.append("Versions: " + ", ".join(versions) + ".")
    parts += _warnings(runs)
    return "\n\n".join(parts)


def _times(rows: Sequence[Row]) -> str:
    own = next((row.median_s for row in rows if row.competitor.name == ALONE), math.nan)
    cells = []
    for row in sorted(rows, key=lambda row: row.median_s):
        ratio = row.median_s / own
        done = [run for run in row.finals if run["end"] != "failed"]
        reached = sum(run["end"] == "target" for run in row.finals)
        cells.append(
            [
                row.competitor.label,
                f"{reached} of {len(row.finals)}",
                spread(map(seconds, row.finals), ".3g"),
                spread((seconds_to(run, EASIER_TARGET) for run in row.finals), ".3g"),
                f"{ratio:.2f}" if math.isfinite(ratio) else "",
                spread(map(steps, row.finals), ".0f"),
                _median([1e3 * run["seconds"] / run["steps"] for run in done], ".0f"),
                _median([run["start_s"] for run in done], ".1f"),
            ]
        )
    header = (
        "competitor", "reached", "CPU seconds to target (range)",
        f"CPU seconds to {EASIER_TARGET:g} (range)", "seconds / K-FAC's",
        "steps to target (range)", "ms per step", "s before the clock",
    )  # fmt: skip
    note = (
        "Medians over the seeds. *s before the clock* are the CPU seconds that the first steps "
        "take longer than others: compilation with jax, first allocations with torch. They do not "
        "count in the other columns."
    )
    return tables.table(header, cells) + "\n\n" + note


def _what_each_got(rows: Sequence[Row]) -> str:
    cells = []
    for row in rows:
        tuned = row.competitor.ranges
        best = row.winner["settings"]
        fixed = {k: v for k, v in row.competitor.space.items() if k not in tuned}
        cells.append(
            [
                row.competitor.label,
                f"{row.competitor.package}: {row.competitor.note}",
                str(len(row.trials)),
                str(sum(run["end"] == "target" for run in row.trials)),
                _code(f"{k}: {_range(v)}" for k, v in tuned.items()),
                _code(f"{k}={best[k]}" for k in tuned),
                _code(f"{k}={v}" for k, v in fixed.items()),
            ]
        )
    header = (
        "competitor", "implementation", "trials", "trials that reached the target", "space",
        "best trial", "fixed",
    )  # fmt: skip
    return "### What each competitor got\n\n" + tables.table(header, cells)


def _warnings(runs: Sequence[Run]) -> list[str]:
    shares = [run["cpu_share"] for run in runs if "cpu_share" in run]
    found = []
    if shares and min(shares) < tables.CROWDED:
        share = f"{100 * min(shares):.0f} %"
        found.append(f"**Other programs used the core: one process had only {share} of it.**")
    if shares and max(shares) > MORE_THAN_A_CORE:
        found.append(f"**One process used {max(shares):.2f} cores instead of one thread.**")
    failed = [run for run in runs if run["end"] == "failed"]
    found += [f"Failed: {run['competitor']}, seed {run['seed']}: `{run['why']}`" for run in failed]
    return found


def spread(values: Iterable[float], form: str) -> str:
    """Return median and range; a missed target is infinite."""
    listed = sorted(values)

    def text(value: float) -> str:
        return format(value, form) if math.isfinite(value) else "missed"

    return f"{text(statistics.median(listed))} ({text(listed[0])} to {text(listed[-1])})"


def _median(values: Sequence[float], form: str) -> str:
    return format(statistics.median(values), form) if values else ""


def _code(items: Iterable[str]) -> str:
    return ", ".join(f"`{item}`" for item in items)


def _range(option: Mapping[str, Sequence[Any]]) -> str:
    ((kind, values),) = option.items()
    if kind == "log":
        return f"{values[0]:g} to {values[1]:g}"
    return " or ".join(str(value) for value in values)


def parts_of(page: Path) -> tuple[str, str]:
    """Return the text of a page before and after the tables.

    Raises:
        UsageError: The page cannot be read, or it lacks a mark.
    """
    return around_marks(page, BEGIN, END, "--into")


def into(page: Path, text: str) -> None:
    """Write the tables between the two marks of a page; errors as in :func:`parts_of`."""
    before, after = parts_of(page)
    write_text(page, f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}")
