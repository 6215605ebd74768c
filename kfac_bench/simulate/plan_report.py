"""The report of a dry run, as text and as JSON: the result of ``kfac-plan``.

``kfac-train dry_run=true`` prints the same text.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kfac_bench.config import TrainConfig, options, problem_file
from kfac_bench.config.options import RESULT
from kfac_bench.core.planning.estimate import RankCost, Traffic
from kfac_bench.core.planning.plan import Message, Stage
from kfac_bench.data.options import ProblemDataConfig
from kfac_bench.output import size_text
from kfac_bench.training.dry_run import DryRun
from kfac_bench.training.run_directory import run_id
from kfac_bench.whole_files import write_text


def as_dict(run: DryRun) -> dict[str, Any]:
    """Return the content of the JSON file: the bytes, FLOPs and messages of each rank.

    * ``flops``, ``messages`` and ``traffic`` count one run of a stage.
    * ``every`` is the number of steps between two runs of a stage, before
      ``interval_growth_epochs``.
    * ``per_step`` is the average over all steps.
    * ``payload_bytes`` is what a message carries, ``wire_bytes`` what a rank receives of it in a
      ring.
    """
    report, config = run.report, run.config
    return {
        "run_id": run_id(config),
        "world_size": run.world_size,
        "options": _result_options(config),
        "parameters": run.parameters,
        "examples_per_rank": run.examples,
        "forward_flops": run.forward_flops,
        "step_flops": run.step_flops,
        "every": _every(run),
        "plan": None
        if report is None
        else {
            "digest": report.plan.digest(),
            "layers": len(report.layers),
            "covered_parameters": report.covered_params,
            "gradient_workers": len(report.plan.placements[0].grad_workers),
            "slices": len(report.plan.slices),
        },
        "messages": _messages(run),
        "ranks": [{"rank": i} | _rank(run, cost) for i, cost in enumerate(run.ranks)],
    }


def _result_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options that the costs may depend on, as a tree."""
    tree: dict[str, Any] = {}
    for name, value, meta in options(config):
        if meta["role"] is RESULT:
            group, _, key = name.rpartition(".")
            (tree.setdefault(group, {}) if group else tree)[key] = value
    return tree


def _every(run: DryRun) -> dict[str, int]:
    """Return the steps between two runs of each part of K-FAC that is switched on."""
    kfac = run.config.kfac
    every = {Stage.FACTORS.value: kfac.factor_update_freq}
    if kfac.fisher != "empirical":
        every["fisher"] = kfac.factor_update_freq
    every |= {Stage.DECOMPOSE.value: kfac.update_freq, Stage.PRECONDITION.value: 1}
    if kfac.adaptive_damping:
        every["damping"] = kfac.damping_freq
    return every if kfac.enabled else {}


def _messages(run: DryRun) -> dict[str, dict[str, dict[str, int]]]:
    """Return the messages by stage and kind of op. Each message counts once, not once per rank."""
    messages: dict[str, dict[str, dict[str, int]]] = {}
    if run.report is None:
        return messages
    for stage in Stage:
        kinds: dict[str, Traffic] = {}
        for op in run.report.plan.ops(stage):
            if isinstance(op, Message):
                kinds.setdefault(type(op).__name__, Traffic()).add(op)
        messages[stage.value] = {
            kind: {"messages": t.messages, "payload_bytes": t.payload_bytes}
            for kind, t in kinds.items()
        }
    return messages


def _rank(run: DryRun, cost: RankCost) -> dict[str, Any]:
    every = _every(run)
    flops = {stage.value: n for stage, n in cost.flops.items()}
    # Work that no stage of the plan contains: a Fisher pass, and a forward pass for the damping.
    more = {"fisher": run.fisher_flops, "damping": run.forward_flops}
    flops |= {name: n for name, n in more.items() if name in every}
    traffic = {
        stage.value: {kind: asdict(t) for kind, t in kinds.items()}
        for stage, kinds in cost.traffic.items()
    }
    per_step = {"flops": sum(n / every[name] for name, n in flops.items())}
    for what in ("messages", "payload_bytes", "wire_bytes"):
        per_step[what] = sum(_sum(traffic[s], what) / every[s] for s in traffic)
    return {
        "memory_bytes": cost.memory_bytes
        | {
            "statistics": cost.statistics_bytes,
            "buckets": {stage.value: n for stage, n in cost.bucket_bytes.items()},
            "peak": cost.peak_bytes,
        },
        "flops": flops,
        "traffic": traffic,
        "per_step": per_step,
    }


