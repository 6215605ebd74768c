"""``kfac-bench wandb upload`` sends every point of the event file to W&B, and none twice."""

import fcntl
import json
import re
import shutil

import pytest
from PIL import Image

from kfac_bench import cli
from kfac_bench.config import LoggerConfig
from kfac_bench.dashboard import upload, views
from kfac_bench.record.event_log import EventLog, JsonlSink
from kfac_bench.record.events import (
    Checkpointed,
    Evaluated,
    Predicted,
    Resumed,
    RunEnded,
    RunStarted,
    TargetReached,
    Trained,
    read,
)
from kfac_bench.record.sinks.view import ShownRun, metrics_of
from kfac_bench.record.sinks.wandb import WandbSink
from tests.support import wandb_rows
from tests.support.runs import KFAC, SMALL, train

pytestmark = pytest.mark.usefixtures("fresh_wandb")


def call(*words):
    with pytest.raises(SystemExit) as stop:
        cli.bench(["wandb", "upload", *map(str, words)])
    return stop.value.code


def rows_of(path):
    """Return what W&B's reader finds in all offline runs, without W&B's own fields."""
    return [
        {k: v for k, v in row.items() if not k.startswith("_")} for row in wandb_rows.offline(path)
    ]


def check_all_is_there(path):
    """Check that each event that measures something is one row, and that there are no others."""
    rows = rows_of(path)
    for event in read(path):
        if wanted := metrics_of(event):
            [i] = [i for i, row in enumerate(rows) if row == wanted]
            rows.pop(i)
        elif isinstance(event, Predicted):
            [i] = [i for i, row in enumerate(rows) if any("predict" in name for name in row)]
            row = rows.pop(i)
            assert (row["step"], row["train_s"]) == (event.step, event.train_s)
    assert rows == []


def write(path, *events, higher=True):
    """Write an event file by hand."""
    path.mkdir(parents=True, exist_ok=True)
    log = EventLog([JsonlSink(path / "events.jsonl")])
    config = {"logger": {"project": "mine", "entity": None}, "seed": 0}
    for event in (RunStarted(0, 0.0, path.name, "accuracy", higher, config, {}), *events):
        log.emit(event)
    log.close()
    return path


def trained(step, **more):
    return Trained(step, 0.5 * step, 0.1 * step, 1 / (step + 1), 0.1, 100.0, **more)


def test_a_real_run_is_sent_once_with_all_points_and_pictures(tmp_path, capsys):
    words = ("trainer.max_steps=10", "trainer.log_freq=2", "run_id=a", "logger.tags=[paper]")
    _, path = train(tmp_path, *KFAC, *words, "trainer.predictions=8")
    assert call(tmp_path, "--offline") == 0
    said = capsys.readouterr().out
    count = sum(bool(metrics_of(e)) for e in read(path)) + 1
    assert f"{path}: {count} of {count} points sent; W&B is offline" in said
    check_all_is_there(path)
    [log] = path.glob("wandb/offline-run-*/run-a.wandb")
    [event] = [e for e in read(path) if isinstance(e, Predicted)]
    uploaded = sorted(log.parent.rglob("files/media/images/*.png"))
    assert len(uploaded) == sum(item["file"] is not None for item in event.items) == 8
    assert {Image.open(x).tobytes() for x in uploaded} == {
        Image.open(path / item["file"]).convert("RGB").tobytes() for item in event.items
    }
    run = wandb_rows.run_record(log)
    assert (run["project"], run["tags"]) == ("kfac_bench", ["paper"])
    assert run["config"]["update"]["kfac"]["update_freq"] == 4
    assert run["config"]["update"]["environment"]["world_size"] == 1
    assert '"exit_code":0' in wandb_rows.inspect(log, "--json").replace(" ", "")

    assert call(tmp_path, "--offline") == 0
    assert (
        f"nothing to write. Send them with wandb sync {path}/wandb, or remove"
        in capsys.readouterr().out
    )
    assert len(list(path.glob("wandb/offline-run-*"))) == 1


