"""Packed runs: what results need survives, what is private does not, damage is one line."""

import gzip
import json
import math
import os
from dataclasses import replace

import pytest
from hypothesis import given

from benchmarks.contest import packed_runs
from benchmarks.contest.packed_runs import PackedRun
from kfac_bench.benchmark.measures import measure
from kfac_bench.errors import UsageError
from kfac_bench.record import runs, score
from kfac_bench.record.events import (
    Checkpointed,
    Evaluated,
    RunEnded,
    RunStarted,
    TargetReached,
    Trained,
)
from tests.record.test_score import config
from tests.support.fuzzing import damaged, fuzz, refused_or, spoilt

ENVIRONMENT = {
    "git_commit": "ab" * 20,
    "versions": {"torch": "2.14.1"},
    "hardware": {"cpu": "EPYC", "cpu_count": 2, "system": "Linux-of-somebody"},
    "command": "/home/somebody/kfac-train",
    "slurm_job_id": "77",
    "world_size": 1,
    "device": "cpu",
}


def noise(i, salt):
    """Return a number in [0, 0.3) with many digits."""
    return 0.3 * (math.sin(12.9898 * i + 78.233 * salt) * 43758.5453 % 1)


def events(count=101, best=64, target_s=3.0123456789012345, salt=0):
    """Return a run whose best value is at the evaluation ``best``."""
    started = config(
        data={"name": "digits", "root": "/home/somebody/data"}, runs_dir="/home/somebody/runs"
    )
    return [
        RunStarted(0, 0.0, "a", "accuracy", True, started, ENVIRONMENT, {"factors": {"x": 1}}),
        Trained(1, 0.1, 0.0, 2.0, 0.1, 5.0),
        *(
            Evaluated(i, i / 30 * (1 + noise(i, salt)), i / 7, {"accuracy": value, "loss": 1.0})
            for i in range(count)
            for value in [0.123456789 if i == best else -noise(i, salt)]
        ),
        Checkpointed(100, 3.3, "/home/somebody/runs/a/checkpoints", 0.1),
        TargetReached(100, target_s, "accuracy", 0.98, 0.97),
        RunEnded(100, 3.4, "reached", "x" * 1000, "f" * 64),
    ]


def packed(name="digits-run", **changes):
    fields = {
        "name": name,
        "kind": "trial",
        "task": "embedded/digits",
        "optimizer": "sgd",
        "seed": 3,
        "sitting": "20261122T1000-ab12",
        "date": "2026-11-22T10:00Z",
        "settings": {"optimizer.lr": 0.1, "kfac.kl_clip": None, "kfac.skip": []},
        "events": packed_runs.pack(events()),
    }
    return PackedRun(**(fields | changes))


def test_results_of_a_packed_run_are_those_of_the_run():
    before, after = events(), packed_runs.pack(events())
    assert [type(e) for e in after[-2:]] == [TargetReached, RunEnded]
    curve = [e for e in after if isinstance(e, Evaluated)]
    assert len(curve) <= packed_runs.CURVE + 1
    assert {0, 64, 100} <= {e.step for e in curve}, "first, best and last"
    assert max(e.metrics["accuracy"] for e in curve) == 0.12346
    assert all(e.metrics.keys() == {"accuracy"} for e in curve)
    old = runs.Run("a", before[0], tuple(before))
    new = runs.Run("b", after[0], tuple(after))
    assert score.time_to_target_s(new) == 3.0123456789012345
    assert score.steps_to_target(new) == 100
    assert len(runs.group([old, new])) == 1, "another setting than before packing"


def test_a_whole_curve_keeps_levels_and_the_time_of_a_step():
    before = events()
    before.insert(60, Trained(50, 2.1, 1.0, 1.0, 0.1, 5.0, cosine={"a": 1.0}, stage_s={"b": 1.0}))
    after = packed_runs.pack(before, whole_curve=True)
    old, new = (runs.Run("a", each[0], tuple(each)) for each in (before, after))
    assert new.pace == old.pace
    assert not any(each.cosine or each.stage_s for each in new.trained)
    assert len([e for e in after if isinstance(e, Evaluated)]) == 101
    assert measure(new, "steps_to_level", 0.1) == measure(old, "steps_to_level", 0.1) == 64


def test_the_time_of_the_first_target_survives_an_easier_one_of_a_later_start():
    first, *rest = events()
    first = replace(first, config=first.config | {"trainer": {"target": 0.97}})
    easier = TargetReached(50, 1.5, "accuracy", 0.9, 0.8)
    events_of_both = (first, easier, *rest)
    for each in (events_of_both, packed_runs.pack(events_of_both)):
        assert score.time_to_target_s(runs.Run("a", first, each)) == 3.0123456789012345


