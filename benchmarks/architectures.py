"""Run K-FAC with its defaults on architectures of timm and torchvision.

    OMP_NUM_THREADS=1 python benchmarks/architectures.py [--results FILE] [--table] [--only NAME]

Of each family of timm and torchvision the smallest architecture is tried, and all of torchvision
with at most 31 million parameters. Each trains two steps of SGD with ``KFAC(model, optimizer)`` on
random images, in a process of its own with a time limit. Finished architectures are kept in the
file and not tried again. ``--table`` trains nothing and prints the table of
docs/lab/architectures.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional

# A file that is started directly does not find its package.
if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from kfac_bench.core import KFAC
from kfac_bench.errors import UsageError, one_line
from kfac_bench.models import classifiers
from kfac_bench.models.library_options import TimmConfig, TorchvisionConfig

LIBRARIES = {"timm": TimmConfig, "torchvision": TorchvisionConfig}
RESULTS = Path(__file__).parent / "results" / "architectures.jsonl"
SIDE, BATCH = 64, 4
"""Pixels of an image's side, and images. What refuses this size gets 2 images of its usual size."""
CLASSES, STEPS = 10, 2
LIMIT_S = 240
"""Most seconds of processor time."""
LARGEST = 31_000_000
"""Most parameters of an architecture of torchvision, with 1000 classes."""

Row = dict[str, Any]


def architectures() -> Iterator[tuple[str, str, str]]:
    """Yield the library, the family and the name of each architecture to try, small ones first."""
    smallest = {}
    for module in timm.list_modules():
        sizes = {n: _timm_size(n) for n in timm.list_models(module=module) if "test_" not in n}
        smallest[module] = min(sizes.items(), key=lambda item: item[1])
    for module, (name, _) in sorted(smallest.items(), key=lambda item: item[1][1]):
        yield "timm", module, name
    families = set()
    names = torchvision.models.list_models(module=torchvision.models)
    for name in sorted(names, key=_torchvision_size):
        family = torchvision.models.get_model_builder(name).__module__.rpartition(".")[2]
        if family not in families or _torchvision_size(name) <= LARGEST:
            families.add(family)
            yield "torchvision", family, name


def _torchvision_size(name: str) -> float:
    weights = next(iter(torchvision.models.get_model_weights(name)), None)
    return float("inf") if weights is None else float(weights.meta["num_params"])


def _timm_size(name: str) -> float:
    """Return the number of parameters; infinite if no model without values can be made."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sum(p.numel() for p in timm.create_model(name).parameters())
    except Exception:  # a constructor may look at values
        return float("inf")


def _built(library: str, name: str) -> tuple[nn.Module, int, int]:
    """Return the classifier, the side of its images, and their number."""
    config = LIBRARIES[library](name=library, architecture=name)
    try:
        return config.build((3, SIDE, SIDE), CLASSES, "classification"), SIDE, BATCH
    except UsageError:
        side = classifiers.usual_side(config)
        return config.build((3, side, side), CLASSES, "classification"), side, 2


def train(library: str, name: str) -> Row:
    """Train two steps, and return the coverage and the seconds."""
    torch.manual_seed(0)
    model, side, batch = _built(library, name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kfac = KFAC(model, optimizer)
    x, y = torch.randn(batch, 3, side, side), torch.arange(batch) % CLASSES
    start = time.process_time()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        kfac.step()
        optimizer.step()
    seconds = time.process_time() - start
    report = kfac.report()
    row: Row = {
        "side": side,
        "parameters": report.covered_params + report.skipped_params,
        "covered": report.covered_params,
        "seconds": round(seconds, 2),
        "left": dict(Counter(skipped.kind for skipped in report.skipped)),
    }
    if not all(p.isfinite().all() for p in model.parameters()):
        row["error"] = "weights are not finite"
    return row


def _process(library: str, name: str, answer: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            row = train(library, name)
        except Exception as error:  # the result of a try is its error
            row = {"error": f"{type(error).__name__}: {one_line(error)[:300]}"}
    own = (str(w.message) for w in caught if str(w.message).startswith("K-FAC"))
    answer.send(row | {"warnings": [" ".join(text.split())[:300] for text in own]})


def attempt(library: str, name: str) -> Row:
    """Train in a process of its own, which ends at the time limit."""
    context = multiprocessing.get_context("fork")  # the libraries are imported once
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_process, args=(library, name, theirs))
    process.start()
    theirs.close()
    try:
        row: Row = ours.recv()
    except EOFError:
        row = {"error": f"died, or did not end in {LIMIT_S} s"}
    process.join()
    return row


def read(path: Path) -> dict[tuple[str, str], Row]:
    """Return the finished rows by library and name; the last row of a name counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["library"], row["name"]): row for row in rows}


def table(rows: Mapping[tuple[str, str], Row]) -> Iterator[str]:
    """Yield the lines of a table by library and covered share, and the lines about errors."""
    yield "| library | covered parameters | architectures |"
    yield "| --- | ---: | --- |"
    for library in LIBRARIES:
        by_share: dict[int, list[str]] = {}
        for row in rows.values():
            if row["library"] == library and "error" not in row:
                share = 100 * row["covered"] // row["parameters"]
                by_share.setdefault(share, []).append(row["name"])
        for share in sorted(by_share, reverse=True):
            yield f"| {library} | {share} % | {', '.join(sorted(by_share[share]))} |"
    yield ""
    for library in LIBRARIES:
        own = [row for row in rows.values() if row["library"] == library]
        families, good = {row["family"] for row in own}, sum("error" not in row for row in own)
        yield f"* {library}: {len(own)} architectures of {len(families)} families; {good} train"
    for row in rows.values():
        if "error" in row:
            yield f"* {row['library']}, {row['name']}: {row['error']}"


def main() -> None:
    """Try what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of finished rows")
    parser.add_argument("--table", action="store_true", help="print the table, train nothing")
    parser.add_argument("--only", help="try this architecture again")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = read(arguments.results)
    if arguments.table:
        print(*table(rows), sep="\n")
        return
    for library, family, name in architectures():
        if name == arguments.only or (arguments.only is None and (library, name) not in rows):
            about: Row = {"library": library, "family": family, "name": name}
            row = about | attempt(library, name)
            print(name, row.get("error") or f"{row['covered'] / row['parameters']:.0%}", flush=True)
            with arguments.results.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
