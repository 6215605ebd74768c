"""Numbers beside the curves: at equal work, of a step by stage, and of layers."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from kfac_bench import report
from kfac_bench.record.events import Evaluated, Trained
from kfac_bench.record.score import HUGE
from kfac_bench.report.training_numbers import (
    condition_text,
    layer_tables,
    milliseconds,
    numbers_table,
    step_time,
)
from tests.support.written_runs import EVIL, two_optimizers, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return two_optimizers(tmp_path / "runs")


def add(run: Path, step: int, train_s: float, **fields: object) -> None:
    """Add an event of a training step to a run's event file."""
    event = Trained(step, train_s, 1.0, 0.5, 0.1, 1.0)
    with (run / "events.jsonl").open("a") as file:
        line = {"event": "Trained", **dataclasses.asdict(event), **fields}
        file.write(json.dumps(line) + "\n")


def add_metric(run: Path, step: int, train_s: float, accuracy: float) -> None:
    """Add an evaluation to a run's event file."""
    event = Evaluated(step, train_s, 1.0, {"accuracy": accuracy})
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "Evaluated", **dataclasses.asdict(event)}) + "\n")


def test_a_step_is_divided_into_the_optimizers_share_and_the_stages_of_kfac(folder: Path) -> None:
    for run in ("kfac0", "kfac1", "kfac2"):  # 30 steps in 1 s, then 10 and 20 steps
        means = {"Precondition": 0.005, "WriteBack": 0.005, "Decompose": 0.01}
        add(folder / run, 40, 1.4, stage_mean_s=means, data_wait_share=0.25)
        means |= {"Odd": 0.001, "Bad": -1, EVIL: math.nan, "Text": "x"}
        add(folder / run, 60, 2.4, stage_mean_s=means)
    found = report.compare([folder])
    times = step_time(found.settings)
    assert times is not None
    assert times.names == [
        "forward, backward, optimizer",
        "waiting for data",
        "decompositions",
        "preconditioning",
        "other",
    ]
    rows = dict(times.rows)
    waited, stages = 0.25 * 0.4, 30 * 0.02 + 20 * 0.001
    want = [2.4 - waited - stages, waited, 30 * 0.01, 30 * 0.01, 20 * 0.001]
    assert rows["K-FAC + SGD"] == pytest.approx([1e3 * x / 60 for x in want])
    # seeds 0 to 2 of SGD took 2, 3 and 4 s
    assert rows["SGD"] == pytest.approx([1e3 * 9 / 90, 0, 0, 0, 0])
    page = report.html(found)
    bars = re.findall(r'<rect class="s[0-6]" x="([^"]*)" width="([^"]*)"', page)
    assert bars[0] == ("0%", "100.0%")
    widths = [float(width.strip("%")) for _, width in bars[5:]]
    assert sum(widths) == pytest.approx(40, abs=0.05)
    assert EVIL not in page


