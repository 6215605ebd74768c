"""The dashboard names the metrics that the sink logs, and has a panel for each chart."""

import dataclasses
import json
import re
import socket
from dataclasses import asdict

import numpy as np
import pytest
from PIL import Image

from kfac_bench import cli
from kfac_bench.benchmark.scaling.measured import STAGES as FIG7
from kfac_bench.config import LoggerConfig, compose
from kfac_bench.core.planning import plan as ops
from kfac_bench.dashboard import views
from kfac_bench.errors import UsageError
from kfac_bench.record.event_log import JsonlSink
from kfac_bench.record.events import (
    Checkpointed,
    Evaluated,
    Predicted,
    Resumed,
    RunEnded,
    SampleSkipped,
    TargetReached,
    Trained,
)
from kfac_bench.record.runs import flatten, plain
from kfac_bench.record.sinks.panels import GROUPS, OPTIONS, SECTIONS, STAGES, WORLD_SIZE
from kfac_bench.record.sinks.view import ShownRun
from kfac_bench.record.sinks.wandb import WandbSink, wandb_id
from kfac_bench.report.tables import Table
from kfac_bench.training import environment
from tests.support import wandb_rows
from tests.support.runs import train
from tests.support.wandb_here import KEY
from tests.support.written_runs import EVIL, write_run

pytestmark = pytest.mark.usefixtures("fresh_wandb")
CHARTS = [chart for section in SECTIONS for chart in section.charts]


def every_event(directory):
    """Return one event of each kind that measures something, with every field set."""
    (directory / "p").mkdir(parents=True)
    Image.fromarray(np.zeros((3, 3), np.uint8)).save(directory / "p" / "0.png")
    kinds = {name for name, op in vars(ops).items() if is_op(op)} | {"WriteBack"}
    stages = dict.fromkeys(kinds, 0.5)
    yield Trained(
        1,
        0.1,
        0.2,
        3.0,
        0.4,
        5.0,
        nu=0.5,
        cosine={"layer1.0": 0.5},
        stage_s=stages,
        damping=0.1,
        failed_decompositions=0,
        dropped_statistics=0,
        data_wait_share=0.1,
        stage_mean_s=stages,
        peak_memory_bytes=1e6,
        condition={"layer1.0": 9.0},
        step_mean_s=20.0,
    )
    yield Evaluated(1, 0.1, 0.2, {"accuracy": 0.5}, 3)
    yield SampleSkipped(1, 0.1, "x", "y", 0, 1)
    yield TargetReached(1, 0.1, "accuracy", 0.5, 0.4)
    yield Checkpointed(1, 0.1, "x", 0.1)
    items = [
        {"caption": "a", "file": "p/0.png", "text": None},
        {"caption": "b", "file": None, "text": "words"},
    ]
    yield Predicted(1, 0.1, "p", items)


def is_op(op):
    leaf = isinstance(op, type) and issubclass(op, ops.Op) and op not in (ops.Op, ops.Message)
    return leaf and dataclasses.is_dataclass(op)


def logged(directory):
    """Return the names under which W&B gets the metrics of every kind of event."""
    logger = LoggerConfig(project="p", mode="offline")
    sink = WandbSink(ShownRun(directory, "r", logger, {}, "accuracy", True))
    events = list(every_event(directory))
    for event in events:
        if isinstance(event, Trained):  # a new field is in here, or this test says nothing of it
            unset = [f.name for f in dataclasses.fields(event) if getattr(event, f.name) is None]
            assert unset == []
        sink.write(event)
    sink.write(RunEnded(1, 0.1, "finished"))
    sink.close()
    assert not sink.failed
    rows = list(wandb_rows.offline(directory))
    assert len(rows) == len(events)
    media = {"predictions", "predicted_texts"}
    names = {re.sub(r"^(predict\w+)\..*", r"\1", name) for row in rows for name in row}
    assert media <= names
    return {name for name in names if not name.startswith("_")}


