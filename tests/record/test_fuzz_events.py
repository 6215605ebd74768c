"""Event files from anybody are compared, drawn, uploaded and tabled, or refused in one line.

No text of an event file becomes markup of a page.
"""

import contextlib
import json
from html.parser import HTMLParser

import pytest
from hypothesis import given

from kfac_bench import report
from kfac_bench.benchmark import measures
from kfac_bench.benchmark.scaling.scaling_report import tables as scaling
from kfac_bench.dashboard import upload, views
from kfac_bench.errors import UsageError
from kfac_bench.record import runs
from kfac_bench.report import curves
from tests.support.fuzzing import as_json, damaged, fuzz, refused_or, spoilt

STAGE_S = {"Decompose": 0.01, "ShareDecompositions": 0.001, "Precondition": 0.002}
TRAINED = {
    "event": "Trained",
    "epoch": 0.5,
    "loss": 0.7,
    "lr": 0.1,
    "examples_per_s": 50.0,
    "nu": 0.5,
    "damping": 0.03,
    "failed_decompositions": 0,
    "dropped_statistics": 0,
    "cosine": {"fc": 0.5},
    "data_wait_share": 0.0,
    "peak_memory_bytes": 1e9,
    "condition": {"fc": 9.0},
    "step_mean_s": 0.01,
}
LINES = [
    {
        "event": "RunStarted",
        "step": 0,
        "train_s": 0.0,
        "run_id": "a",
        "metric": "accuracy",
        "higher_is_better": True,
        "config": {
            "data": {"name": "digits"},
            "model": {"name": "resnet8"},
            "seed": 0,
            "optimizer": {"name": "sgd", "lr": 0.1},
            "kfac": {"enabled": True, "strategy": "comm_opt", "update_freq": 10, "damping": 0.03},
            "trainer": {"target": 0.9, "batch_size": 64, "clock": "wall"},
            "logger": {"project": "p"},
        },
        "environment": {"world_size": 2, "torch": "2.11", "hardware": {"cpu_count": 2}},
        "payload_bytes": {"factors": {"ReduceFactors": 1000}},
    },
    *(
        TRAINED | {"step": n, "train_s": n / 10, "stage_s": STAGE_S, "stage_mean_s": STAGE_S}
        for n in (10, 20, 30)
    ),
    *(
        {"event": "Evaluated", "step": n, "train_s": n / 10, "epoch": 0.1, "metrics": m}
        for n, m in ((10, {"accuracy": 0.5, "loss": 1.0}), (30, {"accuracy": 0.95, "loss": 0.2}))
    ),
    {"event": "TargetReached", "step": 30, "train_s": 3, "metric": "accuracy", "value": 0.95}
    | {"target": 0.9},
    {"event": "Checkpointed", "step": 30, "train_s": 3, "path": "c", "write_s": 0.1},
    {"event": "Predicted", "step": 30, "train_s": 3, "path": "p"}
    | {"items": [{"caption": "c", "file": "predictions/step-30/00.png", "text": "t"}]},
    {"event": "PlanChosen", "step": 6, "train_s": 1, "options": {"max_dim": 9}, "overhead": 0.2},
    {"event": "SampleSkipped", "step": 30, "train_s": 3, "path": "p", "reason": "r"}
    | {"rank": 0, "count": 1},
    {"event": "Resumed", "step": 30, "train_s": 3, "checkpoint": "c"},
    {"event": "RunEnded", "step": 30, "train_s": 3.0, "status": "reached", "message": ""},
]
CONTENT = "".join(f"{json.dumps(line)}\n" for line in LINES).encode()


class Page(HTMLParser):
    """Elements, attributes and links of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.names, self.links = [], set(), []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            self.names.add(name)
            if name in ("href", "src"):
                self.links.append(value)


MARKUP = {"iframe", "object", "embed", "base", "form", "link", "img", "video", "frame", "template"}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Return the event file of a valid run."""
    path = tmp_path_factory.mktemp("good") / "events.jsonl"
    path.write_bytes(CONTENT)
    return path


def look_at(path, good):
    """Make everything that reads event files read this one, together with a good one."""
    found = report.compare([path, good])
    with contextlib.suppress(UsageError):
        run = runs.load(path)
        upload.points(run.events, path.parent)
        for name in (*measures.MEASURES, "metric loss", "stage Decompose", "stage share"):
            measures.measure(run, name, 0.5)
    page = Page(report.html(found, folder=path.parent))
    assert page.tags.count("script") == 2
    assert not MARKUP.intersection(page.tags)  # the only picture named is not there
    assert not any(name.startswith("on") for name in page.names)
    assert all(link.startswith(("../", "#")) or link == "events.jsonl" for link in page.links)
    report.markdown_table(found.rows)
    report.terminal_table(found.rows)
    for table in scaling(r for s in found.settings for r in s.runs):
        table.markdown()
    return True


def test_a_good_file_is_shown(good):
    assert look_at(good, good)
    assert curves.figure_svg(report.compare([good]).settings)


@pytest.mark.slow
@fuzz(60)
@given(tree=spoilt(LINES))
def test_changed_events_are_shown_or_refused(tmp_path_factory, good, tree):
    if not isinstance(tree, list):
        tree = [tree]
    path = tmp_path_factory.mktemp("run") / "events.jsonl"
    path.write_text("".join(f"{as_json(line)}\n" for line in tree))
    refused_or(lambda: look_at(path, good))


@pytest.mark.slow
@fuzz(30)
@given(content=damaged(CONTENT))
def test_damaged_bytes_are_shown_or_refused(tmp_path_factory, good, content):
    path = tmp_path_factory.mktemp("run") / "events.jsonl"
    path.write_bytes(content)
    refused_or(lambda: look_at(path, good))
    refused_or(lambda: upload.read(path))
    refused_or(lambda: views.scope_of_runs([path], None, None))


@fuzz(12)
@given(tree=spoilt(LINES))
def test_figures_of_changed_events_are_drawn(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("run") / "events.jsonl"
    path.write_text("".join(f"{as_json(x)}\n" for x in (tree if isinstance(tree, list) else [])))
    found = refused_or(lambda: report.compare([path]))
    if found is not None:
        assert "<script" not in curves.figure_svg(found.settings).lower()