@pytest.mark.slow
def test_a_complete_run_that_a_sweep_draws_again_is_sent_again(tmp_path, monkeypatch, capsys):
    own = [o for o in SMALL if o != "logger=none"]
    words = [
        *own,
        f"runs_dir={tmp_path}",
        "run_id=run",
        "trainer.max_steps=5",
        "trainer.log_freq=1",
    ]
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for drawn in ("first", "second", "second"):
        monkeypatch.setenv("WANDB_RUN_ID", drawn)
        with pytest.raises(SystemExit) as stop:
            cli.train(words)
        assert stop.value.code == 0
    said = capsys.readouterr().out
    assert said.count("points sent again to W&B run second") == 1
    path = tmp_path / "run"
    logs = {log.name: log.parent for log in path.glob("wandb/offline-run-*/*.wandb")}
    assert logs.keys() == {"run-first.wandb", "run-second.wandb"}
    shutil.rmtree(logs["run-first.wandb"])
    check_all_is_there(path)
    # An upload later, in a shell without the variables, finds the place in W&B in the record.
    for name in ("PROJECT", "RUN_ID"):
        monkeypatch.delenv(f"WANDB_{name}")
    shutil.rmtree(path / "wandb")
    assert call(path, "--offline") == 0
    [log] = path.glob("wandb/offline-run-*/run-first.wandb")
    run = wandb_rows.run_record(log)
    assert run["project"] == "mine"
    assert views.scope_of_runs([path], None, None).run_ids == ["first"]


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize(
    "line", ['{"event": "Trained", "step": 4, "tr', "\x00\x00", "[1]", '{"event": 1}']
)
def test_a_damaged_last_line_is_left_out_and_reported(tmp_path, line, end):
    path = write(tmp_path / "run", trained(1), trained(2))
    with (path / "events.jsonl").open("a") as file:
        file.write(line + end)
    events, damage = upload.read(path / "events.jsonl")
    if line == '{"event": 1}':  # an event of a later version
        assert (damage, len(events)) == ("", 3)
    else:
        assert (damage, len(events)) == ("line 4, the last, is damaged: left out", 3)


def test_a_damaged_run_is_sent_without_its_last_line(tmp_path, capsys):
    path = write(tmp_path / "run", trained(1), trained(2))
    whole = (path / "events.jsonl").read_text()
    (path / "events.jsonl").write_text(whole[:-9])
    assert call(path, "--offline") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{path}: line 3, the last, is damaged: left out"
    assert "1 of 1 points sent" in second
    assert [row["step"] for row in rows_of(path)] == [1]


def test_damage_in_another_line_fails_only_that_run(tmp_path, capsys):
    bad = write(tmp_path / "a", trained(1), trained(2)) / "events.jsonl"
    bad.write_text(bad.read_text().replace('"Trained"', "Trained", 1))
    good = write(tmp_path / "b", trained(1))
    assert call(tmp_path, "--offline") == 1
    said = capsys.readouterr().out.splitlines()
    assert re.search(r"a/events.jsonl:2: not an event", said[0])
    assert "1 of 1 points sent" in said[1]
    check_all_is_there(good)


def test_events_that_a_resume_replaced_are_not_sent(tmp_path):
    path = write(tmp_path / "run", trained(1), trained(2), trained(3), Resumed(1, 0.5, "x"))
    assert [p.row["step"] for p in upload.points(read(path), path)] == [1]


def test_a_foreign_event_file_cannot_upload_local_files(tmp_path, capsys):
    secret = tmp_path / "secret.png"
    Image.new("L", (3, 3)).save(secret)
    items = [
        {"caption": "a", "file": "../secret.png", "text": None},
        {"caption": "b", "file": str(secret), "text": "shown\x1b[31m"},
        "no item",
        {"caption": 3, "file": ["x"], "text": {"y": 1}},
    ]
    odd = [
        trained(1, cosine={"a": "b"}),
        trained(2, stage_s={"\x1b": "z", "b": 10**400}),
        Evaluated(3, 1.5, 0.3, {"accuracy": None, "other": 1.0}),
    ]
    path = write(tmp_path / "run", *odd, Predicted(3, 1.5, "p", items))
    assert call(path, "--offline") == 0
    assert "Traceback" not in capsys.readouterr().err
    assert list(path.rglob("*.png")) == []
    rows = rows_of(path)
    assert [r["eval/other"] for r in rows if "eval/other" in r] == [1.0]
    assert not any("eval/accuracy" in row for row in rows)
    [table] = path.rglob("files/media/table/*.json")
    assert json.loads(table.read_text())["data"] == [["b", "shown\\x1b[31m"]]