def test_charts_name_exactly_the_metrics_that_the_sink_logs(tmp_path):
    names = logged(tmp_path)
    shown = {"step", "train_s"}
    for chart in CHARTS:
        matching = {name for name in names if chart.pattern and re.search(chart.pattern, name)}
        assert matching or not chart.pattern, chart
        assert set(chart.keys) <= names, chart
        assert bool(chart.keys) != bool(chart.pattern), chart
        if chart.kind in ("line", "area"):
            assert chart.x in names
        shown |= matching | set(chart.keys)
    assert names - shown == {"epoch", "train/epoch"}


def test_go_and_javascript_read_patterns_in_the_same_way():
    patterns = [chart.pattern for chart in CHARTS if chart.pattern]
    assert len(patterns) >= 4
    assert all(re.fullmatch(r"[a-z_/]+\.\+", pattern) for pattern in patterns)


def test_stages_are_those_of_the_plan():
    planned = {name for name, op in vars(ops).items() if is_op(op)} | {"WriteBack"}
    kinds = [kind for kinds in STAGES.values() for kind in kinds]
    assert sorted(kinds) == sorted(planned)
    assert {kind for kinds in FIG7.values() for kind in kinds} == planned


def test_options_are_in_the_config_that_wandb_gets(tmp_path):
    """Compare with the configuration and the environment of a real run."""
    train(tmp_path, "kfac=none", "trainer.max_steps=1", "logger=wandb", "logger.mode=offline")
    [log] = tmp_path.glob("*/wandb/offline-run-*/*.wandb")
    config = wandb_rows.run_record(log)["config"]["update"]
    for option in (*GROUPS, WORLD_SIZE):
        value = config
        for key in option.split("."):
            value = value[key]
    assert value == 1
    assert {*GROUPS, *OPTIONS} <= flatten(asdict(compose.load([]))).keys()
    assert config["environment"]["hardware"] == environment.describe()["hardware"]


@pytest.fixture
def dashboard():
    """Return the workspace and the report as W&B's server gets them."""
    return views.as_json(views.Scope("kfac_bench", "me"))


@pytest.fixture
def panels_by_view(dashboard):
    """Return the panels of each section, by the name of the view."""
    bank = dashboard["workspace"]["spec"]["section"]["panelBankConfig"]["sections"]
    blocks = dashboard["report"]["spec"]["blocks"]
    grids = [block["metadata"] for block in blocks if block["type"] == "panel-grid"]
    assert [section["name"] for section in bank] == [section.name for section in SECTIONS]
    return {
        "workspace": [section["panels"] for section in bank],
        "report": [grid["panelBankSectionConfig"]["panels"] for grid in grids],
    }


@pytest.mark.parametrize("view", ["workspace", "report"])
def test_each_chart_is_a_panel_with_its_metrics(panels_by_view, view):
    for section, panels in zip(SECTIONS, panels_by_view[view], strict=True):
        for chart, panel in zip(section.charts, panels, strict=True):
            config = panel["config"]
            text = json.dumps(config)
            assert config["chartTitle"] == chart.title
            assert all(key in text for key in chart.keys), chart
            assert config.get("metricRegex", "") == chart.pattern
            assert config.get("yLogScale", False) == chart.log
            if chart.kind in ("line", "area"):
                assert config["xAxis"] == chart.x
                assert config["groupAgg"] == "median"


def test_no_panel_of_the_report_lies_on_another(panels_by_view):
    for panels in panels_by_view["report"]:
        places = [(panel["layout"]["x"], panel["layout"]["y"]) for panel in panels]
        assert len(set(places)) == len(places)


def test_seeds_of_a_setting_are_one_line(dashboard):
    for view in dashboard.values():
        for group in GROUPS:
            assert f'"{group.replace(".", ".value.", 1)}"' in json.dumps(view)


# ---- of runs ----


@pytest.fixture
def two_runs(tmp_path):
    """Return a run of SGD and a run of K-FAC in one project."""
    more = ("trainer.max_steps=12", "trainer.log_freq=4", "trainer.target=1e-9")
    more += ("kfac.update_freq=4", "kfac.factor_update_freq=2", "logger.project=mine")
    train(tmp_path / "runs", "kfac=none", *more, "run_id=sgd")
    train(tmp_path / "runs", *more, "run_id=kfac")
    return tmp_path / "runs"