def _sum(kinds: dict[str, dict[str, float]], what: str) -> float:
    return sum(t[what] for t in kinds.values())


def default_path(run: DryRun) -> Path:
    """Return the path of the JSON file: the same for the same configuration and ranks."""
    return Path("plans", f"{run_id(run.config)}-{run.world_size}.json")


def write(run: DryRun, path: Path) -> None:
    """Write the JSON file; raise :class:`UsageError` if it cannot be written."""
    write_text(path, to_json(run), f"--out {path}", make_folder=True)


def to_json(run: DryRun) -> str:
    """Return the JSON text of :func:`as_dict`'s result."""
    return json.dumps(as_dict(run), indent=1) + "\n"


def _trained(run: DryRun) -> str:
    """Return the names of model, data and task, or the name of the problem file."""
    config, shape = run.config, list(run.shape)
    if isinstance(config.data, ProblemDataConfig) and config.data.file is not None:
        return f"the problem {problem_file.title(config.data.file, config.data.arguments)} {shape}"
    return f"{config.model.name} on {config.data.name} {shape}, task {config.task.name}"


def describe(run: DryRun, *, by_layer: bool = False) -> str:
    """Return the text to print: what K-FAC adds comes first, then what this follows from.

    ``by_layer`` lists each layer at the end, also those without K-FAC.
    """
    config, report = run.config, run.report
    batch, parts = config.trainer.batch_size, config.trainer.accumulate
    ranks = f" over {run.world_size} ranks" if run.world_size > 1 else ""
    lines = [
        "K-FAC: off (kfac=none)" if report is None else _verdict(run),
        "",
        f"run {run_id(config)}: {_trained(run)}, optimizer {config.optimizer.name}, "
        f"batch {batch}{ranks}"
        f"{f' in {parts} parts' if parts > 1 else ''}, {config.trainer.precision}",
        f"parameters {run.parameters:,} ({_bytes(4 * run.parameters)} in fp32)",
        f"forward and backward: {_flop(run.step_flops)} per step{' and rank' if ranks else ''}",
    ]
    if report is None:
        return "\n".join(lines)
    workers = len(report.plan.placements[0].grad_workers)
    lines += [
        report.coverage(by_layer=False),
        f"strategy {report.plan.strategy}, method {report.plan.method}, "
        f"{run.world_size} rank(s), {workers} gradient worker(s) per layer, "
        f"factors in {config.kfac.state_dtype}{_blocks(config)}",
        *config.kfac.changes(),
        "",
        *_table(run),
    ]
    if (budget := run.config.kfac.max_overhead) is not None:
        lines += [
            "",
            f"kfac.max_overhead={budget:g}: a run measures its machine, and may choose a "
            "cheaper plan",
        ]
    if by_layer:
        lines += ["", *report.coverage().splitlines()]
    return "\n".join(lines)


def _blocks(config: TrainConfig) -> str:
    size = config.kfac.block_size
    return "" if size is None else f", in blocks of at most {size} rows"


@dataclass(frozen=True)
class CostRow:
    """A row of the table: one cost of every rank."""

    label: str
    every: int | None
    """Steps between two occurrences of the cost; None: it is there all the time."""
    by_rank: Sequence[float]
    write: Callable[[float], str]
    """Function from a number to its text."""