def test_a_run_that_still_trains_is_not_sent(tmp_path, capsys):
    path = write(tmp_path / "run", trained(1))
    with (path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert call(path, "--offline") == 1
    assert "still training; wait until the run has ended" in capsys.readouterr().out
    assert call(path, "--offline") == 0


def test_without_a_key_one_line_names_the_alternative(tmp_path, capsys):
    path = write(tmp_path / "run", trained(1))
    assert call(path) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("kfac-bench: wandb upload needs W&B's server: no API key is configured")
    assert "--offline" in line


def test_no_runs_and_no_start_event_give_one_line_each(tmp_path, capsys):
    assert call(tmp_path / "nothing", "--offline") == 2
    assert "no such run" in capsys.readouterr().err
    (tmp_path / "events.jsonl").write_text("\n")
    assert call(tmp_path, "--offline") == 1
    assert "no RunStarted event" in capsys.readouterr().out


def test_computed_cells_are_not_sent(tmp_path, capsys):
    path = write(tmp_path / "run")
    file = path / "events.jsonl"
    file.write_text(file.read_text().replace('"seed": 0', '"computed": "plan"'))
    assert call(path, "--offline") == 0
    assert capsys.readouterr().out == f"{path}: computed, not trained: nothing to send\n"
    assert [p.name for p in path.iterdir()] == ["events.jsonl"]


def test_an_invalid_project_name_is_reported(tmp_path, capsys):
    path = write(tmp_path / "run", trained(1))
    assert call(path, "--offline", "--project", "a/b") == 1
    assert "did not take all points" in capsys.readouterr().out


def test_patience_queues_more_events_than_a_training(tmp_path, monkeypatch):
    from kfac_bench.record.sinks import wandb as sink_module

    monkeypatch.setattr(sink_module, "QUEUED_EVENTS", 2)
    logger = LoggerConfig(project="p", mode="offline")
    sink = WandbSink(ShownRun(tmp_path, "r", logger, {}, "accuracy", True), patience_s=60.0)
    for step in range(200):
        sink.log(metrics_of(trained(step)))
    sink.close()
    assert not sink.failed
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(200))


# ---- online, to a stand-in for the server ----


def served(stand_in, run):
    return [{k: v for k, v in r.items() if not k.startswith("_")} for r in stand_in.runs[run].rows]


def check_server_has_all(stand_in, path):
    wanted = [row for event in read(path) if (row := metrics_of(event))]
    rows = served(stand_in, path.name)
    assert sorted(rows, key=lambda row: row["step"]) == wanted


@pytest.mark.slow
def test_a_complete_run_that_a_sweep_draws_again_is_sent_to_the_server(
    tmp_path, stand_in, monkeypatch
):
    own = [o for o in SMALL if o != "logger=none"]
    for drawn in ("first", "second"):
        monkeypatch.setenv("WANDB_RUN_ID", drawn)
        with pytest.raises(SystemExit) as stop:
            cli.train([*own, f"runs_dir={tmp_path}", "run_id=run", "trainer.max_steps=5"])
        assert stop.value.code == 0
    wanted = [row for event in read(tmp_path / "run") if (row := metrics_of(event))]
    for drawn in ("first", "second"):
        rows = served(stand_in, drawn)
        assert [row for row in rows if not any("predict" in name for name in row)] == wanted
        assert len(rows) == len(wanted) + 1


