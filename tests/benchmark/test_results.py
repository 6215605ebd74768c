"""The results of a row, from hand-made event files with known numbers."""

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from kfac_bench import cli
from kfac_bench.benchmark import (
    computed,
    figure,
    grid,
    measures,
    result_tables,
    run_end,
    schema,
    suite,
    write_reports,
)
from kfac_bench.benchmark.result import CellRuns, Measured, _beside, key_of, lines
from kfac_bench.benchmark.schema import (
    Benchmark,
    BenchmarkProfile,
    Check,
    Claim,
    Computed,
    FigureSpec,
    Known,
    MatrixSpec,
    Published,
    Quantity,
)
from kfac_bench.cli import suite_command
from kfac_bench.config import compose
from kfac_bench.errors import UsageError
from kfac_bench.record.event_log import EventLog, JsonlSink
from kfac_bench.record.events import Evaluated, RunEnded, RunStarted, TargetReached, Trained
from kfac_bench.record.runs import load
from kfac_bench.report.tables import Table

BEGIN = "<!-- made by kfac-bench report all --profile smoke --into -->"
EVERY = {"optimizer": ["SGD", "K-FAC"], "batch": ["64", "256"]}
ROW = Benchmark(
    "Made up",
    EVERY,
    ["model=resnet8", "logger=none"],
    [0, 1, 2],
    source="Nowhere, Table 9",
    each={
        "optimizer": {"SGD": ["kfac=none"]},
        "batch": {"64": ["trainer.batch_size=64"], "256": ["trainer.batch_size=256"]},
    },
    profiles={"smoke": BenchmarkProfile(axes={"batch": ["64"]}, level=0.5, notes=["smoke: small"])},
    computed=[
        Computed(
            "plan", {"batch": ["256"], "optimizer": ["K-FAC"]}, ["model=resnet8", "examples=2"]
        )
    ],
    quantities={
        "accuracy": Quantity("final", scale=100, unit="%", higher=True),
        "seconds": Quantity("seconds_to_level", unit="s", times={"optimizer": {"SGD": 2}}),
        "less": Quantity(of="seconds", against={"optimizer": "SGD"}, how="less", higher=True),
        "gain": Quantity(
            of="accuracy", against={"optimizer": "SGD"}, how="difference", higher=True
        ),
        "state": Quantity("state_mb", unit="MB"),
    },
    published=[
        Published(
            "accuracy",
            "Table 9",
            ["optimizer", "batch"],
            {"SGD": {64: 80.0, 256: 70.0}, "K-FAC": {64: 90.0}},
        ),
        Published("less", "Table 9", ["optimizer"], {"K-FAC": [20, 60]}),
        Published("hours", "section 3", [], 5),
    ],
    figure=FigureSpec(["accuracy"], "batch", "optimizer"),
    notes=["The paper says two things."],
)


def write(path, value, reached_s=None, status="finished", world_size=1, metrics=None, **events):
    """Write a run that ends with ``value`` and is above 0.5 from ``reached_s`` on."""
    path.mkdir(parents=True, exist_ok=True)
    log = EventLog([JsonlSink(path / "events.jsonl")])
    config = {"seed": 0, "trainer": {"batch_size": 32, "target": events.get("target")}}
    log.emit(RunStarted(0, 0.0, path.name, "acc", True, config, {"world_size": world_size}))
    log.emit(Evaluated(0, 0.0, 0.0, {"acc": 0.1}))
    for each in events.get("trained", []):
        log.emit(each)
    if reached_s is not None:
        log.emit(Evaluated(5, reached_s, 2.5, {"acc": 0.5}))
    if events.get("target") is not None and reached_s is not None:
        log.emit(TargetReached(5, reached_s, "acc", 0.5, 0.5))
    log.emit(Evaluated(10, 9.0, 5.0, {"acc": value} | (metrics or {})))
    log.emit(RunEnded(10, 9.0, status))
    log.close()
    return load(path)


