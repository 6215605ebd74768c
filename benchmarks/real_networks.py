"""Measure K-FAC's defaults on large networks: docs/lab/real_networks.md.

    OMP_NUM_THREADS=1 python benchmarks/real_networks.py [--results FILE] [--table]
        [--only "NETWORK OPTIMIZER RATE SEED"] [--kfac JSON]

SGD and AdamW run at three usual rates, each alone and with ``KFAC(model, optimizer)``. All runs of
seed 0 come first. Finished runs are kept in the file and not run again. ``--table`` trains nothing
and prints the table of the finished runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, median

import torch

# A file that is started directly does not find its package.
if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.defaults import RATES, Comparison, Curve, Results, Run, kfac_options
from benchmarks.develop_tasks import TASKS, DevelopTask
from kfac_bench.data.demo import demo_folder
from kfac_bench.data.images import digits, imagefolder
from kfac_bench.data.language import pydoc
from kfac_bench.models.options import TorchvisionResNetConfig
from kfac_bench.models.token_networks import Transformer, VisionTransformer
from kfac_bench.tasks.image_tasks import Classification
from kfac_bench.tasks.language_tasks import LanguageModel

SEEDS = 0, 1, 2
RESULTS = Path(__file__).parent / "results" / "real_networks.jsonl"
NETWORKS = (
    DevelopTask(
        "ResNet-50, digits",
        digits.load,
        lambda: TorchvisionResNetConfig(name="resnet50").build((1, 8, 8), 10, "classification"),
        Classification,
        "loss",
        batch_size=128,
        steps=50,
        evaluations=5,
        batch_statistics=True,
    ),
    DevelopTask(
        "ResNet-50, JPEG folders",
        lambda: imagefolder.load(demo_folder.folder("imagenet"), image_size=64, workers=0),
        lambda: TorchvisionResNetConfig(name="resnet50").build((3, 64, 64), 10, "classification"),
        Classification,
        "loss",
        batch_size=32,
        steps=50,
        evaluations=5,
        stride=4,
        batch_statistics=True,
    ),
    DevelopTask(
        "ViT-S, digits",
        lambda: digits.load(32),
        lambda: VisionTransformer((1, 32, 32), 10, patch=4, width=384, layers=12, heads=6),
        Classification,
        "loss",
        batch_size=16,
        steps=50,
        evaluations=5,
        stride=4,
    ),
    DevelopTask(
        "BERT-base, pydoc",
        lambda: pydoc.load(128),
        lambda: Transformer(96, 128, width=768, layers=12, heads=12),
        LanguageModel,
        "loss",
        batch_size=4,
        steps=30,
        evaluations=3,
        stride=16,
    ),
)

HEADER = """\
| network (loss on held-back data) | optimizer and rate | alone | with K-FAC | verdict |
| --- | --- | ---: | ---: | --- |"""


def pairs(kfac: str) -> Iterator[tuple[Run, Run]]:
    """Yield the runs of the table, alone and with K-FAC, in the order of training.

    The middle rates come first, so that an unfinished table has each network.
    """
    for seed, place, optimizer, network in product(SEEDS, (1, 0, 2), RATES, NETWORKS):
        rate = RATES[optimizer][place]
        run = Run(network.name, optimizer, rate, seed, "none")
        yield run, replace(run, kfac=kfac)


def table(results: Results, kfac: str) -> Iterator[str]:
    """Yield the lines of the table of finished pairs, and how many pairs have finished."""
    done: dict[tuple[str, str, float], dict[int, tuple[Curve, Curve]]] = {}
    for alone, preconditioned in pairs(kfac):
        seeds = done.setdefault((alone.task, alone.optimizer, alone.rate), {})
        curves = results.find(alone), results.find(preconditioned)
        if curves[0] is not None and curves[1] is not None:
            seeds[alone.seed] = curves[0], curves[1]
    yield HEADER
    done = dict(sorted(done.items(), key=_place))
    for key, seeds in done.items():
        if seeds:
            yield _row(key, seeds)
    yield ""
    for network in NETWORKS:
        of_network = [seeds for key, seeds in done.items() if key[0] == network.name]
        counts = [sum(seed in seeds for seeds in of_network) for seed in SEEDS]
        text = ", ".join(f"{n} of seed {seed}" for seed, n in zip(SEEDS, counts, strict=True))
        yield f"* {network.name}: of {len(of_network)} pairs of runs have finished: {text}"
        rows = [_comparison(key, s) for key, s in done.items() if s and key[0] == network.name]
        if rows:
            yield f"  {_summary(rows)}"


def _summary(rows: Sequence[Comparison]) -> str:
    """Return in how many rows K-FAC's mean loss is lower, and the median time of its steps."""
    by_steps = sum(row.gain > 0 for row in rows)
    by_seconds = sum(
        fmean(row.equal_seconds()) < fmean(curve.metric[-1] for curve in row.alone) for row in rows
    )
    ratio = median(
        k.seconds[-1] / a.seconds[-1]
        for row in rows
        for a, k in zip(row.alone, row.kfac, strict=True)
    )
    return (
        f"K-FAC's mean loss is lower in {by_steps} of {len(rows)} pairs after equal steps, in "
        f"{by_seconds} after equal seconds; a step takes {ratio:.1f} times as long"
    )