def test_no_folder_or_command_of_the_machine_is_kept():
    text = json.dumps([packed_runs.event_fields(e) for e in packed_runs.pack(events())])
    assert "somebody" not in text
    assert "77" not in json.loads(text)[0]["environment"]
    assert json.loads(text)[0]["environment"]["hardware"] == {"cpu": "EPYC", "cpu_count": 2}


def test_a_run_that_died_early_can_be_packed():
    assert packed_runs.pack([]) == ()
    assert [type(e) for e in packed_runs.pack(events()[:2])] == [RunStarted]


def test_runs_survive_the_file_and_their_order_does_not_matter(tmp_path):
    some = [packed(), packed("other", seed=4, failure="no data", events=())]
    packed_runs.write(tmp_path / "x" / "a.jsonl.gz", some)
    packed_runs.write(tmp_path / "b.jsonl.gz", some[::-1])
    assert (tmp_path / "x" / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert packed_runs.read(tmp_path / "b.jsonl.gz") == some


def test_three_hundred_runs_of_a_task_are_small(tmp_path):
    """A contest has about 300 trials and 100 other runs of each of its eight tasks."""
    some = [
        packed(f"run{i}", seed=i, events=packed_runs.pack(events(61, 50, i / 7, salt=i)))
        for i in range(400)
    ]
    packed_runs.write(tmp_path / "a.jsonl.gz", some)
    size = (tmp_path / "a.jsonl.gz").stat().st_size
    assert 20_000 < size < 1e6 / 8


def compressed(fields):
    return gzip.compress(json.dumps(fields).encode() + b"\n")


def written_line(tmp_path):
    packed_runs.write(tmp_path / "good.jsonl.gz", [packed()])
    return json.loads(gzip.decompress((tmp_path / "good.jsonl.gz").read_bytes()))


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"name": "../../etc/cron"}, "name must be"),
        ({"name": ".."}, "name must be"),
        ({"name": "a/b"}, "name must be"),
        ({"seed": "three"}, "'seed' is not of its type"),
        ({"settings": [1]}, "'settings' is not of its type"),
        ({"events": {"a": 1}}, "events must be a list"),
        ({"events": [{"event": "RunEnded", "step": "x"}]}, "RunEnded"),
        ({"events": [7]}, "must be a JSON object"),
    ],
)
def test_wrong_values_are_refused_in_one_line(tmp_path, change, fragment):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(compressed(written_line(tmp_path) | change))
    with pytest.raises(
        UsageError, match=rf"a\.jsonl\.gz:1: not a packed run .*{fragment}"
    ) as caught:
        packed_runs.read(path)
    assert "\n" not in str(caught.value)
    assert "delete it to run its trials again" in str(caught.value)


def test_damaged_and_huge_files_are_refused(tmp_path, monkeypatch):
    packed_runs.write(path := tmp_path / "a.jsonl.gz", [packed()])
    whole = path.read_bytes()
    for content in (whole[:-20], b"no gzip", whole[:30] + b"\x00\x00" + whole[32:], b"\x1f\x8b"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"a\.jsonl\.gz: (damaged|not a)"):
            packed_runs.read(path)
    path.write_bytes(gzip.compress(b"\xff\xfe\n"))
    with pytest.raises(UsageError, match="damaged"):
        packed_runs.read(path)
    monkeypatch.setattr(packed_runs, "MOST_BYTES", 1000)
    path.write_bytes(gzip.compress(b" " * 2000))
    with pytest.raises(UsageError, match=r"unpacks to more than 0\.001 MB"):
        packed_runs.read(path)
    monkeypatch.setattr(packed_runs, "MOST_FILE_BYTES", 10)
    with pytest.raises(UsageError, match="larger than"):
        packed_runs.read(path)
    path.unlink()
    os.mkfifo(path)  # reading it would never end
    with pytest.raises(UsageError, match="is no regular file"):
        packed_runs.read(path)
    with pytest.raises(UsageError, match="cannot be read"):
        packed_runs.read(tmp_path / "none")


def _line():
    run = replace(packed(), events=packed_runs.pack(events(5, 2)))
    own = {k: v for k, v in vars(run).items() if k != "events"}
    return own | {"events": [packed_runs.event_fields(e) for e in run.events]}


@fuzz(60)
@given(tree=spoilt(_line()))
def test_fuzz_wrong_values(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("p") / "a.jsonl.gz"
    path.write_bytes(compressed(tree))
    refused_or(lambda: packed_runs.read(path))


@fuzz(60)
@given(content=damaged(compressed(_line())))
def test_fuzz_damaged_bytes(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("p") / "a.jsonl.gz"
    path.write_bytes(content)
    refused_or(lambda: packed_runs.read(path))


def test_another_winner_of_a_study_replaces_the_run_of_the_first():
    first, other = (packed(kind="table", settings={"optimizer.lr": lr}) for lr in (0.1, 0.2))
    assert first.key == other.key
    assert packed().key != packed(settings={"optimizer.lr": 0.2}).key
