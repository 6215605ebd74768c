"""The soak test reports growth, and ignores what is short-lived."""

import json
import sys
import textwrap

import pytest

from kfac_bench.errors import UsageError
from kfac_bench.record.events import RunEnded, Trained
from tests.reliability.soak import command
from tests.reliability.soak.command import Follow, Soak, soak, watch
from tests.reliability.soak.processes import Sample
from tests.reliability.soak.verdict import Verdict


def samples(memory, subject="rank 0", steps=2000, files=lambda step: 9, cpu=lambda step: step / 10):
    metrics = {
        "resident MB": memory,
        "open files": files,
        "threads": lambda step: 5,
        "CPU s": cpu,
    }
    return [
        Sample(step, subject, metric, value(step))
        for step in range(0, steps + 1, 20)
        for metric, value in metrics.items()
    ]


METRICS = ("resident MB", "open files", "threads", "CPU s")


def on_disk(checkpoints, records=lambda step: step / 1e4, steps=2000):
    metrics = {"checkpoints MB": checkpoints, "records MB": records}
    return [
        Sample(step, "disk", metric, value(step))
        for step in range(0, steps + 1, 20)
        for metric, value in metrics.items()
    ]


def broken(*found):
    verdict = Verdict()
    verdict.samples([sample for each in found for sample in each])
    return verdict.broken


def test_growth_after_the_warm_up_is_reported():
    assert broken(samples(lambda s: 800)) == []
    assert broken(samples(lambda s: 300 + min(s, 500))) == [], "growth during the warm-up counts"
    assert broken(samples(lambda s: 800 + s / 200)) == ["rank 0: resident MB"]
    assert broken(samples(lambda s: 800, files=lambda s: 9 + s // 500)) == ["rank 0: open files"]
    assert broken(samples(lambda s: 8 + s / 200, "rank 0's wandb-core")) == []
    assert broken(samples(lambda s: 8 + s / 100, "rank 0's wandb-core")) == [
        "rank 0's wandb-core: resident MB"
    ]


def test_growth_of_the_run_directory_is_reported():
    assert broken(on_disk(lambda s: 30 + 10 * (s % 100 == 0))) == []
    assert broken(on_disk(lambda s: 30 + s / 1000)) == ["disk: checkpoints MB"]
    assert broken(on_disk(lambda s: 30, lambda s: s / 500)) == ["disk: records MB"]


def test_a_slow_leak_of_a_long_run_is_reported():
    slow = [Sample(s, "rank 0", m, 800 + s / 1000) for m in METRICS for s in range(0, 50001, 500)]
    assert "rank 0: resident MB" in broken(slow)
    short = [Sample(s, "rank 0", m, 800 + s / 1000) for m in METRICS for s in range(0, 2001, 20)]
    assert "rank 0: resident MB" not in broken(short)


def test_steps_that_become_slower_are_reported():
    assert broken(samples(lambda s: 800, cpu=lambda s: s / 10 + 20 * (s > 1500))) == []
    slower = samples(lambda s: 800, cpu=lambda s: s / 10 + max(0, s - 1000) / 10)
    assert broken(slower) == ["rank 0: CPU s for 1,000 steps"]


def test_a_short_peak_is_no_growth():
    assert broken(samples(lambda s: 800 + 50 * (s > 1000 and s % 100 == 0))) == []
    assert broken(samples(lambda s: 800), samples(lambda s: s, "rank 1's git", 200)) == []


def test_a_rank_with_few_samples_breaks_the_bounds():
    assert broken(samples(lambda s: 800), samples(lambda s: 8, "rank 1", 600)) == [
        "rank 1: resident MB",
        "rank 1: open files",
        "rank 1: threads",
        "rank 1: CPU s for 1,000 steps",
    ]


def test_missing_events_and_a_failed_run_break_the_bounds():
    verdict = Verdict()
    trained = Trained(10, 1.0, 0.1, 0.5, 0.1, 10.0)
    verdict.record([trained, RunEnded(10, 1.0, "failed", "ranks do not agree")], 2, 0)
    verdict.view(3, 4, 31.0)
    assert verdict.broken == [
        "events.jsonl: Trained events",
        "run",
        "wandb: rows",
        "seconds from the last event to the end",
    ]
    shown = verdict.table("t", ["n"]).markdown()
    assert "failed ranks do not agree | \u2013 | finished | NO |" in shown


def test_the_step_comes_from_the_last_complete_line(tmp_path):
    path = tmp_path / "events.jsonl"
    follow = Follow(path)
    assert follow.step() == 0
    path.write_text('{"step": 10}\n{"step": 2')
    assert follow.step() == 10
    with path.open("a") as file:
        file.write("0}\n")
    assert follow.step() == 20


LEAKS = """
import json, os, subprocess, sys, threading, time
[events] = sys.argv[1:]
if "RANK" not in os.environ:
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": str(r)})
        for r in range(2)
    ]
    sys.exit(max(rank.wait() for rank in ranks))
kept = []
other = f"{events}.{1 - int(os.environ['RANK'])}"
for number, step in enumerate(range(0, 2001, 50)):
    with open(f"{events}.{os.environ['RANK']}", "a") as file:
        file.write(".")
    while not os.path.exists(other) or os.path.getsize(other) <= number:
        time.sleep(0.01)  # ranks stay together, however busy the machine is
    if os.environ["RANK"] == "1":
        kept += [bytearray(os.urandom(1 << 21)), open(__file__)]
        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
    if os.environ["RANK"] == "0":
        with open(events, "a") as file:
            file.write(json.dumps({"step": step}) + "\\n")
    time.sleep(0.05)
"""


@pytest.mark.alone
@pytest.mark.ranks
def test_leaks_of_real_processes_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "SAMPLE_S", 0.05)
    program = tmp_path / "ranks.py"
    program.write_text(textwrap.dedent(LEAKS))
    events = tmp_path / "events.jsonl"
    found, _ = watch([sys.executable, str(program), str(events)], events, tmp_path / "log")
    assert (tmp_path / "log").read_text() == ""
    assert broken(found) == ["rank 1: resident MB", "rank 1: open files", "rank 1: threads"]


@pytest.mark.alone
@pytest.mark.ranks
def test_a_short_soak_has_all_events(tmp_path, monkeypatch):
    """The run is too short for slopes, but all events must be there."""
    # Training takes about a second, and each process needs samples of its last steps.
    monkeypatch.setattr(command, "SAMPLE_S", 0.05)
    small = ["model=autoencoder", "model.hidden=[16,6]"]
    asked = Soak(2, tmp_path, steps=60, overrides=small)
    verdict = soak(asked, lambda line: None)
    slopes = ("rank ", "disk: ")
    assert [what for what in verdict.broken if not what.startswith(slopes)] == []
    shown = {row[0]: row[2] for row in verdict.rows}
    assert {"rank 0: resident MB", "rank 1: threads", "rank 0's wandb-core: open files"} <= set(
        shown
    )
    assert shown["events.jsonl: Evaluated events"] == 21
    assert shown["wandb: rows"] >= 6 + 21
    first = json.loads((asked.path / "events.jsonl").read_text().splitlines()[0])
    assert first["config"]["trainer"]["check_ranks"] is True
    assert len((tmp_path / "soak-60-2.csv").read_text().splitlines()) > 5
    with pytest.raises(UsageError, match="exists already"):
        soak(asked, lambda line: None)
