"""kfac-bench compare --watch: the page follows runs that go on."""

import json
import os
from pathlib import Path

import pytest

from kfac_bench import cli
from kfac_bench.errors import UsageError
from kfac_bench.record.events import Evaluated, Resumed
from kfac_bench.record.own_files import locked
from kfac_bench.report import watch as watching
from kfac_bench.report.watch import EVERY_S, watch
from tests.support.written_runs import write_run

REFRESH = f'<meta http-equiv="refresh" content="{EVERY_S}">'


def unended(folder: Path, **more: object) -> tuple[Path, str]:
    """Write a run without its last event, and return its event file and that event."""
    file = write_run(folder, **more) / "events.jsonl"
    *lines, last = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines))
    return file, last


def append(file: Path, text: str) -> None:
    with file.open("a") as stream:
        stream.write(text)


def never(seconds: float) -> None:
    pytest.fail("waits")


def test_the_page_is_written_when_a_file_grows_until_all_runs_have_ended(tmp_path: Path) -> None:
    runs, page = tmp_path / "runs", tmp_path / "page.html"
    file, last = unended(runs / "sgd", target=None)
    write_run(runs / "kfac", kfac=True, target=None)
    evaluated = {"step": 40, "train_s": 9.0, "epoch": 1.0, "metrics": {"accuracy": 0.4321}}
    assert Evaluated(**evaluated)
    line = json.dumps({"event": "Evaluated"} | evaluated)
    late: list[str] = []

    def nothing_new() -> None:
        page.write_text("not written again")

    def half_a_line() -> None:
        assert page.read_text() == "not written again"
        append(file, line[:20])

    def the_rest() -> None:
        assert REFRESH in page.read_text()
        assert "0.4321" not in page.read_text()
        append(file, line[20:] + "\n")

    def one_more_run() -> None:
        assert "0.4321" in page.read_text()
        late.extend(map(str, unended(runs / "adam", optimizer="adam", target=None)))

    def the_ends() -> None:
        assert "Adam" in page.read_text()
        append(file, last)
        append(Path(late[0]), late[1])

    steps = iter([nothing_new, half_a_line, the_rest, one_more_run, the_ends])
    said: list[str] = []
    watch([runs], page, said.append, lambda seconds: next(steps)())
    assert next(steps, None) is None
    assert said[0] == f"{page}: 1 of 2 runs not ended (Ctrl-C stops)"
    assert said[-1] == f"{page}: 2 of 3 runs not ended (Ctrl-C stops)"


def test_ctrl_c_ends_the_watch_and_leaves_a_page_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watching.watch, "__defaults__", (interrupt,))
    unended(tmp_path / "run")
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit) as ended:
        cli.bench(["compare", str(tmp_path / "run"), "--watch", "--html", str(page)])
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "stopped: the page stays as it is"
    assert 'http-equiv="refresh"' not in page.read_text()


def test_a_killed_run_counts_as_stopped_and_a_silent_one_that_a_process_holds_goes_on(
    tmp_path: Path,
) -> None:
    killed, page = tmp_path / "runs" / "killed", tmp_path / "page.html"
    silent, last = unended(tmp_path / "runs" / "silent", optimizer="adam")
    for file in (unended(killed, seconds=None)[0], silent):
        os.utime(file, (0, 0))
    said: list[str] = []
    with locked(silent.parent, 0.0, print):
        watch([tmp_path], page, said.append, lambda _: append(silent, last))
    assert said == [
        f"{page}: 1 of 2 runs not ended (Ctrl-C stops)",
        f"{killed} counts as stopped: no process runs it, and it has not ended",
    ]
    assert "killed has not ended (last event at step 30)" in page.read_text()


def test_an_interrupted_run_may_go_on_and_a_continued_one_goes_on(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    file, last = unended(tmp_path / "run", target=None)
    end = json.loads(last)
    append(file, json.dumps(end | {"status": "interrupted"}) + "\n")
    resumed = {"event": "Resumed", "step": 30, "train_s": 2.0, "checkpoint": "step-30"}
    assert Resumed(30, 2.0, "step-30")
    lines = iter([json.dumps(resumed) + "\n", last, json.dumps(resumed) + "\n", last])
    watch([file.parent], page, print, lambda _: append(file, next(lines)))
    assert len([*lines]) == 2
    append(file, json.dumps(resumed) + "\n")
    watch([file.parent], page, print, lambda _: append(file, last))


def test_an_interrupted_run_counts_as_stopped_after_a_while(tmp_path: Path) -> None:
    file, last = unended(tmp_path / "run", target=None)
    append(file, json.dumps(json.loads(last) | {"status": "interrupted"}) + "\n")
    os.utime(file, (0, 0))
    said: list[str] = []
    watch([file.parent], tmp_path / "page.html", said.append, never)
    assert said == [f"{file.parent} counts as stopped: no process runs it, and it has not ended"]


def test_runs_that_have_ended_are_not_watched(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    said: list[str] = []
    watch([tmp_path / "run"], tmp_path / "page.html", said.append, never)
    assert said == []


def test_the_watch_waits_for_the_first_event_and_says_so(tmp_path: Path) -> None:
    runs, page = tmp_path / "runs", tmp_path / "page.html"
    runs.mkdir()

    def empty_file() -> None:
        (runs / "adam").mkdir()
        (runs / "adam" / "events.jsonl").touch()

    def first_events() -> None:
        assert not page.exists()
        write_run(runs / "sgd")

    steps = iter([empty_file, lambda: None, first_events])
    said: list[str] = []
    watch([runs], page, said.append, lambda seconds: next(steps)())
    assert next(steps, None) is None
    assert said == ["no run has an event yet: waits for the first one (Ctrl-C stops)"]
    assert page.exists()


def test_ctrl_c_before_the_first_event_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watching.watch, "__defaults__", (interrupt,))
    with pytest.raises(SystemExit) as ended:
        cli.bench(["compare", str(tmp_path), "--watch", "--html", str(tmp_path / "page.html")])
    assert ended.value.code == 130
    assert not capsys.readouterr().err


def test_a_run_without_events_that_a_process_holds_goes_on(tmp_path: Path) -> None:
    runs, page = tmp_path / "runs", tmp_path / "page.html"
    write_run(runs / "first")
    waits: list[float] = []

    def begin(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            events = write_run(tmp_path / "adam", optimizer="adam") / "events.jsonl"
            events.rename(runs / "second" / "events.jsonl")

    said: list[str] = []
    with locked(runs / "second", 0.0, print):
        watch([runs], page, said.append, begin)
    assert len(waits) == 2
    assert said == [f"{page}: another run begins (Ctrl-C stops)"]
    assert "Adam" in page.read_text()


def test_a_page_without_a_folder_or_a_path_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such run"):
        watch([tmp_path / "absent"], tmp_path / "page.html", print, never)
    with pytest.raises(UsageError, match="create it first"):
        watch([tmp_path], tmp_path / "absent" / "page.html", print, never)
