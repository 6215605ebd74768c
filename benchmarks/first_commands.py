"""Run the commands of docs/lab/first_commands.md with and without K-FAC, and print their table.

    OMP_NUM_THREADS=1 python benchmarks/first_commands.py [--seeds 0,1,2] [--results FILE] [--table]

The commands are those of the page, each with ``kfac=none`` and with K-FAC in turns. A script of
examples/ runs without K-FAC if KFAC and its callback do nothing. Seconds are processor time of
training. Finished pairs are kept in the file and not run again. ``--table`` trains nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

# A file that is started directly does not find its package.
if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.defaults import HEADER, Comparison, Curve
from kfac_bench.record import runs, score

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "lab" / "first_commands.md"
RESULTS = ROOT / "benchmarks" / "results" / "first_commands.jsonl"
EVALUATIONS = 10
"""Evaluations of a run of kfac-train."""
EVERY = 5
"""Steps between the evaluations of a script."""

Key = tuple[str, int, bool]
"""A command, the seed, and whether K-FAC is on."""


@dataclass(frozen=True)
class Measured:
    """One run: the optimizer with its rate, and the metric, lower is better."""

    optimizer: str
    rate: float
    curve: Curve


def commands(page: Path = PAGE) -> list[str]:
    """Return the commands of the page that train."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [" ".join(x.split()) for x in lines if x.startswith(("kfac-train", "python examples"))]


def prepare(page: Path = PAGE) -> None:
    """Make the folder of the language network as the page does, in the current directory."""
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    exec(code, {})  # noqa: S102 - the page of this repository


def measure(command: str, seed: int, *, kfac: bool) -> Measured:
    """Run a command of the page in this process, with the current directory for its files."""
    words = shlex.split(command)
    if words[0] == "python":
        return _script(ROOT / words[1], seed, kfac=kfac)
    return _kfac_train(words[1:], seed, kfac=kfac)


def _kfac_train(words: Sequence[str], seed: int, *, kfac: bool) -> Measured:
    steps = int(dict(word.split("=", 1) for word in words)["trainer.max_steps"])
    more = [f"trainer.eval_freq={max(steps // EVALUATIONS, 1)}", f"seed={seed}", "logger=none"]
    more += ["trainer.clock=cpu", "trainer.threads=1"] + ([] if kfac else ["kfac=none"])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kfac_bench", *words, *more, f"runs_dir={folder}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        (run,) = [runs.load(file) for file in runs.find(Path(folder))]
    done, seconds, metric = zip(*score.metric_curve(run), strict=True)
    if run.started.higher_is_better:  # accuracy
        metric = tuple(100 * (1 - value) for value in metric)
    optimizer = run.started.config["optimizer"]
    curve = Curve([*map(int, done)], [*seconds], [*metric])
    return Measured(optimizer["name"], optimizer["lr"], curve)


def _script(path: Path, seed: int, *, kfac: bool) -> Measured:
    """Run a script that trains the perceptron of :func:`_wrong` on the first 1400 digits."""
    curve, clock = Curve([0], [0.0], [90.0]), 0.0
    used: list[Optimizer] = []

    def begin(*_: Any) -> None:
        nonlocal clock
        clock = clock or time.process_time()

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        nonlocal clock
        used.append(optimizer)
        if len(used) % EVERY == 0:
            curve.steps.append(len(used))
            curve.seconds.append(curve.seconds[-1] + time.process_time() - clock)
            curve.metric.append(_wrong(*optimizer.param_groups[0]["params"]))
            clock = time.process_time()  # without evaluation

    handles = [
        register_module_forward_pre_hook(begin),
        register_optimizer_step_post_hook(after_step),
    ]
    torch.manual_seed(seed)
    try:
        with contextlib.nullcontext() if kfac else _without_kfac(path):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        for handle in handles:
            handle.remove()
    return Measured(type(used[0]).__name__.lower(), used[0].param_groups[0]["lr"], curve)


def _without_kfac(path: Path) -> contextlib.AbstractContextManager[Any]:
    """Let KFAC, or its callback of Lightning, do nothing."""
    if "lightning" in path.name:
        from lightning.pytorch import Callback

        return mock.patch("kfac_bench.integrations.lightning.KFACCallback", Callback)
    return mock.patch("kfac_bench.KFAC")


@cache
def _held_back() -> tuple[Tensor, Tensor]:
    pixels, classes = load_digits(return_X_y=True)
    return torch.tensor(pixels[1400:] / 16).float(), torch.tensor(classes[1400:])


@torch.no_grad()
def _wrong(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> float:
    """Return the percentage of wrong answers on the digits that were not trained on."""
    x, y = _held_back()
    answers = linear(linear(x, w1, b1).tanh(), w2, b2).argmax(1)
    return 100 * float((answers != y).float().mean())


def read(path: Path) -> dict[Key, Measured]:
    """Return the finished runs."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {
        (row["command"], row["seed"], row["kfac"]): Measured(
            row["optimizer"], row["rate"], Curve(**row["curve"])
        )
        for row in map(json.loads, lines)
    }


def run_missing(path: Path, seeds: Sequence[int]) -> None:
    """Run each pair that is missing, and append both runs to the file."""
    finished = read(path)
    prepare()
    for seed in seeds:
        for command in commands():
            if (command, seed, True) in finished:
                continue
            pair = {kfac: measure(command, seed, kfac=kfac) for kfac in (False, True)}
            with path.open("a") as file:
                for kfac, result in pair.items():
                    row = {"command": command, "seed": seed, "kfac": kfac, **asdict(result)}
                    file.write(json.dumps(row) + "\n")


def table(finished: Mapping[Key, Measured]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield HEADER
    for command in dict.fromkeys(key[0] for key in finished):
        own = {kfac: _of(finished, command, kfac=kfac) for kfac in (False, True)}
        name = re.sub(r"\S+[/=]", "", " ".join(shlex.split(command)[1:3]))
        first, curves = own[False][0], {k: [m.curve for m in v] for k, v in own.items()}
        yield Comparison(name, first.optimizer, first.rate, curves[False], curves[True]).row()


def _of(finished: Mapping[Key, Measured], command: str, *, kfac: bool) -> list[Measured]:
    return [run for (c, _, k), run in finished.items() if (c, k) == (command, kfac)]


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of finished runs")
    parser.add_argument("--table", action="store_true", help="print the table, train nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = arguments.results.absolute()
    if not arguments.table:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            measure("python examples/lightning_training.py", 0, kfac=True)  # loads libraries
            run_missing(results, [int(seed) for seed in arguments.seeds.split(",")])
    print(*table(read(results)), sep="\n")


if __name__ == "__main__":
    main()
