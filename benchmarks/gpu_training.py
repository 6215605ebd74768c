"""Train a ResNet-50 on Fashion-MNIST on one GPU, with five optimizers.

    python benchmarks/gpu_training.py [--data-root FOLDER] [--steps 800] [--seeds 1,2]

All rates of an optimizer run first, several runs at a time, with seed 0. The rate that reaches the
target first, or else has the best accuracy at the end, then runs alone on the machine with new
seeds. Only these runs are in the table, which ``benchmarks/gpu.py`` puts into its page. Finished
runs are kept in the file and not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

# A file that is started directly does not find its package.
if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from kfac_bench.data.images.idx_images import DEBIAN
from kfac_bench.record import runs, score

OPTIMIZERS: dict[str, tuple[list[str], tuple[float, ...]]] = {
    "SGD with momentum": (["optimizer=sgd", "kfac=none"], (0.003, 0.01, 0.03, 0.1, 0.3)),
    "SGD with K-FAC": (["optimizer=sgd"], (0.01, 0.03, 0.1, 0.3)),
    "AdamW": (["optimizer=adamw", "kfac=none"], (0.0003, 0.001, 0.003, 0.01)),
    "AdamW with K-FAC": (["optimizer=adamw"], (0.001, 0.003)),
    "EigenAdam": (["optimizer=eigen_adam"], (0.001, 0.003)),
}
"""Options of kfac-train and the rates to choose from. SGD and AdamW alone have more rates."""
COMMON = [
    *("model=resnet50", "data=fashion_mnist", "schedule=cosine", "trainer.batch_size=256"),
    *("trainer.precision=bf16", "trainer.channels_last=true", "trainer.eval_freq=50"),
    *("trainer.predictions=0", "logger=none"),
]
TARGET = 0.9
RESULTS = Path(__file__).parent / "results" / "gpu_training.json"
HEADER = """\
| optimizer | rate (rates tried) | steps to {target:g} | seconds to {target:g} | \
accuracy at the end | seconds |
| --- | --- | ---: | ---: | ---: | ---: |"""


@dataclass(frozen=True)
class Trained:
    """One run. ``curve`` has (step, training seconds, accuracy)."""

    optimizer: str
    rate: float
    seed: int
    alone: bool
    curve: list[tuple[float, float, float]]

    def reached(self, target: float) -> tuple[float, float]:
        """Return steps and training seconds of the first evaluation at the target."""
        found = (point[:2] for point in self.curve if point[2] >= target)
        return next(found, (math.inf, math.inf))


def read(path: Path) -> list[Trained]:
    """Return the finished runs of the file, none if there is no file."""
    return [Trained(**run) for run in json.loads(path.read_text())] if path.exists() else []


def table(found: Sequence[Trained], target: float = TARGET) -> str:
    """Return the table of the runs that were alone on the machine, and which have not run."""
    lines = [HEADER.format(target=target)]
    for name in OPTIMIZERS:
        tried = len({run.rate for run in found if run.optimizer == name and not run.alone})
        for run in found:
            if run.optimizer == name and run.alone:
                steps, seconds = run.reached(target)
                _, end_s, accuracy = run.curve[-1]
                is_met = math.isfinite(steps)
                met = [f"{steps:g}", f"{seconds:.1f}"] if is_met else ["never", "never"]
                cells = [name, f"{run.rate:g} ({tried})", *met, f"{accuracy:.4f}", f"{end_s:.1f}"]
                lines.append(f"| {' | '.join(cells)} |")
    missing = [
        name for name in OPTIMIZERS if not any(r.alone and r.optimizer == name for r in found)
    ]
    return "\n".join([*lines, *(["", f"Not run yet: {', '.join(missing)}."] if missing else [])])


def train(name: str, rate: float, seed: int, options: argparse.Namespace, alone: bool) -> Trained:
    """Run kfac-train in a process of its own."""
    words = [*OPTIMIZERS[name][0], f"optimizer.lr={rate}", *COMMON, f"seed={seed}"]
    words += [f"data.root={options.data_root}", f"trainer.max_steps={options.steps}"]
    words += [f"trainer.device={options.device}", *options.more]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kfac_bench", *words, f"runs_dir={folder}"]
        done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603
        if done.returncode not in (0, 1):
            raise SystemExit(done.stdout + done.stderr)
        (run,) = [runs.load(file) for file in runs.find(Path(folder))]
    found = Trained(name, rate, seed, alone, score.metric_curve(run))
    best = max((accuracy for *_, accuracy in found.curve), default=0.0)
    steps, seconds = found.reached(options.target)
    print(
        f"{name} {rate:g}, seed {seed}: best accuracy {best:.4f}; {steps:g} steps and "
        f"{seconds:.1f} s to {options.target:g} of {found.curve[-1][1]:.1f} s",
        flush=True,
    )
    return found


def main(arguments: Sequence[str]) -> None:
    """Run everything and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--data-root", type=Path, default=DEBIAN)
    add("--target", type=float, default=TARGET, help="the accuracy")
    add("--steps", type=int, default=800)
    add("--seeds", default="1,2", help="of the runs that are alone on the machine")
    add("--device", default="cuda")
    add("--together", type=int, default=4, help="runs at a time while rates are chosen")
    add("--out", type=Path, default=RESULTS)
    add("more", nargs="*", help="more words for kfac-train")
    options = parser.parse_args(arguments)
    if "0" in options.seeds.split(","):
        parser.error("--seeds 0: the rates were chosen with this seed")
    found = read(options.out)
    done = {(run.optimizer, run.rate) for run in found if not run.alone}
    grid = [(name, rate) for name, (_, rates) in OPTIMIZERS.items() for rate in rates]
    with ThreadPoolExecutor(options.together) as pool:
        begun = [pool.submit(train, *pair, 0, options, False) for pair in grid if pair not in done]
        for run in as_completed(begun):
            found.append(run.result())
            write(options.out, found)
    for seed, name in itertools.product(map(int, options.seeds.split(",")), OPTIMIZERS):
        mine = [run for run in found if run.optimizer == name]
        if not any(run.alone and run.seed == seed for run in mine):
            choices = [run for run in mine if not run.alone]
            best = min(choices, key=lambda x: (x.reached(options.target)[0], -x.curve[-1][2]))
            found.append(train(name, best.rate, seed, options, True))
            write(options.out, found)
    print(table(found, options.target))


def write(path: Path, found: Sequence[Trained]) -> None:
    """Write all runs."""
    path.write_text(json.dumps([asdict(run) for run in found], indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
