"""The W&B sink against the real wandb, offline: what it writes is read with W&B's own reader."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from wandb.sdk.wandb_run import Run

from kfac_bench.config import LoggerConfig
from kfac_bench.errors import UsageError
from kfac_bench.record.events import Evaluated, Predicted, RunEnded, TargetReached, Trained
from kfac_bench.record.sinks import wandb as sink_module
from kfac_bench.record.sinks.view import ShownRun
from kfac_bench.record.sinks.wandb import WandbSink, decide_mode, wandb_id
from tests.support import ROOT, wandb_rows
from tests.support.quick import slow
from tests.support.wandb_here import KEY

pytestmark = pytest.mark.usefixtures("fresh_wandb")


def new_sink(directory: Path, run_id="digits/seed=0 [red]", say=str, **options) -> WandbSink:
    logger = LoggerConfig(**{"project": "test", "mode": "offline"} | options)
    config = {"kfac": {"damping": 1e-3, "path": Path("x")}}
    return WandbSink(ShownRun(directory, run_id, logger, config, "accuracy", True, say))


def train(sink: WandbSink, steps=3) -> None:
    for step in range(1, steps + 1):
        sink.write(
            Trained(
                step=step,
                train_s=0.5 * step,
                epoch=0.1 * step,
                loss=1.0 / step,
                lr=0.1,
                examples_per_s=100.0,
                nu=0.5,
                cosine={"layer1.0.conv1": 0.25, "fc": 0.75, "stem": 0.5},
                stage_s={"factors": 0.01},
            )
        )
    for value in (0.5, 0.9, 0.7):
        sink.write(
            Evaluated(step=steps, train_s=0.5 * steps, epoch=0.3, metrics={"accuracy": value})
        )
    sink.write(TargetReached(step=3, train_s=1.5, metric="accuracy", value=0.9, target=0.8))
    sink.write(RunEnded(step=3, train_s=1.5, status="reached"))


def inspect(directory: Path, *options: str) -> str:
    """Return what `wandb leet inspect` reads in the only log below the directory."""
    (log,) = directory.glob("wandb/offline-run-*/*.wandb")
    return wandb_rows.inspect(log, *options)


def test_run_is_written_and_read_back(tmp_path, capfd):
    said = []
    sink = new_sink(tmp_path, say=said.append)
    train(sink)
    sink.write(Evaluated(step=3, train_s=1.5, epoch=0.3, metrics={"a*b": 1.0}))
    sink.close()

    records = [json.loads(line) for line in inspect(tmp_path, "--json").splitlines()]
    rows = [r["history"]["item"] for r in records if r["type"] == "history"]
    assert [r["train/loss"] for r in rows if "train/loss" in r] == [1.0, 0.5, 1 / 3]
    assert [r["eval/accuracy"] for r in rows if "eval/accuracy" in r] == [0.5, 0.9, 0.7]
    assert rows[0]["kfac/cosine/layer1.0.conv1"] == 0.25
    assert rows[0]["kfac/cosine_min"] == 0.25
    assert rows[0]["kfac/cosine_median"] == 0.5
    assert rows[0]["kfac/stage_s/factors"] == 0.01
    assert all({"step", "train_s"} <= row.keys() for row in rows)
    assert rows[-1].pop("eval/a*b") == 1.0

    (run,) = [r["run"] for r in records if r["type"] == "run"]
    assert run["config"]["update"]["kfac"] == {"damping": 1e-3, "path": "x"}
    assert run["display_name"] == "digits/seed=0 [red]"
    assert run.get("resume", True) is True  # not in the log of an old wandb

    metrics = [r["metric"] for r in records if r["type"] == "metric"]
    axes = {m["name"].replace("\\", ""): m.get("step_metric") for m in metrics}
    assert axes.keys() == set().union(*rows) - {"_runtime", "_step", "_timestamp"}
    assert {n for n, axis in axes.items() if axis is None} == {"step", "epoch", "train_s"}
    assert {n for n, axis in axes.items() if axis == "train_s"} == {"eval/accuracy"}

    summary = json.loads(inspect(tmp_path, "--summary", "--json"))
    assert summary["exit_code"] == 0
    assert summary["summary"]["eval/accuracy"] == {"last": 0.7, "max": 0.9}
    assert summary["summary"]["train/loss"] == {"last": 1 / 3, "min": 1 / 3}
    assert summary["summary"]["target/time_to_target_s"] == 1.5

    assert said == [sink.hint]
    assert sink.hint.endswith(f"kfac-bench wandb upload {tmp_path.parent}")
    assert capfd.readouterr() == ("", "")


def predicted(directory: Path, *files: str | None) -> Predicted:
    for number, file in enumerate(files):
        if file is not None:
            colour = np.full((3 + number, 4, 3), 100 + number, np.uint8)
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(colour).save(directory / file)
    items = [
        {"caption": f"example {n}", "file": file, "text": None if file else f"asked {n}?\n<b>"}
        for n, file in enumerate(files)
    ]
    return Predicted(3, 1.5, str(directory / "predictions"), items)


def test_predictions_are_pictures_with_captions_and_a_table_of_texts(tmp_path, capfd):
    sink = new_sink(tmp_path)
    sink.write(predicted(tmp_path, "predictions/a.png", None, "predictions/b.png"))
    sink.write(RunEnded(step=3, train_s=1.5, status="finished"))
    sink.close()
    records = [json.loads(line) for line in inspect(tmp_path, "--json").splitlines()]
    [row] = [r["history"]["item"] for r in records if r["type"] == "history"]
    assert (row["step"], row["train_s"]) == (3, 1.5)
    assert row["predictions._type"] == "images/separated"
    assert row["predictions.captions"] == ["example 0", "example 2"]
    [files] = tmp_path.glob("wandb/offline-run-*/files")
    first, second = (np.asarray(Image.open(files / x)) for x in row["predictions.filenames"])
    assert first.shape == second.shape == (5, 4, 3)  # one frame: the smaller has black below
    assert (first[:3] == 100).all()
    assert (first[3:] == 0).all()
    assert (second == 102).all()
    table = json.loads((files / row["predicted_texts.path"]).read_text())
    assert table["columns"] == ["caption", "text"]
    assert table["data"] == [["example 1", "asked 1?\n<b>"]]
    assert capfd.readouterr() == ("", "")


def test_a_picture_that_is_gone_ends_the_view_with_one_line(tmp_path):
    said = []
    sink = new_sink(tmp_path, say=said.append)
    event = predicted(tmp_path, "predictions/a.png")
    (tmp_path / "predictions" / "a.png").unlink()
    sink.write(event)
    sink.write(RunEnded(step=3, train_s=1.5, status="finished"))
    sink.close()
    assert [line.split(" (")[0] for line in said] == ["W&B is offline", "W&B failed"]


def test_every_name_is_defined_with_effect(tmp_path, monkeypatch):
    """A definition whose name does not match fails silently, so its effect is checked."""
    define = Run.define_metric
    monkeypatch.setattr(
        Run,
        "define_metric",
        lambda run, name, **k: define(run, name, **k | {"summary": "max"}),
    )
    sink = new_sink(tmp_path)
    train(sink)
    sink.close()
    summary = json.loads(inspect(tmp_path, "--summary", "--json"))["summary"]
    measured = {name: value for name, value in summary.items() if not name.startswith("_")}
    assert len(measured) > 15
    assert [name for name, value in measured.items() if not isinstance(value, dict)] == []


def test_failed_run_is_marked_and_takes_no_code_along(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # a git repository
    sink = new_sink(tmp_path)
    sink.write(RunEnded(step=0, train_s=0.0, status="failed"))
    sink.close()
    assert '"git"' not in inspect(tmp_path, "--json")
    assert [p for p in tmp_path.rglob("*") if p.suffix in (".patch", ".py", ".txt")] == []
    assert json.loads(inspect(tmp_path, "--summary", "--json"))["exit_code"] == 1


def test_the_same_run_id_continues_the_same_wandb_run(tmp_path, capfd):
    said = []
    for _ in range(2):
        sink = new_sink(tmp_path, say=said.append)
        train(sink)
        sink.close()
        time.sleep(1.0)  # the name of W&B's folder has seconds
    logs = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(logs) == 2
    assert len({log.name for log in logs}) == 1
    assert len(said) == 2  # two hints, no complaint
    assert capfd.readouterr() == ("", "")
    command = [wandb_rows.READER, "-m", "wandb", "sync", "--dry-run", "wandb"]
    environment = {k: v for k, v in os.environ.items() if k != "WANDB_SILENT"}
    dry = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert "Would sync 2 run(s)" in dry.stdout + dry.stderr


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_key_but_no_server_means_offline_soon(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port()}")
    mode, reason = decide_mode()
    assert mode == "offline"
    assert "key is configured, but 127.0.0.1" in reason


def test_silent_server_means_offline_within_the_limit(monkeypatch):
    """A listener whose backlog is full does not answer, so that only the time-out helps."""
    with socket.socket() as server, socket.socket() as first, socket.socket() as second:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for client in (first, second):
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(sink_module, "CONNECT_S", 0.5)
        start = time.monotonic()
        assert decide_mode().mode == "offline"
        assert time.monotonic() - start > 0.4


@pytest.fixture
def server_url():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_key_and_server_mean_online(monkeypatch, server_url):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", server_url)
    assert decide_mode().mode == "online"


def test_key_in_netrc_counts(monkeypatch, server_url, tmp_path):
    monkeypatch.setenv("WANDB_BASE_URL", server_url)
    netloc = server_url.removeprefix("http://")
    machines = (netloc, netloc.partition(":")[0])  # wandb before 0.24 leaves out the port
    lines = [f"machine {machine}\n  login user\n  password {KEY}\n" for machine in machines]
    (tmp_path / "netrc").write_text("".join(lines))
    (tmp_path / "netrc").chmod(0o600)
    assert decide_mode().mode == "online"
    (tmp_path / "netrc").write_text(f"machine other.example\n  login user\n  password {KEY}\n")
    assert decide_mode().mode == "offline"


def test_the_proxy_is_what_must_be_reachable(monkeypatch, server_url):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.invalid")
    monkeypatch.setenv("http_proxy", server_url)
    assert decide_mode().mode == "online"
    monkeypatch.setenv("no_proxy", "wandb.invalid")
    assert decide_mode().mode == "offline"


def test_no_key_means_offline_in_one_line_of_80_columns(monkeypatch, server_url, tmp_path):
    monkeypatch.setenv("WANDB_BASE_URL", server_url)
    mode, reason = decide_mode()
    assert mode == "offline"
    assert "no API key" in reason
    monkeypatch.chdir(tmp_path)
    sink = new_sink(tmp_path / "runs" / ("digits-resnet8-" + "x" * 40), mode="auto")
    sink.close()
    assert sink.hint.startswith("W&B is offline (no API key); ")
    assert sink.hint.endswith(": kfac-bench wandb upload runs")
    assert len(sink.hint) <= 80


@pytest.mark.parametrize(
    ("option", "environment", "expected"),
    [
        ("auto", "online", "online"),
        ("auto", "dryrun", "offline"),
        ("disabled", "online", "disabled"),
        ("online", None, "online"),
    ],
)
def test_explicit_mode_wins(monkeypatch, option, environment, expected):
    if environment:
        monkeypatch.setenv("WANDB_MODE", environment)
    assert decide_mode(option).mode == expected


@pytest.mark.parametrize("value", ["true", "1"])
def test_wandb_disabled_turns_the_view_off_unless_an_option_says_otherwise(monkeypatch, value):
    monkeypatch.setenv("WANDB_DISABLED", value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert decide_mode() == ("disabled", f"WANDB_DISABLED={value}")
    assert decide_mode("online").mode == "online"
    monkeypatch.setenv("WANDB_DISABLED", "false")
    assert decide_mode().mode == "offline"


def test_a_mode_of_several_processes_is_an_error(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "shared")
    with pytest.raises(UsageError, match=r"^WANDB_MODE=shared: use online, offline"):
        decide_mode()


def run_record(directory: Path) -> dict:
    records = [json.loads(line) for line in inspect(directory, "--json").splitlines()]
    return next(r["run"] for r in records if r["type"] == "run")


def test_name_group_tags_and_notes_come_from_variables(tmp_path, monkeypatch):
    for name in ("NAME", "RUN_GROUP", "TAGS", "NOTES"):
        monkeypatch.setenv(f"WANDB_{name}", f"my-{name.lower()}")
    new_sink(tmp_path).close()
    run = run_record(tmp_path)
    assert (run["display_name"], run["run_group"]) == ("my-name", "my-run_group")
    assert (run["tags"], run["notes"]) == (["my-tags"], "my-notes")


def test_options_win_over_variables(tmp_path, monkeypatch):
    for name in ("PROJECT", "RUN_ID", "RUN_GROUP", "TAGS", "NOTES"):
        monkeypatch.setenv(f"WANDB_{name}", "x")
    new_sink(tmp_path, project="p", id="i", group="g", tags=["a", "b"], notes="n").close()
    run = run_record(tmp_path)
    assert (run["project"], run["run_id"], run["run_group"]) == ("p", "i", "g")
    assert (run["tags"], run["notes"]) == (["a", "b"], "n")


def test_unknown_mode_is_an_error(monkeypatch):
    with pytest.raises(UsageError, match=r"logger\.mode=onlin:"):
        decide_mode("onlin")


def test_disabled_writes_nothing(tmp_path):
    sink = new_sink(tmp_path, mode="disabled")
    train(sink)
    sink.close()
    assert "off" in sink.hint
    assert not (tmp_path / "wandb").exists()


def test_failing_to_go_online_records_offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setattr(sink_module, "INIT_S", 1.0)
    sink = new_sink(tmp_path, mode="online")
    train(sink)
    sink.close()
    assert sink.mode == "offline"
    assert '"eval/accuracy":0.9' in inspect(tmp_path, "--json")


def test_a_run_that_wandb_cannot_open_turns_the_view_off(tmp_path):
    said = []
    sink = new_sink(tmp_path, project="a/b", say=said.append)
    train(sink)
    sink.close()
    assert len(said) == 1
    assert "W&B is off" in said[0]
    assert "a/b" in said[0]


@pytest.mark.parametrize("signal", ["SIGKILL", slow("SIGSTOP")])
def test_dead_or_hung_service_never_stops_training(tmp_path, signal):
    """This needs a separate process, because the exit of the process is tested too."""
    script = f"""
        import contextlib, os, pathlib, signal, time
        from kfac_bench.record.events import RunEnded, Trained
        from kfac_bench.config import LoggerConfig
        from kfac_bench.record.sinks import wandb as sink_module
        from kfac_bench.record.sinks.view import ShownRun
        sink_module.FINISH_S = 0.5
        logger = LoggerConfig(project="p", mode="offline")
        sink = sink_module.WandbSink(
            ShownRun(pathlib.Path({str(tmp_path)!r}), "r", logger, say=print)
        )
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # processes come and go
                pid, name, _, parent = stat.read_text().split()[:4]
                if name == "(wandb-core)" and parent == str(os.getpid()):
                    core = int(pid)
        for step in range(3000):
            if step == 10:
                os.kill(core, signal.{signal})
                time.sleep(0.3)
            sink.write(Trained(step, 0.1, 0.1, 0.1, 0.1, 1.0, cosine={{"layer" * 10: 0.5}}))
        sink.write(RunEnded(9, 0.1, "finished"))
        sink.close()
        print("trained")
        if signal.{signal} == signal.SIGSTOP:
            os.kill(core, signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = done.stdout.splitlines()
    # W&B's telemetry may say this when its service is gone.
    said = [line for line in done.stderr.splitlines() if "shutdown `MeterProvider`" not in line]
    assert (done.returncode, said) == (0, [])
    assert len(lines) == 3, lines
    assert lines[0].startswith("W&B is offline")
    assert lines[1].startswith("W&B failed")
    assert str(tmp_path / "wandb") in lines[1]
    assert lines[2] == "trained"


def test_ids_are_legal_and_stay_different():
    assert wandb_id("digits-sgd_0.1-s0") == "digits-sgd_0.1-s0"
    ids = [wandb_id(run_id) for run_id in ("a/b", "a-b", "a:b", "a" * 200, "a" * 201, "é?#", " ")]
    assert len(set(ids)) == len(ids)
    assert all(len(i) <= 64 and not set(i) & set(":;,#?/' \\%") for i in ids)