def _rows(run: DryRun) -> Iterator[CostRow | str]:
    """Yield the rows of the table; a text alone is a heading."""
    ranks, every = [_rank(run, cost) for cost in run.ranks], _every(run)
    memory = [r["memory_bytes"] for r in ranks]
    yield "memory"
    yield CostRow("factors", None, [m["factors"] for m in memory], _bytes)
    yield CostRow("decompositions", None, [m["decompositions"] for m in memory], _bytes)
    if "moments" in memory[0]:
        yield CostRow("Adam's moments", None, [m["moments"] for m in memory], _bytes)
    if "jobs" in memory[0]:
        jobs = [m["jobs"] for m in memory]
        yield CostRow("jobs of the thread", every[Stage.DECOMPOSE.value], jobs, _bytes)
    statistics = [m["statistics"] for m in memory]
    yield CostRow("statistics of a batch", every[Stage.FACTORS.value], statistics, _bytes)
    if run.world_size > 1:
        for stage in Stage:
            each = [m["buckets"][stage.value] for m in memory]
            yield CostRow(f"buckets, {stage.value}", every[stage.value], each, _bytes)
    yield CostRow("at the peak", None, [m["peak"] for m in memory], _bytes)
    yield "compute"
    for name, steps in every.items():
        yield CostRow(name, steps, [r["flops"][name] for r in ranks], _flop)
    yield CostRow("average step", 1, [r["per_step"]["flops"] for r in ranks], _flop)
    if run.world_size == 1:
        return  # There are no messages.
    for what, unit in (("messages", _count), ("payload_bytes", _bytes), ("wire_bytes", _bytes)):
        yield {"payload_bytes": "payload", "wire_bytes": "wire"}.get(what, what)
        for stage in Stage:
            each = [_sum(r["traffic"][stage.value], what) for r in ranks]
            yield CostRow(stage.value, every[stage.value], each, unit)
        yield CostRow("average step", 1, [r["per_step"][what] for r in ranks], unit)


def _table(run: DryRun) -> Iterator[str]:
    """Yield the lines of the table.

    Several ranks have the columns least, mean and heaviest, and the number of the heaviest rank.
    One rank has one column.
    """
    alone = run.world_size == 1
    columns = "" if alone else f"{'least':>13}{'mean':>13}{'heaviest':>13}  rank"
    yield f"{'':24}{'every':>5}{columns}"
    for row in _rows(run):
        if isinstance(row, str):
            yield row
            continue
        each = row.by_rank
        shown = [max(each)] if alone else [min(each), sum(each) / len(each), max(each)]
        where = "" if alone else "all" if min(each) == max(each) else str(each.index(max(each)))
        line = "".join(f"{row.write(n):>13}" for n in shown)
        yield f"  {row.label:22}{row.every or '':>5}{line}  {where}".rstrip()


def _verdict(run: DryRun) -> str:
    """Return a text: the cost of K-FAC on the heaviest ranks and the balance of decompositions."""
    ranks = [_rank(run, cost) for cost in run.ranks]
    flops = max(r["per_step"]["flops"] for r in ranks)
    memory = max(r["memory_bytes"]["peak"] for r in ranks)
    compared = ""
    if run.step_flops > 0:  # A model of embeddings alone has no products, which are what counts.
        share = flops / run.step_flops
        said = f"{100 * share:.0f} %" if share < 10 else f"{share:.0f} times those"
        compared = f" ({said} of forward and backward)"
    text = f"K-FAC adds {_flop(flops)} per step on average{compared} and {_bytes(memory)}"
    work = [cost.flops[Stage.DECOMPOSE] for cost in run.ranks]
    if run.world_size == 1 or not any(work):
        return text
    balance = max(work) / (sum(work) / len(work))
    return (
        f"{text} on the heaviest ranks\n"
        f"decompositions: the heaviest rank has {balance:.2f} times the mean"
    )


def _flop(n: float) -> str:
    if not n:
        return "none"
    for unit, size in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n / 1e3:.2f} kFLOP"


def _bytes(n: float) -> str:
    return size_text(n, decimals=2) if n else "none"


def _count(n: float) -> str:
    return f"{n:.4g}"
