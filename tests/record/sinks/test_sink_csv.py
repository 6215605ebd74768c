"""metrics.csv has what the events measure, also after a resume."""

import csv
from contextlib import suppress

from kfac_bench.record.event_log import EventLog, JsonlSink
from kfac_bench.record.events import Evaluated, Resumed, RunEnded, RunStarted, Trained, read
from kfac_bench.record.sinks.file_views import CsvSink
from kfac_bench.record.sinks.view import ShownRun, metrics_of
from tests.support.runs import KFAC, before_step, kill, train

STARTED = RunStarted(0, 0.0, "r", "accuracy", True, {}, {})


def trained(step, loss=1.0):
    return Trained(step, 0.5 * step, 0.25, loss, 0.1, 100.0)


def evaluated(step, accuracy):
    return Evaluated(step, 0.5 * step, 0.25, {"accuracy": accuracy})


def emit(path, *events, say=print):
    log = EventLog([JsonlSink(path / "events.jsonl"), CsvSink(ShownRun(path, say=say))])
    for event in events:
        log.emit(event)
    log.close()


def check(path):
    """The file has each valid event that measures something, in order; return its rows."""
    rows = list(csv.DictReader((path / "metrics.csv").read_text().splitlines()))
    numbers = [{name: float(value) for name, value in row.items() if value} for row in rows]
    assert numbers == [row for event in read(path) if (row := metrics_of(event))]
    return numbers


def test_each_event_is_a_row_and_each_metric_a_column(tmp_path):
    emit(tmp_path, STARTED, trained(1), trained(2), evaluated(2, 0.5), RunEnded(2, 1.0, "finished"))
    assert [row.get("eval/accuracy") for row in check(tmp_path)] == [None, None, 0.5]


def test_a_name_with_a_comma_is_one_column(tmp_path):
    emit(tmp_path, STARTED, Evaluated(1, 0.5, 0.25, {"error, in %": 3.0}))
    assert [row["eval/error, in %"] for row in check(tmp_path)] == [3.0]


def test_a_resume_removes_the_rows_that_it_made_void(tmp_path):
    emit(tmp_path, STARTED, trained(1), trained(2), evaluated(2, 0.5), trained(3, loss=3.0))
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("4,2.0,0.2")  # a process was killed here
    emit(tmp_path, Resumed(2, 1.0, "checkpoint"), evaluated(2, 0.5), trained(3, loss=0.25))
    assert [row["step"] for row in check(tmp_path)] == [1, 2, 2, 3]


def test_a_start_from_the_beginning_removes_all_rows(tmp_path):
    emit(tmp_path, STARTED, trained(1), trained(2))
    emit(tmp_path, STARTED, trained(1))
    assert len(check(tmp_path)) == 1


def test_a_failure_is_printed_once_and_training_goes_on(tmp_path):
    (tmp_path / "metrics.csv").mkdir()
    said = []
    emit(tmp_path, STARTED, trained(1), trained(2), say=said.append)
    [line] = said
    assert line.startswith("metrics.csv failed")


def test_a_run_with_two_loggers_that_was_killed_has_both_views(tmp_path):
    words = (*KFAC, "trainer.max_steps=10", "trainer.log_freq=1", "run_id=a")
    words += ("logger=[csv,tensorboard]",)
    with before_step(8, kill), suppress(RuntimeError):
        train(tmp_path, *words)
    _, path = train(tmp_path, *words)
    assert [row["step"] for row in check(path) if "train/loss" in row] == list(range(1, 11))
    assert any((path / "tensorboard").iterdir())
