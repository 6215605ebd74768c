"""Cells that train nothing: a plan's bytes, a simulated step, the largest batch that fits.

Like a run, a computed cell leaves an event file in its own directory. Its numbers are the metrics
of one evaluation, with the names of :mod:`kfac_bench.benchmark.measures`. So tables find runs and
computed cells in the same way, and a cell is computed only once.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from kfac_bench import __version__
from kfac_bench.benchmark.run_end import record_failure
from kfac_bench.benchmark.schema import Benchmark, fill_in
from kfac_bench.config import compose
from kfac_bench.errors import UsageError
from kfac_bench.record.event_log import line_of
from kfac_bench.record.events import EVENTS_FILE, Evaluated, RunEnded, RunStarted
from kfac_bench.whole_files import write_text

KINDS = {
    "plan": "plan_numbers",
    "simulate": "step_numbers",
    "phases": "phases_numbers",
    "fit": "fit_numbers",
}
"""Function of :mod:`kfac_bench.benchmark.computed_numbers` for each kind."""
FOLDERS = {"hardware": "hardware", "file": "simulation"}
"""Words that name a file, with its folder in conf/."""


@dataclass(frozen=True)
class ComputedCell:
    """One point of a benchmark's :class:`~kfac_bench.benchmark.schema.Computed` part."""

    label: str
    kind: str
    words: Mapping[str, str] = field(hash=False)
    point: Mapping[str, str] = field(hash=False)
    runs_dir: str = "runs"

    def path(self) -> Path:
        """Return the directory, which depends on the words, the files they name and our version."""
        words = dict(self.words)
        for word, folder in FOLDERS.items():
            if (name := words.get(word)) is None:
                continue
            file = compose.CONF_DIR / folder / f"{name}.yaml"
            if not file.is_file():
                raise UsageError(f"{self.label}: {word}={name}: conf/{folder} has no such file")
            words[word] += _digest(file.read_text(encoding="utf-8"))
        content = json.dumps([self.kind, sorted(words.items()), __version__])
        return Path(self.runs_dir) / f"{self.kind}-{_digest(content)}"

    def run(self) -> tuple[bool, str]:
        """Compute the cell unless it is done; return whether it succeeded, and a message."""
        if (self.path() / EVENTS_FILE).exists():
            return True, "computed (before)"
        try:
            numbers = _numbers(self.kind)(self.words)
        except (UsageError, KeyError, ValueError, ArithmeticError) as error:
            lacks = f"needs the word {error}" if isinstance(error, KeyError) else str(error)
            record_failure(self.path(), self.label, lacks)
            return False, f"failed: {lacks}"
        _write(self, numbers)
        return True, "computed"


def cells(benchmark: Benchmark, runs_dir: str) -> list[ComputedCell]:
    """Return every point of the benchmark's computed parts, which are the same in all profiles."""
    result = []
    for part in benchmark.computed:
        if part.kind not in KINDS:
            raise UsageError(f"kind {part.kind}: unknown; choose one of {', '.join(KINDS)}")
        for values in itertools.product(*part.axes.values()):
            point = dict(zip(part.axes, values, strict=True))
            texts = [*part.words]
            # A key of `each` may join several axes by spaces; then its values are joined alike.
            for axes, by_value in part.each.items():
                texts += by_value.get(" ".join(point[axis] for axis in axes.split(" ")), [])
            words = dict(_word(fill_in(text, point)) for text in texts)
            label = " ".join([*point.values(), f"({part.kind})"])
            result.append(ComputedCell(label, part.kind, words, point, runs_dir))
    return result


def _numbers(kind: str) -> Callable[[Mapping[str, str]], dict[str, float]]:
    """Return the function that computes the numbers of a cell from its words."""
    # This import loads torch: listing benchmarks needs no torch.
    from kfac_bench.benchmark import computed_numbers

    return cast(
        "Callable[[Mapping[str, str]], dict[str, float]]", getattr(computed_numbers, KINDS[kind])
    )


def _word(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{text!r}: write the word of a computed cell as NAME=VALUE")
    return name, value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _write(cell: ComputedCell, numbers: Mapping[str, float]) -> None:
    """Write the event file as a whole; raise :class:`UsageError` if it cannot be written."""
    folder = cell.path()
    config = {"computed": cell.kind, "words": dict(cell.words)}
    events = (
        RunStarted(0, 0.0, folder.name, next(iter(numbers)), False, config, {}),
        Evaluated(0, 0.0, 0.0, dict(numbers)),
        RunEnded(0, 0.0, "finished", f"computed: {cell.kind}"),
    )
    content = "".join(map(line_of, events))
    write_text(folder / EVENTS_FILE, content, make_folder=True)