@pytest.fixture(scope="module")
def row(tmp_path_factory):
    """Return a row: SGD met three targets; K-FAC met one, missed one, and one process failed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "load", lambda name: ROW)
        folder = tmp_path_factory.mktemp("runs") / "made_up"
        found = suite.row("made_up", "smoke", runs_dir=str(folder))
    cells = {(c.point["optimizer"], c.seed): c.path() for c in found.cells}
    for seed, value in enumerate((0.7, 0.8, 0.75)):
        write(cells["SGD", seed], value, reached_s=4.0 + seed)
    write(cells["K-FAC", 0], 0.9, reached_s=4.0)
    write(cells["K-FAC", 1], 0.4)
    run_end.record_failure(cells["K-FAC", 2], "x", "out of memory", -9)
    assert [cell.run() for cell in found.computed] == [(True, "computed")]
    return found


def results(row):
    found = suite.attempts(row)
    return {
        (line.quantity, line.point.get("optimizer", ""), line.point.get("batch", "")): line
        for line in suite.results(row, found)
    }


@pytest.mark.parametrize(
    ("quantity", "check", "fragment"),
    [
        ({"measure": "finall"}, {}, "'finall' is no measure; did you mean final?"),
        ({"of": "acc", "how": "ratio"}, {}, "of: acc is no quantity above this one"),
        ({"of": "accuracy", "how": "diference"}, {}, "how: 'diference': choose one of less"),
        ({"of": "accuracy"}, {}, "how: '': choose one of"),
        ({"of": "accuracy", "how": "less", "against": {"optimizer": "sgd"}}, {}, "optimizer: sgd"),
        ({}, None, "needs checks:"),
        ({}, {"quantity": "acc", "at_least": 1}, "acc is no quantity"),
        ({}, {"at": {"optimizer": "Adam"}, "at_least": 1}, "at: no cell has"),
        ({}, {"at": {"optimizer": "SGD"}, "at_least": 1}, "name all axes"),
        ({}, {}, "needs at_most: or at_least:"),
    ],
)
def test_a_file_whose_numbers_would_be_wrong_is_refused(quantity, check, fragment):
    """Otherwise a wrong ``how:`` shows a ratio, and a claim without a limit is supported."""
    quantities = {"accuracy": Quantity("final"), "x": Quantity(**{"measure": "final"} | quantity)}
    checks = [] if check is None else [Check(**{"quantity": "x"} | check)]
    row = replace(ROW, quantities=quantities, claims=[Claim("Yes.", checks)])
    with pytest.raises(UsageError, match=re.escape(fragment)):
        suite.check(row, "mine.yaml")


@pytest.mark.parametrize(
    ("part", "fragment"),
    [
        (
            {"each": {"optimizer": {"adma": ["optimizer=adam"]}}},
            "each: optimizer: adma: choose one",
        ),
        ({"each": {"optimizer bach": {}}}, "each: bach: choose one of optimizer, batch"),
        (
            {"quantities": {"x": Quantity("final", times={"batch": {"65": 2}})}, "claims": []},
            "quantities: x: batch: 65: choose one of 64, 256",
        ),
        ({"matrix": MatrixSpec(["acc"], "optimizer", "batch")}, "matrix: quantities: acc: choose"),
        (
            {"matrix": MatrixSpec(["less"], "optimiser", "batch")},
            "matrix: optimiser: choose one of",
        ),
        (
            {"figure": FigureSpec(["less"], "batches", "optimizer")},
            "figure: batches: choose one of",
        ),
        (
            {"figure": FigureSpec(["less"], "batch", "optimizer", compared="bach")},
            "figure: bach: choose one of",
        ),
        (
            {"figure": FigureSpec(["less"], "optimizer", "batch", lines=True)},
            "figure: lines: the axis optimizer needs whole numbers",
        ),
        (
            {"matrix": MatrixSpec(["less"], "optimizer", "optimizer")},
            "matrix: the axis batch has no place",
        ),
    ],
)
def test_a_table_or_figure_of_unknown_names_is_refused(part, fragment):
    with pytest.raises(UsageError, match=re.escape(f"mine.yaml: {fragment}")):
        suite.check(replace(ROW, **part), "mine.yaml")


@pytest.mark.parametrize("value", ["76 %", None, [1, 2, 3]])
def test_a_published_value_that_is_no_number_is_refused(value):
    published = [Published("accuracy", "Table 9", ["optimizer"], {"SGD": value})]
    with pytest.raises(UsageError, match="expected a number, or"):
        suite.check(replace(ROW, published=published), "mine.yaml")


def test_lines_have_medians_intervals_and_misses(row):
    lines = results(row)
    sgd = lines["accuracy", "SGD", "64"]
    assert sgd.measured == Measured(75.0, 70.0, 80.0, 3, 0, mean=75.0)
    assert (sgd.published, sgd.source) == (80.0, "Table 9")
    assert result_tables.ratio(sgd) == pytest.approx(75 / 80)
    kfac = lines["accuracy", "K-FAC", "64"]
    assert (kfac.measured.value, kfac.measured.seeds, kfac.measured.missed) == (40.0, 3, 1)
    assert lines["accuracy", "SGD", "256"].measured is None, "a cell that this profile has not"
    assert lines["seconds", "SGD", "64"].measured.value == 10.0  # twice 5.0
    missed = lines["seconds", "K-FAC", "64"]
    assert (missed.measured.value, missed.measured.missed) == (math.inf, 2)
    assert lines["hours", "", ""].published == 5.0


def test_quantities_are_compared_seed_by_seed(row):
    lines = results(row)
    less = lines["less", "K-FAC", "64"]
    assert less.measured.value == -math.inf, "two of three seeds missed"
    assert less.measured.high == pytest.approx(50.0)  # 4.0 s against twice 4.0 s
    assert less.published == (20.0, 60.0)
    assert ("less", "SGD", "64") not in lines, "SGD beside itself"
    gain = lines["gain", "K-FAC", "64"]
    assert gain.published == pytest.approx(10.0)
    assert (gain.source, result_tables.ratio(gain)) == ("from Table 9", None)


def test_a_miss_stays_a_miss_and_nothing_is_compared_with_a_miss():
    assert _beside(math.inf, 0.0, "ratio", worst=math.inf) == math.inf
    assert _beside(4.0, math.inf, "less", worst=-math.inf) is None


def test_a_ratio_to_a_missed_target_is_an_upper_bound(row):
    quantities = ROW.quantities | {
        "ratio": Quantity(of="seconds", against={"optimizer": "K-FAC"}, how="ratio")
    }
    lines = results(replace(row, benchmark=replace(ROW, quantities=quantities)))
    ratio = lines["ratio", "SGD", "64"]
    # Twice 4.0 s beside 4.0 s, twice 5.0 s beside a miss after 9.0 s, and a process that failed.
    middle = round((2 + 10 / 9) / 2, 9)
    assert ratio.measured == Measured(middle, round(10 / 9, 9), 2.0, 2, 0, 1, mean=middle)
    shown = result_tables.compared(ROW, [ratio], [])
    assert "at most 1.556" in shown.rows[0]


def test_a_computed_cell_has_a_column_of_its_own(row):
    line = results(row)["state", "K-FAC", "256"]
    assert line.measured is None
    assert line.computed > 0
    # No line has a published number, so there are no columns for them.
    assert result_tables.compared(ROW, [line], []).columns == [
        "optimizer",
        "batch",
        "quantity",
        "computed",
    ]


@pytest.mark.parametrize(
    ("kind", "words", "fragment"),
    [
        ("simulate", ["hardware=longhorn_v100", "model=resnet50"], "needs the word 'ranks'"),
        ("plan", ["model=resnet8", "examples=many"], "invalid literal for int"),
        ("simulate", ["hardware=longhorn_v100", "global=64", "part=32", "ranks=0"], "by zero"),
    ],
)
def test_wrong_words_of_computed_cells_are_a_failed_cell(tmp_path, kind, words, fragment):
    part = Computed(kind, {"optimizer": ["K-FAC"]}, words)
    (cell,) = computed.cells(replace(ROW, computed=[part]), str(tmp_path))
    is_good, text = cell.run()
    assert not is_good
    assert fragment in text


def test_unknown_hardware_of_computed_cells_is_refused(tmp_path):
    part = Computed("plan", {"optimizer": ["K-FAC"]}, ["model=resnet8", "hardware=none"])
    (cell,) = computed.cells(replace(ROW, computed=[part]), str(tmp_path))
    with pytest.raises(UsageError, match=r"hardware=none: conf/hardware has no such file"):
        cell.path()


def test_a_computed_cell_is_new_if_its_file_changes(tmp_path, monkeypatch):
    words = ["file=work", "hardware=machine", "examples=2", "ranks=2", "strategy=comm_opt"]
    part = Computed("simulate", {"optimizer": ["K-FAC"]}, words)
    (cell,) = computed.cells(replace(ROW, computed=[part]), str(tmp_path / "runs"))
    monkeypatch.setattr(compose, "CONF_DIR", tmp_path)
    paths = []
    for work, machine in (("a", "a"), ("b", "a"), ("b", "b")):
        for folder, name, text in (("simulation", "work", work), ("hardware", "machine", machine)):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{name}.yaml").write_text(text)
        paths.append(cell.path())
    assert len({*paths}) == 3


def test_two_computed_parts_share_a_point(tmp_path):
    parts = [
        Computed("plan", {"optimizer": ["K-FAC"]}, ["model=resnet8", "examples=2"]),
        Computed("plan", {"optimizer": ["K-FAC"]}, ["model=resnet20", "examples=2"]),
    ]
    first, second = computed.cells(Benchmark(**(vars(ROW) | {"computed": parts})), str(tmp_path))
    for cell, numbers in ((first, {"state_mb": 3.0}), (second, {"peak_mb": 5.0, "state_mb": 4.0})):
        computed._write(cell, numbers)
    quantities = {"state": Quantity("state_mb"), "peak": Quantity("peak_mb")}
    benchmark = Benchmark(**(vars(ROW) | {"quantities": quantities, "published": []}))
    found = CellRuns(computed={key_of(first.point): [load(c.path()) for c in (first, second)]})
    numbers = {line.quantity: line.computed for line in lines(benchmark, found, None)}
    assert numbers == {"state": 3.0, "peak": 5.0}


def test_points_have_their_axes_in_the_order_of_the_file():
    """A figure puts the axes of a point into words, and equal points must have equal words."""
    values = {str(n): {"SGD": {"1": 1.0}, "K-FAC": {"1": 2.0}} for n in range(20)}
    published = Published("accuracy", by=["batch", "optimizer", "ranks"], values=values)
    axes = {"optimizer": ["SGD", "K-FAC"], "batch": [*values]}
    row = Benchmark(**(vars(ROW) | {"axes": axes, "published": [published]}))
    found = lines(row, CellRuns(), None)
    assert len(found) == 40
    assert {(*line.point,) for line in found} == {("optimizer", "batch", "ranks")}


def write_phase(folder, points, weights=None, status="finished"):
    """Write a run whose events have these steps and seconds."""
    folder.mkdir(parents=True)
    log = EventLog([JsonlSink(folder / "events.jsonl")])
    config = {"seed": 0, "model": {"weights": weights}}
    log.emit(RunStarted(0, 0.0, folder.name, "acc", True, config, {"world_size": 1}))
    for step, seconds in points:
        log.emit(trained(step, seconds, step / 10))
    log.emit(RunEnded(*points[-1], status))
    log.close()


def by_steps(row):
    lines = suite.results(row, suite.attempts(row))
    return {(line.quantity, line.point["steps"]): line for line in lines}


PHASES = ["first-{profile}-s{seed}", "kfac-{profile}-s{seed}"]
THAN = ["first-{profile}-s{seed}", "lamb-{profile}-s{seed}"]


def test_times_of_phases_are_those_up_to_the_checkpoint(tmp_path, monkeypatch):
    benchmark = Benchmark(
        "Phases",
        {"steps": ["20", "15"]},
        ["model=resnet8", "logger=none"],
        [0, 1],
        each={"steps": {"20": ["trainer.max_steps=2"], "15": ["trainer.max_steps=1"]}},
        profiles={"smoke": BenchmarkProfile()},
        quantities={
            "phase 2": Quantity("less_phase2_time", phases=PHASES[1:], than=THAN[1:]),
            "both": Quantity("less_time", phases=PHASES, than=THAN),
        },
    )
    monkeypatch.setattr(schema, "load", lambda name: benchmark)
    shared = tmp_path / "shared"
    found = suite.row("made_up", "smoke", runs_dir=str(tmp_path / "made_up"))
    # Steps 10 and 20 are recorded: step 15 has the time between them.
    write_phase(shared / "first-smoke-s0", [(5, 20.0), (10, 40.0)])
    write_phase(shared / "lamb-smoke-s0", [(10, 30.0), (30, 60.0)])
    write_phase(shared / "kfac-smoke-s0", [(10, 20.0), (20, 40.0), (30, 55.0)])
    for cell in found.cells:
        weights = f"shared/kfac-smoke-s{cell.seed}/checkpoints/step-000000{cell.point['steps']}"
        write_phase(cell.path(), [(1, 7.0)], weights)
    got = by_steps(found)
    # Seed 1 has no phases, so only seed 0 counts.
    assert got["phase 2", "20"].measured == Measured(
        *[pytest.approx(100 * (1 - 40 / 60))] * 3, 1, 0, mean=pytest.approx(100 * (1 - 40 / 60))
    )
    assert got["phase 2", "15"].measured.value == pytest.approx(100 * (1 - 30 / 60))
    assert got["both", "20"].measured.value == pytest.approx(100 * (1 - 80 / 100))
    assert got["both", "15"].measured.value == pytest.approx(100 * (1 - 70 / 100))
    # A failed phase has no time, and neither has a checkpoint that the events do not reach.
    write_phase(shared / "first-smoke-s1", [(10, 40.0)])
    write_phase(shared / "lamb-smoke-s1", [(10, 30.0)], status="failed")
    write_phase(shared / "kfac-smoke-s1", [(10, 20.0)])
    assert by_steps(found)["both", "20"].measured.seeds == 1


def test_the_report_writes_the_table_and_its_files(row):
    written = write_reports.write(row)
    text = (row.folder / "smoke.md").read_text()
    for line in (
        "| SGD | 64 | accuracy (%) | 75 | - | 70 - 80 | 3 | - | 80 | 0.9375 | Table 9 |",
        "| K-FAC | 64 | seconds (s) | - | missed | 4 - missed | 1 of 3 | - | - | - |  |",
        "| K-FAC | 64 | less | - | missed | missed - 50 | 1 of 3 | - | 20 - 60 | - | Table 9 |",
    ):
        assert line.replace(" - ", " \u2013 ").replace(" - ", " \u2013 ") in text
    assert "out of memory" in text
    assert "The paper says two things." in text
    assert "kfac=none" in text
    cell = row.cells[0].path().name
    assert f"[{cell}](<{cell}/events.jsonl>)" in text
    assert [f.name for f in written.files] == ["smoke.md", "smoke.svg", "smoke.html"]
    drawn = (row.folder / "smoke.svg").read_text()
    assert drawn.startswith("<svg")
    assert all(word in drawn for word in ("K-FAC", "measured", "published", "256"))


def test_a_figure_of_lines_and_no_figure_without_lines(row):
    lines = list(results(row).values())
    line = FigureSpec(["accuracy"], "batch", "optimizer", lines=True)
    assert "<svg" in figure.svg(Benchmark(**(vars(ROW) | {"figure": line})), lines)
    assert figure.svg(ROW, [x for x in lines if x.quantity == "less"]) is None


def test_a_document_lists_all_rows_between_its_marks_and_each_row_has_a_page(
    row, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    document = tmp_path / "doc.md"
    document.write_text(f"# Mine\n{BEGIN}\nold\n{write_reports.END}\nafter\n")
    written = [write_reports.write(row)]
    write_reports.write_all(written, document, profile="smoke")
    text = document.read_text()
    assert text.startswith(f"# Mine\n{BEGIN}\n\n**Pages of tables**\n")
    assert "| [made_up](<results/smoke/made_up.md>) |" in text
    assert text.endswith(f"{write_reports.END}\nafter\n")
    assert "old" not in text
    page = (tmp_path / "results/smoke/made_up.md").read_text()
    assert page.startswith("# made_up --profile smoke\n")
    assert "| K-FAC | 64 | seconds (s) |" in page
    assert (
        page.removeprefix("# made_up --profile smoke")
        in (tmp_path / "runs/all/smoke.md").read_text()
    )
    write_reports.write_all(written, document, profile="smoke")
    assert document.read_text() == text
    document.write_text("no marks")
    with pytest.raises(UsageError, match="add the lines"):
        write_reports.write_all(written, document, profile="smoke")
    with pytest.raises(UsageError, match="no row was run yet"):
        write_reports.write_all([], None)


def test_the_page_of_a_row_with_claims_has_all_computed_numbers(row):
    of_claims = replace(row, benchmark=replace(ROW, claims=[Claim("It is small.")]))
    computed = "| K-FAC | 256 | state (MB) |"
    written = write_reports.write(row)
    assert computed not in write_reports.summary([written])
    assert computed in write_reports.summary([replace(written, row=of_claims)])


def test_a_row_without_runs_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "load", lambda name: ROW)
    fresh = suite.row("made_up", None, runs_dir=str(tmp_path))
    with pytest.raises(UsageError, match="no cell was run yet; start with kfac-bench run made_up"):
        write_reports.write(fresh)


def trained(step, train_s, epoch, **stage_s):
    return Trained(step, train_s, epoch, 1.0, 0.1, 10.0, stage_s=stage_s)


def test_measures_of_a_run(tmp_path):
    events = [
        trained(1, 1.0, 0.5, Decompose=9.0),
        trained(2, 1.5, 1.0, Precondition=0.002, ShareGradients=0.004),
        trained(3, 2.5, 1.5, Decompose=0.5, Precondition=0.004, ShareGradients=0.006),
        trained(4, 3.1, 2.0, Decompose=0.7, ShareGradients=0.004),
    ]
    run = write(tmp_path, 0.9, 4.0, world_size=2, trained=events, target=0.5, metrics={"mAP": 0.25})
    damaged = write(tmp_path / "damaged", 0.9, 4.0, world_size=0, trained=events, target=0.5)
    assert math.isnan(measures.measure(damaged, "examples_per_s_per_rank", 0.5))
    got = {
        name: measures.measure(run, name, 0.5)
        for name in (
            *measures.MEASURES,
            "metric mAP",
            "stage Precondition",
            "stage share",
            "stage Nothing",
            "batch",
        )
    }
    assert got == pytest.approx(
        {
            "final": 0.9,
            "steps_to_target": 5,
            "seconds_to_target": 4.0,
            "epochs_to_target": 2.5,
            "targets_per_s_per_rank": 0.125,
            "steps_to_level": 5,
            "seconds_to_level": 4.0,
            "epochs_to_level": 2.5,
            "train_s": 9.0,
            "ms_per_step": 700.0,
            "epoch_s": 1.4,
            "examples_per_s_per_rank": 32 / 0.7 / 2,
            "steps_per_s_per_rank": 1 / 0.7 / 2,
            "update_extra_s": (9.0 + 0.51 + 0.704) / 3,
            "metric mAP": 0.25,
            "stage Precondition": 4.0,
            "stage share": 5.0,
            "stage Nothing": math.nan,
            "batch": math.nan,
        },
        nan_ok=True,
    )
    failed = write(tmp_path / "failed", 0.9, status="failed", metrics={"mAP": 0.25})
    diverged = write(tmp_path / "diverged", math.nan, metrics={"mAP": math.nan})
    names = ("final", "metric mAP", "train_s")
    assert [measures.measure(failed, name, None) for name in names] == [math.inf] * 3
    assert [measures.measure(diverged, name, None) for name in names] == [math.inf, math.inf, 9.0]
    assert math.isnan(measures.measure(run, "metric of another task", None))
    assert measures.measure(run, "epochs_to_level", 0.95) == math.inf
    assert math.isnan(measures.measure(run, "epochs_to_level", None))
    never = write(tmp_path / "never", 0.4)
    assert math.isnan(measures.measure(never, "seconds_to_target", None))


def test_a_clock_that_stands_still_gives_no_number(tmp_path):
    """The initial weights may meet the target, after no training seconds."""
    events = [trained(1, 0.0, 0.5), trained(2, 0.0, 1.0)]
    run = write(tmp_path, 0.9, 0.0, trained=events, target=0.5)
    for name in ("targets_per_s_per_rank", "examples_per_s_per_rank", "steps_per_s_per_rank"):
        assert math.isnan(measures.measure(run, name, None)), name


def test_the_report_keeps_the_cells_that_only_left_out(row, monkeypatch, capsys):
    monkeypatch.setattr(schema, "load", lambda name: ROW)
    words = ["run", "made_up", "--profile=smoke", "--only", "SGD", "--runs-dir", str(row.folder)]
    with pytest.raises(SystemExit) as caught:
        cli.bench(words)
    said = capsys.readouterr().out
    assert (caught.value.code, said.count("(before)")) == (0, 3)
    assert "| K-FAC | 64 | accuracy (%) | 40 |" in (row.folder / "smoke.md").read_text()


def test_the_time_left_counts_no_cells_that_ran_before(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(schema, "load", lambda name: ROW)
    monkeypatch.setattr(suite, "names", lambda wanted, profile: ["one", "two", "three"])
    now = 0.0
    monkeypatch.setattr(suite_command.time, "monotonic", lambda: now)

    def run(row, say, **options):
        nonlocal now
        now += 60.0 * suite.cells_left(row, retry=False)
        return 0

    monkeypatch.setattr(suite, "run", run)
    for cell in suite.row("one", "smoke").cells:
        write(cell.path(), 0.7, reached_s=4.0)
    with pytest.raises(SystemExit):
        cli.bench(["run", "all", "--profile=smoke"])
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("== ")]
    assert heads == [
        "== 1/3 one: Made up",
        "== 2/3 two: Made up",
        "== 3/3 three: Made up, about 6 min left in all",
    ]


def test_a_real_cell_is_run_and_reported(tmp_path, monkeypatch, capsys):
    """This test starts a real process."""
    tree = Benchmark(
        "Tiny",
        {"optimizer": ["K-FAC"]},
        ["model=autoencoder", "model.hidden=[8,4]", "logger=none", "trainer.max_steps=2"],
        source="TPDS 2022, nowhere",
        profiles={"smoke": BenchmarkProfile()},
        quantities={"loss": Quantity("final")},
        published=[Published("loss", "nowhere", ["optimizer"], {"K-FAC": 2.0})],
        figure=FigureSpec(["loss"], "optimizer", "optimizer"),
    )
    monkeypatch.setattr(schema, "load", lambda name: tree)
    words = ["tiny", "--profile=smoke", "trainer.predictions=0", "--runs-dir", str(tmp_path / "t")]

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.bench([*arguments])
        return caught.value.code, capsys.readouterr().out

    code, said = call("run", *words)
    assert code == 0
    assert "[1/1] K-FAC seed 0: finished at step 2" in said
    assert "nowhere" in said
    assert f"md: {tmp_path / 't' / 'smoke.md'}" in said
    (events,) = (tmp_path / "t").glob("*/events.jsonl")
    before = events.read_bytes()
    code, said = call("run", *words)
    assert (code, events.read_bytes()) == (0, before)
    assert "(before)" in said
    runs = f"--runs-dir={tmp_path / 't'}"
    _, said = call("run", "--retry", "tiny", "--seeds", "0", "--profile=smoke", words[2], runs)
    assert "[1/1] K-FAC seed 0: finished at step 2" in said
    assert "(before)" in said, "an override behind an option was not the run's"
    assert call("report", *words)[0] == 0
    code, _ = call("report", "tiny", "--profile=smok", "--runs-dir", str(tmp_path / "t"))
    assert code == 2


def table_of(lines, **changed):
    return result_tables.compared(Benchmark(**(vars(ROW) | changed)), lines, [], "a ResNet-8")


def test_numbers_of_another_model_are_named_and_not_compared(row):
    """Seconds times an assumed factor are not measured: they have a column of their own."""
    lines = results(row)
    shown = table_of([lines["accuracy", "SGD", "64"], lines["seconds", "SGD", "64"]])
    assert shown.columns[3:5] == ["measured: a ResNet-8", "projected: a ResNet-8"]
    at = dict(zip(shown.columns, shown.rows[0], strict=True))
    assert (at["measured: a ResNet-8"], at["published"], at["ratio"]) == (75.0, 80.0, None)
    assert [r[3:5] for r in shown.rows] == [[75.0, None], [None, 10.0]]


def test_a_number_that_the_table_gave_says_so_and_has_no_ratio(row):
    found = suite.attempts(row)
    part = ROW.computed[0]
    computed = [Computed(**(vars(part) | {"known": [Known("state", only={"batch": ["256"]})]}))]
    published = [Published("state", "Table 9", ["optimizer"], {"K-FAC": 1.0})]
    tree = Benchmark(**(vars(ROW) | {"computed": computed, "published": published}))
    lines = suite.results(replace(row, benchmark=tree), found)
    (line,) = [x for x in lines if x.quantity == "state" and x.computed is not None]
    assert (line.known, result_tables.ratio(line)) == ("fitted", None)
    (shown,) = result_tables.compared(tree, [line], []).rows
    assert any(str(cell).endswith(" (fitted)") for cell in shown)


def test_a_matrix_has_the_shape_of_the_papers_table(row):
    tree = Benchmark(**(vars(ROW) | {"matrix": MatrixSpec(["accuracy"], "batch", "optimizer")}))
    shown = result_tables.matrix(tree, list(results(row).values()))
    assert shown.columns == ["batch", "accuracy (%), SGD", "accuracy (%), K-FAC"]
    assert shown.rows == [["64", "75 (80)", "40 (90)"], ["256", "\u2013 (70)", None]]
    assert result_tables.matrix(ROW, []) is None


def test_a_report_of_failed_cells_names_no_figure_that_is_not_there(row, tmp_path):
    cell = grid.cells(ROW, str(tmp_path), [0], "smoke")[0]
    run_end.record_failure(cell.path(), "x", "out of memory", -9)
    curved = Benchmark(**(vars(ROW) | {"curves": True}))
    written = write_reports.write(
        replace(row, benchmark=curved, cells=[cell], computed=[], folder=tmp_path)
    )
    assert "out of memory" in written.files[0].read_text()
    for name in re.findall(r"!\[[^]]*\]\(([^)]*)\)", written.files[0].read_text()):
        assert (tmp_path / name).exists(), name


def test_a_cell_that_was_killed_at_its_start_has_not_ended_and_a_damaged_one_has_failed(
    row, tmp_path
):
    """The next start continues the first one, so it is no miss. A damaged file spoils no report."""
    killed, damaged = grid.cells(ROW, str(tmp_path), [0], "smoke")
    killed.path().mkdir(parents=True)
    (killed.path() / "events.jsonl").touch()
    run_end.record_failure(damaged.path(), "x", "no memory")
    (damaged.path() / "events.jsonl").write_text("no event\n")
    part = replace(row, cells=[killed, damaged], computed=[])
    found = suite.attempts(part)
    assert [attempt.state.value for attempt in found] == ["has not ended", "failed"]
    assert "events.jsonl:1: not an event" in found[1].reason
    # Nor does it stop the other runs: it has failed.
    assert not run_end.will_run(damaged.path(), retry=False)
    assert "events.jsonl:1: not an event" in run_end.outcome(damaged.path())
    measured = [line for line in suite.results(part, found) if line.measured]
    assert {line.point["optimizer"] for line in measured} == {"K-FAC"}


def test_a_cell_that_could_not_start_is_not_called_failed(row, tmp_path):
    cell = grid.cells(ROW, str(tmp_path), [0], "smoke")[0]
    run_end.record_failure(cell.path(), "x", "first, which it starts from, failed", has_run=False)
    (attempt,) = suite.attempts(replace(row, cells=[cell], computed=[]))
    (shown,) = result_tables.attempts_table([attempt], tmp_path).rows
    assert shown[1] == "not run"
    assert "which it starts from" in shown[-1]


def test_a_table_on_the_terminal_has_no_escape_codes():
    drawn = suite_command._terminal(Table("a\x1b[2J", ["b\x1b[2J"], [["c\x1b[2J"]]))
    console = Console(file=io.StringIO())
    console.print(drawn)
    assert "\x1b" not in console.file.getvalue()


def test_links_of_cells_are_quoted(row, tmp_path):
    cell = grid.cells(ROW, str(tmp_path / "my runs|#1"), [0], "smoke")[0]
    write(cell.path(), 0.5)
    found = suite.attempts(replace(row, cells=[cell], computed=[]))
    table = result_tables.attempts_table(found, tmp_path)
    assert f"(<my%20runs%7C%231/{cell.path().name}/events.jsonl>)" in table.markdown()