def test_points_on_the_server_are_not_sent_again(tmp_path, stand_in, capsys):
    path = write(tmp_path / "a", *map(trained, range(1, 41)), RunEnded(40, 20.0, "finished"))
    assert call(path) == 0
    assert f"40 of 40 points sent; W&B: {stand_in.url}/me/mine/runs/a" in capsys.readouterr().out
    check_server_has_all(stand_in, path)
    assert stand_in.runs["a"].state == "finished"
    stand_in.asked.clear()
    assert call(path) == 0
    assert "W&B has the last of 40 points: nothing to send" in capsys.readouterr().out
    assert "UpsertBucket" not in stand_in.asked

    del stand_in.runs["a"].rows[25:]  # as after a crash
    stand_in.runs["a"].state = "crashed"
    assert call(path) == 0
    assert "15 of 40 points sent" in capsys.readouterr().out
    check_server_has_all(stand_in, path)
    steps = [r["_step"] for r in stand_in.runs["a"].rows]
    assert steps == sorted(set(steps))  # W&B's own counter never went back
    assert stand_in.runs["a"].state == "finished"


def test_an_upload_continues_between_points_of_one_second(tmp_path, stand_in, capsys):
    more = (Evaluated(2, 1.0, 0.2, {"accuracy": 0.9}), TargetReached(2, 1.0, "accuracy", 0.9, 0.8))
    path = write(tmp_path / "a", trained(1), trained(2), *more, RunEnded(2, 1.0, "reached"))
    for left in (4, 2):
        assert call(path) == 0
        assert f"{left} of 4 points sent" in capsys.readouterr().out
        check_server_has_all(stand_in, path)
        del stand_in.runs["a"].rows[2:]
        stand_in.runs["a"].state = "crashed"


def test_a_checkpoint_with_an_earlier_time_is_sent_once(tmp_path, stand_in, capsys):
    """A checkpoint is written while training goes on, so its event may follow later ones."""
    saved = Checkpointed(1, 0.5, "checkpoints/step-1", 0.1)
    path = write(tmp_path / "a", trained(1), trained(2), saved, RunEnded(2, 1.0, "finished"))
    assert call(path) == call(path) == 0
    assert "W&B has the last of 3 points: nothing to send" in capsys.readouterr().out
    stand_in.runs["a"].rows.pop()
    assert call(path) == 0
    assert "1 of 3 points sent" in capsys.readouterr().out
    assert [row["step"] for row in served(stand_in, "a")] == [1, 2, 1]


def test_the_points_of_a_continued_run_are_sent(tmp_path, stand_in, capsys):
    """The server calls the run finished, but it was resumed without W&B."""
    end = RunEnded(2, 1.0, "finished")
    path = write(tmp_path / "a", trained(1), trained(2), end)
    assert call(path) == 0
    write(tmp_path / "b", trained(1), trained(2), end, Resumed(2, 1.0, "x"), trained(3))
    events = (tmp_path / "b" / "events.jsonl").read_text().replace('"run_id": "b"', '"run_id": "a"')
    (path / "events.jsonl").write_text(events)
    assert call(path) == 0
    assert "1 of 3 points sent" in capsys.readouterr().out
    check_server_has_all(stand_in, path)


def test_a_run_that_the_server_calls_crashed_is_ended(tmp_path, stand_in):
    path = write(tmp_path / "a", trained(1), trained(2), RunEnded(2, 1.0, "failed"))
    assert call(path) == 0
    stand_in.runs["a"].state = "crashed"
    assert call(path) == 0
    assert stand_in.runs["a"].state == "failed"
    check_server_has_all(stand_in, path)


def test_a_server_that_hides_rows_gets_no_row_twice(tmp_path, stand_in, capsys, monkeypatch):
    path = write(tmp_path / "a", trained(1), trained(2), RunEnded(2, 1.0, "finished"))
    assert call(path) == 0
    real = stand_in.run
    monkeypatch.setattr(stand_in, "run", lambda *words: real(*words) | {"history": []})
    assert call(path) == 1
    assert "has rows up to 1, but sends none" in capsys.readouterr().out
    assert len(stand_in.runs["a"].rows) == 2


def test_pictures_are_sent_to_the_server(tmp_path, stand_in):
    _, path = train(tmp_path, *KFAC, "trainer.max_steps=4", "run_id=a", "trainer.predictions=3")
    assert call(path, "--project", "p") == 0
    assert sum(name.endswith(".png") for name in stand_in.runs["a"].files) == 3
    assert stand_in.runs["a"].config["environment"]["value"]["world_size"] == 1