def test_steps_that_run_backwards_do_not_count(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    add(run, 20, 1.0)
    add(run, 40, math.nan)
    add(run, 10, 9.0)
    times = step_time(report.compare([run]).settings)
    assert times is not None
    assert times.rows == [("SGD", [pytest.approx(2000 / 30)])]


def test_the_numbers_are_medians_at_equal_work_in_units_for_people(folder: Path) -> None:
    for seed, memory in enumerate((25_276_502_016, 3e9, 2e9)):
        add(folder / f"sgd{seed}", 40, 3000.0, peak_memory_bytes=memory)
    # As in a real run, the slowest seed has an evaluation within 1 s: that of step 0.
    slowest = folder / "sgd2" / "events.jsonl"
    first, rest = slowest.read_text().split("\n", 1)
    slowest.write_text(first + "\n")
    add_metric(folder / "sgd2", 0, 0.0, 0.1)
    slowest.write_text(slowest.read_text() + rest)
    table = numbers_table(report.compare([folder]).settings)
    assert table.columns == (
        "optimizer",
        "accuracy after 1 s of training",
        "accuracy after 30 steps",
        "training time",
        "time per step",
        "memory",
    )
    sgd, kfac = ([cell.text for cell in row] for row in table.rows)
    assert sgd == ["SGD", "0.3100", "0.9300", "50 min 0 s", "1 min 15 s", "3.0 GB"]
    assert kfac == ["K-FAC + SGD", "0.9300", "0.9300", "1.0 s", "33.3 ms", "\u2013"]


def test_a_start_from_another_run_counts_its_own_steps_alone(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "sgd", target=None, seconds=None)  # 30 steps in 4 s
    run = write_run(tmp_path / "kfac", kfac=True, target=None, seconds=None)
    first = (run / "events.jsonl").read_text().partition("\n")[0] + "\n"
    resumed = {"event": "Resumed", "step": 30, "train_s": 4.0, "checkpoint": str(plain)}
    (run / "events.jsonl").write_text(first + json.dumps(resumed) + "\n")
    add(run, 40, 9.0, stage_mean_s={"Decompose": 0.4})
    add_metric(run, 40, 9.0, 0.95)
    found = report.compare([plain, run])
    times = step_time(found.settings)
    assert times is not None
    assert dict(times.rows)["K-FAC + SGD"] == pytest.approx([100, 400])
    # K-FAC has no value after the 4 s and the 30 steps of SGD.
    table = numbers_table(found.settings)
    assert table.columns[:2] == ("optimizer", "final accuracy")
    assert [row[3].text for row in table.rows] == ["133 ms", "500 ms"]


def test_a_seed_without_a_final_metric_counts_as_the_worst(tmp_path: Path) -> None:
    for seed, last in enumerate((0.9, 0.8, math.nan)):
        shares = (0.3, 0.6, last)
        write_run(tmp_path / str(seed), seed=seed, shares=shares, target=None, seconds=None)
    found = report.compare([tmp_path])
    ((_, *cells),) = numbers_table(found.settings).rows
    assert cells[0].text == "0.8000" == report.metric(found.rows[0].final)


def test_without_a_target_the_page_has_no_empty_columns(tmp_path: Path) -> None:
    write_run(tmp_path / "a", target=None, seconds=None)
    page = report.html(report.compare([tmp_path]))
    assert "final accuracy" in page
    assert "Comparison of runs" in page
    results = page.partition("</style>")[2].partition("<h2>How this was measured")[0]
    assert "to target" not in results


def test_layers_show_cosines_over_the_steps_and_conditions(folder: Path) -> None:
    for i in range(60):
        cosine = {f"block{n}": 1 - n / 20 for n in range(20)} | {EVIL: -0.5 if i < 30 else 0.99}
        condition = {"block7": 2e8, "block9": 1234.5} if i == 59 else {}
        for seed in range(3):
            add(folder / f"kfac{seed}", 31 + i, 1.1 + i, cosine=cosine, condition=condition)
    found = report.compare([folder])
    (table,) = layer_tables(found.settings)
    assert (table.optimizer, table.count) == ("K-FAC + SGD", 21)
    names = [row.name for row in table.rows]
    first, last, worst = ["block0", "block1", "block2"], ["block18", "block19"], ["block17"]
    assert names[:-1] == [*first, "block7", "block9", *worst, *last]
    strange = table.rows[-1]
    assert strange.shades == [0] * 12 + [5] * 12
    assert [cell.text for cell in strange.cosines] == ["-0.50", "0.99"]
    assert [cell.text for cell in strange.conditions] == ["\u2013", "\u2013"]
    assert [row.conditions[1].text for row in table.rows[3:5]] == ["2.0 \u00b7 10^8", "1,234"]
    page = report.html(found)
    assert "8 of 21 layers" not in page
    assert "9 of 21 layers" in page
    assert EVIL not in page


@pytest.mark.parametrize("value", [1e308, -1e308, math.inf, math.nan, 5e-324, -1.0])
def test_numbers_beyond_all_limits_are_left_out(tmp_path: Path, value: float) -> None:
    run = write_run(tmp_path / "a", kfac=True)
    names = ("loss", "lr", "nu", "damping", "data_wait_share", "step_mean_s", "peak_memory_bytes")
    layers, stages = {"a": value, "b": 0.5}, {"Decompose": value, "WriteBack": value}
    many = dict.fromkeys(names, value) | {"cosine": layers, "condition": layers}
    for step in (31, 32):
        add(run, step, 3.0, **many, stage_mean_s=stages)
    add(run, 33, value)
    found = report.compare([run])
    assert "0.50" in report.html(found)
    (table,) = layer_tables(found.settings)
    assert [row.name for row in table.rows] == (["b"] if not abs(value) < HUGE else ["a", "b"])


def test_numbers_have_no_exponent_for_people() -> None:
    assert [milliseconds(x) for x in (0, 0.0123, 38.46, 999.4, 1900.0, 1.9e6)] == [
        "\u2013",
        "0.0123 ms",
        "38.5 ms",
        "999 ms",
        "1.9 s",
        "31 min 40 s",
    ]
    assert [condition_text(x) for x in (1.0, 9.96, 945.2, 1e6)] == [
        "1.0",
        "10.0",
        "945",
        "1,000,000",
    ]