def test_runs_bring_their_tables_and_their_project(tmp_path, two_runs, capsys):
    out = tmp_path / "d.json"
    assert call("dashboard", "dry-run", str(two_runs), "--out", str(out)) == 0
    said = capsys.readouterr().out
    assert "in your entity/mine: " in said
    assert "2 tables from event files" in said
    made = json.loads(out.read_text())
    tables = [b for b in made["report"]["spec"]["blocks"] if b["type"] == "markdown-block"]
    assert "not reached" in json.dumps(tables[0])
    assert "decompositions" in json.dumps(tables[1])
    filters = made["workspace"]["spec"]["section"]["runSets"][0]["filters"]
    assert "kfac" in json.dumps(filters)
    assert json.dumps(made["report"]).count(json.dumps(filters)) == len(SECTIONS)


def test_one_run_and_one_table_have_no_plural():
    about = views.describe(views.Scope("p", "e", ["a"], [Table("t", [], [])]))
    assert about[0].endswith(" panels, 1 run")
    assert ": 1 table from event files, " in about[1]


def test_without_wandb_workspaces_one_line_names_the_extra(monkeypatch, capsys):
    import importlib

    real = importlib.import_module

    def absent(name, *rest):
        if name.startswith("wandb_workspaces"):
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", absent)
    assert call("dashboard", "dry-run") == 2
    assert capsys.readouterr().err.endswith("pip install '.[dashboard]'\n")


def call(*words):
    with pytest.raises(SystemExit) as stop:
        cli.bench(list(words))
    return stop.value.code


# ---- push ----


def test_push_without_a_key_prints_one_line_at_once(capsys):
    assert call("dashboard", "push") == 2
    said = capsys.readouterr().err
    assert said.startswith("kfac-bench: dashboard push needs W&B's server: no API key")
    assert len(said.splitlines()) == 1


def test_push_without_a_server_prints_one_line_within_seconds(monkeypatch, capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
    assert call("dashboard", "push") == 2
    said = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in said
    assert len(said.splitlines()) == 1


def test_push_gives_up_a_server_that_does_not_answer(monkeypatch):
    """The server accepts the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(views, "PUSH_S", 1.0)
        with pytest.raises(UsageError, match="did not take the dashboard within 1 s"):
            views.push(views.Scope("p", "e"))


def test_push_creates_both_and_then_overwrites_them(stand_in, tmp_path, capsys):
    """A stand-in for the server gets exactly what dry-run writes."""
    for _ in range(2):
        assert call("dashboard", "push", "--project", "p", "--entity", "me") == 0
        said = capsys.readouterr().out.splitlines()
        assert [line.partition(": ")[0] for line in said] == ["workspace", "report"]
        kinds = {view["type"]: view for view in stand_in.views.values()}
        assert len(stand_in.views) == len(kinds) == 2
        expected = views.as_json(views.Scope("p", "me"))
        for name, kind in (("workspace", "project-view"), ("report", "runs")):
            spec = json.loads(kinds[kind]["spec"])
            assert views._without_ids(spec) == expected[name]["spec"]
            assert kinds[kind]["displayName"] == views.TITLE


def test_the_project_of_a_run_is_that_of_its_last_start(tmp_path):
    path = write_run(tmp_path / "a")
    record = JsonlSink(path / "events.jsonl")
    mine = {"logger.project": "mine", "logger.entity": "team"}
    for options, expected in (
        (mine, ("mine", "team")),
        ({"logger.project": "new"}, ("new", "")),
        ({"logger.project": ["no text"]}, ("kfac_bench", "")),
    ):
        record.write(Resumed(30, 2.0, "checkpoint", {}, options))
        found = views.scope_of_runs([path], None, None)
        assert (found.project, found.entity) == expected
    record.close()


def test_a_run_id_from_somebody_else_becomes_the_id_that_the_upload_uses(tmp_path):
    found = views.scope_of_runs([write_run(tmp_path / "run", text=EVIL)], None, None)
    assert found.run_ids == [wandb_id(plain(EVIL))]


def test_without_runs_the_scope_has_the_named_project_or_the_default(tmp_path):
    assert views.scope_of_runs([], None, None).project == "kfac_bench"
    assert views.scope_of_runs([], "p", "e").entity == "e"