def _place(entry: tuple[tuple[str, str, float], object]) -> tuple[int, int, float]:
    """Return the place of a row: the order of networks and optimizers, then the rate."""
    task, optimizer, rate = entry[0]
    names = [network.name for network in NETWORKS]
    return names.index(task), list(RATES).index(optimizer), rate


def _comparison(key: tuple[str, str, float], seeds: dict[int, tuple[Curve, Curve]]) -> Comparison:
    alone, preconditioned = ([each[i] for each in seeds.values()] for i in (0, 1))
    return Comparison(*key, alone, preconditioned)


def _row(key: tuple[str, str, float], seeds: dict[int, tuple[Curve, Curve]]) -> str:
    task, optimizer, rate = key
    comparison = _comparison(key, seeds)
    verdict = comparison.verdict
    if len(seeds) == 1:  # no range to compare with
        verdict = verdict.strip("*").lower()
    cells = [
        task,
        f"{optimizer} {rate:g}",
        _values(comparison.alone),
        _values(comparison.kfac),
        verdict,
    ]
    return "| " + " | ".join(cells) + " |"


def _values(curves: Sequence[Curve]) -> str:
    """Return mean, lowest and highest last loss, and how many runs ended above their first loss."""
    values = [curve.metric[-1] for curve in curves]
    mean = sum(values) / len(values)
    span = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    above = sum(not curve.metric[-1] <= curve.metric[0] for curve in curves)
    return f"{mean:.3f}{span}" + (f", {above} above the start" if above else "")


def main() -> None:
    """Train what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of finished runs")
    parser.add_argument("--table", action="store_true", help="print the table, train nothing")
    parser.add_argument(
        "--only", default="", help="train only pairs that begin so, such as 'ViT-S, digits sgd'"
    )
    parser.add_argument("--kfac", type=json.loads, default={}, help="options of KFAC as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    TASKS.update({network.name: network for network in NETWORKS})
    results, kfac = Results(arguments.results), kfac_options(arguments.kfac)
    if arguments.table:
        print(*table(results, kfac), sep="\n")
        lines = [json.loads(line) for line in arguments.results.read_text().splitlines()]
        code = sorted({(line["commit"][:9], line["threads"]) for line in lines})
        print(*(f"* commit {commit}, threads: {threads}" for commit, threads in code), sep="\n")
        return
    for pair in pairs(kfac):
        of = pair[0]
        if f"{of.task} {of.optimizer} {of.rate:g} {of.seed}".startswith(arguments.only):
            for run in pair:
                results.get(run)


if __name__ == "__main__":
    main()
