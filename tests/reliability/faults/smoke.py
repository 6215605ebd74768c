"""The cost of checkpoints in real runs: each application's smoke run with and without them.

The runs of a pair alternate in order. Each run is a fork of one process that has imported
everything. A run without checkpoints is the same command with an empty `Trainer.save`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kfac_bench.errors import UsageError
from kfac_bench.record.events import EVENTS_FILE, Checkpointed, RunEnded, read
from kfac_bench.record.score import median_with_interval
from kfac_bench.report.tables import Table, Value
from tests.support import forks

EXPERIMENTS: Mapping[str, Sequence[str]] = {
    name: (f"experiment={name}", "profile=smoke")
    for name in (
        "fig5a_resnet50_convergence",
        "fig5bc_maskrcnn_convergence",
        "table4b_bert_kfac_phase1",
        "kaisa_unet_lgg",
    )
}
"""One experiment each for classification, detection, language and segmentation, with K-FAC."""
DEFAULT = ("trainer.checkpoint_freq=null", "trainer.threads=1", "logger=none", "run_id=run")
"""Checkpoints at their default times: at epoch ends at least a minute apart, and at the end."""
GOAL = 0.03
CLOCKS = {"cpu_s": "processor", "train_s": "training clock", "wall_s": "wall"}


@dataclass(frozen=True)
class Spent:
    """The time that one run took, from building its data and model to its end."""

    cpu_s: float
    """Processor time of all threads."""
    wall_s: float
    train_s: float
    """Time of the training clock, which stops while training waits for a checkpoint."""
    steps: int
    checkpoints: int
    recorded_s: float
    """Cost by the run's own events: the waiting of training and the work of the thread."""
    weights_sha256: str


Pair = tuple[Spent, Spent]
"""A run with checkpoints, and a run without."""


def table(
    pairs: int, say: Callable[[str], None], experiments: Mapping[str, Sequence[str]] = EXPERIMENTS
) -> Table:
    """Run `pairs` pairs of each experiment and tabulate the cost of checkpoints.

    Raises:
        UsageError: If a run fails.
    """
    measured = {name: _measure(name, own, pairs, say) for name, own in experiments.items()}
    costs = [median_with_interval(_more(each, "cpu_s")) for each in measured.values()]
    below, surely = (sum(cost[i] < GOAL for cost in costs) for i in (0, 2))
    columns = ["smoke run", "steps", "checkpoints"]
    for clock in CLOCKS.values():
        columns += [f"{clock} s", "more with checkpoints"]
    notes = [
        f"Medians of {pairs} pairs with 95 % intervals; one thread, {DEFAULT[0]}.",
        f"The goal is less than {GOAL:.0%} of the processor's time: {below} of {len(costs)} "
        f"medians and {surely} whole intervals are below it.",
        "By the run's own events: the time that training waited, plus the processor time of the "
        "writing thread, divided by the run's processor time.",
    ]
    columns.append("by the run's own events")
    return Table(
        "What checkpoints cost smoke runs",
        columns,
        [_row(*each) for each in measured.items()],
        notes,
    )


def _measure(
    name: str, options: Sequence[str], pairs: int, say: Callable[[str], None]
) -> list[Pair]:
    command = [*options, *DEFAULT]
    # A first run makes the demo data and fills the caches.
    _spent([*command, "trainer.max_steps=1"], saving=True)
    found = []
    for number in range(1, pairs + 1):
        first = number % 2 == 0
        spent = {saving: _spent(command, saving=saving) for saving in (first, not first)}
        if spent[True].weights_sha256 != spent[False].weights_sha256:
            raise UsageError(f"{name}: two runs of one command have different final weights")
        found.append((spent[True], spent[False]))
        (more,) = _more(found[-1:], "cpu_s")
        say(f"[{number}/{pairs}] {name}: {spent[False].cpu_s:.1f} s of a processor, {more:+.2%}")
    return found


def _more(pairs: Sequence[Pair], clock: str) -> list[float]:
    """Return the share that checkpoints add, for each pair."""
    return [getattr(with_, clock) / getattr(without, clock) - 1 for with_, without in pairs]


def _row(name: str, pairs: Sequence[Pair]) -> list[Value]:
    first = pairs[0][0]
    row: list[Value] = [name, first.steps, first.checkpoints]
    for clock in CLOCKS:
        row.append(median_with_interval([getattr(without, clock) for _, without in pairs])[0])
        median, low, high = median_with_interval(_more(pairs, clock))
        row.append(f"{median:+.2%} ({low:+.2%} to {high:+.2%})")
    recorded = median_with_interval([with_.recorded_s / with_.cpu_s for with_, _ in pairs])[0]
    return [*row, f"{recorded:.2%}"]


def _spent(options: Sequence[str], *, saving: bool) -> Spent:
    with tempfile.TemporaryDirectory(prefix="kfac-faults-") as scratch:
        process = forks.server().Process(target=_train, args=(scratch, [*options], saving))
        process.start()
        process.join()
        result = Path(scratch) / "spent.json"
        if not result.exists():
            said = (Path(scratch) / "said").read_text(errors="replace").strip().splitlines()
            raise UsageError(f"{options[0]}: {said[-1] if said else 'no output'}")
        return Spent(**json.loads(result.read_text()))


def _train(scratch: str, options: list[str], saving: bool) -> None:
    """Run `kfac-train` in the fork, write its time to a file, and print nothing."""
    # The data loader must start its workers as it does outside a fork.
    multiprocessing.set_start_method("fork", force=True)
    said = os.open(Path(scratch) / "said", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    from kfac_bench import distributed
    from kfac_bench.config import compose
    from kfac_bench.training import run
    from kfac_bench.training.run_directory import RunDirectory
    from kfac_bench.training.trainer import Trainer

    if not saving:
        Trainer.save = lambda self, **_: None  # type: ignore[method-assign]
    config = compose.load([*options, f"runs_dir={scratch}"])
    with distributed.join(config.backend, config.trainer.device) as backend:
        wall, cpu = time.perf_counter(), time.process_time()
        run.train(config, backend)
        cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - wall
    events = read(RunDirectory(config).path / EVENTS_FILE)
    written = [e for e in events if isinstance(e, Checkpointed)]
    (end,) = (e for e in events if isinstance(e, RunEnded))
    if end.status == "failed":
        sys.exit(end.message)
    spent = Spent(
        cpu_s,
        wall_s,
        end.train_s,
        end.step,
        len(written),
        sum(e.write_s + e.cpu_s for e in written),
        end.weights_sha256,
    )
    (Path(scratch) / "spent.json").write_text(json.dumps(asdict(spent)))
