"""Checkpoints are complete or absent, verified when read, and never cost an older checkpoint."""

import hashlib
import json
import math
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from kfac_bench.core.distributed.collective import TorchCollective
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import UsageError
from kfac_bench.record import checkpoint_folder
from kfac_bench.training import checkpoint
from kfac_bench.training.checkpoint import writing
from kfac_bench.training.step_results import Clock
from tests.support.distributed import run_ranks

CPU = torch.device("cpu")
ALONE = Ranks(CPU)


def shard(step):
    return {
        "model": {"w": torch.arange(6.0).reshape(2, 3) + step, "n": torch.tensor(step)},
        "kfac": None,
        "train_s": step / 7,
        "rng": torch.get_rng_state(),
    }


def write(directory, step, state, ranks=ALONE, keep_last=9, keep_best=0, metric=None):
    """Write one checkpoint and return its path."""
    writer = checkpoint.Writer(directory, ranks, keep_last, keep_best)
    writer.start(step, state, metric)
    writer.finish()
    saved = writer.pop_saved()
    assert (saved is None) == (ranks.rank > 0)
    assert writer.pop_saved() is None, "returned twice"
    return saved and saved.path


def save(directory, *steps, keep_last=9):
    return [write(directory, s, shard(s), keep_last=keep_last) for s in steps][-1]


def names(directory):
    return sorted(p.name for p in directory.iterdir())


def one_line(error):
    text = str(error.value)
    assert len(text.splitlines()) == 1
    return text


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "checkpoints"


# ---- round trip ----


def test_a_loaded_checkpoint_equals_the_saved_state(folder):
    path = save(folder, 12)
    assert path == folder / "step-00000012"
    loaded = checkpoint.load(path)
    assert (loaded.path, loaded.step, len(loaded.shards)) == (path, 12, 1)
    saved, back = shard(12), loaded.shards[0]
    assert torch.equal(back["model"].pop("w"), saved["model"].pop("w"))
    assert torch.equal(back["rng"], saved["rng"])
    assert (back["model"], back["kfac"], back["train_s"]) == (saved["model"], None, 12 / 7)


def test_the_manifest_holds_the_hash_of_every_file(folder):
    path = save(folder, 3)
    manifest = json.loads((path / "manifest.json").read_text())
    digest = hashlib.sha256((path / "rank0.pt").read_bytes()).hexdigest()
    assert manifest == {"step": 3, "world_size": 1, "sha256": {"rank0.pt": digest}}
    assert names(path) == ["manifest.json", "rank0.pt"]
    assert names(folder) == ["step-00000003"], "something partial is left"


def test_find_accepts_a_run_directory_a_checkpoints_folder_and_a_checkpoint(folder):
    newest = save(folder, 9, 10, 100_000_000)  # the newest is not the last by name
    for path in (folder.parent, folder, newest):
        found, bad = checkpoint.find(path)
        assert (found.step, found.path, bad) == (100_000_000, newest, [])
    assert checkpoint.find(folder / "step-00000009")[0].step == 9


def test_find_returns_none_for_an_empty_or_missing_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "no_such", tmp_path / "empty" / "checkpoints"):
        assert checkpoint.find(path) == (None, [])


def test_saving_a_step_again_replaces_it(folder):
    save(folder, 5)
    write(folder, 5, shard(5) | {"train_s": 99.0})
    assert checkpoint.find(folder)[0].shards[0]["train_s"] == 99.0
    assert names(folder) == ["step-00000005"]


def test_leftovers_of_a_killed_writer_do_not_count(folder):
    good = save(folder, 5)
    partial = folder / ".step-00000010.partial"
    partial.mkdir()
    (partial / "rank0.pt").write_bytes(b"half")
    (folder / "step-00000020").mkdir()  # no manifest
    (folder / "notes").mkdir()
    found, bad = checkpoint.find(folder)
    assert found.path == good
    assert len(bad) == 1
    assert "step-00000020" in bad[0]
    save(folder, 10)
    assert not partial.exists()
    assert checkpoint.find(folder)[0].step == 10


# ---- damage ----


def flip(path):
    file = path / "rank0.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def edit_manifest(**changes):
    def edit(path):
        file = path / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


DAMAGE = {
    "flipped bit": (flip, "rank0.pt: damaged"),
    "truncated": (lambda p: (p / "rank0.pt").open("r+b").truncate(100), "rank0.pt: damaged"),
    "emptied": (lambda p: (p / "rank0.pt").write_bytes(b""), "rank0.pt: damaged"),
    "no shard": (lambda p: (p / "rank0.pt").unlink(), "rank0.pt: damaged"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json"),
    "torn manifest": (lambda p: (p / "manifest.json").write_text('{"step": 3'), "manifest.json"),
    "manifest of another kind": (lambda p: (p / "manifest.json").write_text("[]"), "manifest"),
    "a rank's file is missing": (edit_manifest(world_size=2), "rank1.pt: damaged"),
    "a file is not listed": (edit_manifest(sha256={}), "rank0.pt: damaged"),
    "no ranks": (edit_manifest(world_size=0), "manifest.json"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_damaged_checkpoint_is_reported_and_the_newest_good_one_is_used(folder, kind):
    damage, said = DAMAGE[kind]
    path = save(folder, 1, 2, 3)
    damage(path)
    with pytest.raises(UsageError) as caught:
        checkpoint.load(path)
    assert said in one_line(caught)
    assert str(path) in one_line(caught)
    found, bad = checkpoint.find(folder.parent)
    assert found.step == 2
    assert bad == [str(caught.value)]
    damage(folder / "step-00000002")
    found, bad = checkpoint.find(folder.parent)
    assert found.step == 1
    assert ["step-00000003" in bad[0], "step-00000002" in bad[1]] == [True, True]
    damage(folder / "step-00000001")
    found, bad = checkpoint.find(folder.parent)
    assert found is None
    assert len(bad) == 3


class Evil:
    """An object that creates a file if it is ever unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def sign(path):
    """Make the manifest fit the changed file, as an attacker would."""
    digest = hashlib.sha256((path / "rank0.pt").read_bytes()).hexdigest()
    edit_manifest(sha256={"rank0.pt": digest})(path)


@pytest.mark.parametrize("content", ["pickle", "garbage", "empty"])
def test_code_in_a_file_with_a_valid_hash_is_refused_and_not_run(folder, tmp_path, content):
    path, touched = save(folder, 1, 2), tmp_path / "touched"
    if content == "pickle":
        torch.save({"model": Evil(touched)}, path / "rank0.pt")
    else:
        (path / "rank0.pt").write_bytes(b"PK\x03\x04 garbage" if content == "garbage" else b"")
    sign(path)
    with pytest.raises(UsageError) as caught:
        checkpoint.load(path)
    assert "rank0.pt" in one_line(caught)
    found, bad = checkpoint.find(folder)
    assert (found.step, len(bad)) == (1, 1)
    assert not touched.exists(), "code from a checkpoint was run"


# ---- old checkpoints ----


def test_keep_last_keeps_the_newest_checkpoints(folder):
    for step in (1, 2, 3, 4):
        save(folder, step, keep_last=2)
    assert names(folder) == ["step-00000003", "step-00000004"]
    save(folder, 5, keep_last=1)
    assert names(folder) == ["step-00000005"]


def test_the_checkpoint_of_an_interruption_displaces_no_regular_one(folder):
    """Tables start runs from several regular checkpoints of one run."""
    save(folder, 1000, 1200, 1390)
    for step, kept in ((1400, [1000, 1200, 1400]), (1563, [1200, 1400, 1563])):
        save(folder, step)
        checkpoint_folder.remove_old(folder, step, 3, 0, 200)
        assert checkpoint_folder.steps(folder) == kept
    checkpoint_folder.remove_old(folder, 1563, 3, 0, 1000)  # the frequency has changed
    assert checkpoint_folder.steps(folder) == kept


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_new_checkpoint_is_kept_when_damaged_later_ones_exist(folder, keep_last):
    """After a run falls back to an older checkpoint, it counts steps from there again."""
    save(folder, 10, 20, 30)
    flip(folder / "step-00000020")
    flip(folder / "step-00000030")
    path = save(folder, 15, keep_last=keep_last)
    assert path.exists(), "the checkpoint just written was deleted"
    assert checkpoint.find(folder)[0].step == 15


# ---- a disk that fails ----


def full_disk(*_, **__):
    raise OSError(28, "No space left on device")


def torch_full_disk(state, file):
    raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")


@pytest.mark.parametrize("failure", [full_disk, torch_full_disk])
def test_a_failed_write_leaves_older_checkpoints_alone(folder, monkeypatch, failure):
    save(folder, 1, 2)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    monkeypatch.setattr(torch, "save", failure)
    said = r": (No space left on device|PytorchStreamWriter failed .*)$"
    with pytest.raises(OSError, match="step-00000003" + said):
        save(folder, 3, keep_last=1)
    with pytest.raises(OSError, match="step-00000002" + said):
        save(folder, 2, keep_last=1)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    assert names(folder) == ["step-00000001", "step-00000002"]


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        save(tmp_path / "file" / "checkpoints", 1)


def test_nothing_is_written_if_the_disk_has_too_little_room(folder, monkeypatch):
    save(folder, 1, 2)
    needed = sum(t.nbytes for t in (*shard(3)["model"].values(), torch.get_rng_state()))
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    with pytest.raises(OSError, match=r"step-00000003: it needs 0\.1 MB, 0\.0 MB are free"):
        save(folder, 3, keep_last=1)
    assert names(folder) == ["step-00000001", "step-00000002"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed + 100_000))
    save(folder, 3)


# ---- in flight ----


@pytest.fixture
def gate(monkeypatch):
    """Block every fsync until the test opens the gate."""
    gate, sync = threading.Event(), os.fsync

    def wait(descriptor):
        assert gate.wait(20)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", wait)
    yield gate
    gate.set()


def test_a_checkpoint_is_written_while_training_goes_on(folder, gate):
    writer, state = checkpoint.Writer(folder, ALONE, 9), shard(7)
    before = state["model"]["w"].clone()
    writer.start(7, state)
    # The next training step changes the weights in place.
    state["model"]["w"].zero_()
    assert (writer.pop_saved(), writer.has_failed) == (None, False)
    assert checkpoint.find(folder)[0] is None, "an incomplete checkpoint counts"
    gate.set()
    writer.finish()
    saved = writer.pop_saved()
    assert (saved.step, saved.path) == (7, folder / "step-00000007")
    assert 0 < saved.waited_s < 20
    assert 0 < saved.cpu_s < 20
    assert torch.equal(checkpoint.find(folder)[0].shards[0]["model"]["w"], before)


def test_the_training_clock_does_not_count_the_thread_that_writes(folder):
    writer = checkpoint.Writer(folder, ALONE, 9)
    clock = Clock("cpu", writer.cpu_s)
    clock.start()
    with clock.paused():
        writer.start(1, shard(1) | {"large": torch.zeros(30_000_000)})
    while not (saved := writer.pop_saved()):
        assert clock.train_s() < 0.1, "the thread counts while it runs"
        time.sleep(0.01)  # takes no processor time
    assert writer.cpu_s() == saved.cpu_s > 0.1
    assert clock.train_s() < 0.5 * saved.cpu_s


def test_a_checkpoint_is_complete_before_the_next_one_begins(folder, gate):
    writer = checkpoint.Writer(folder, ALONE, 9)
    writer.start(1, shard(1))
    threading.Timer(0.3, gate.set).start()
    writer.start(2, shard(2))
    assert (folder / "step-00000001" / "manifest.json").exists()
    first = writer.pop_saved()
    writer.finish()
    second = writer.pop_saved()
    assert (first.step, second.step) == (1, 2)
    assert first.waited_s > 0.2, "waiting time is not counted"


def test_a_failure_is_known_before_the_next_checkpoint(folder, monkeypatch):
    monkeypatch.setattr(torch, "save", full_disk)
    writer = checkpoint.Writer(folder, ALONE, 9)
    writer.start(1, shard(1))
    while not writer.has_failed:
        time.sleep(0.01)
    with pytest.raises(OSError, match="step-00000001: No space left on device"):
        writer.finish()
    assert (writer.has_failed, writer.pop_saved(), names(folder)) == (False, None, [])
    writer.finish()


def test_an_error_in_training_does_not_lose_the_checkpoint_in_flight(folder, gate):
    writer = checkpoint.Writer(folder, ALONE, 9)
    writer.start(1, shard(1))
    threading.Timer(0.3, gate.set).start()
    writer.close()
    assert checkpoint.find(folder)[0].step == 1


def test_a_leftover_file_of_an_earlier_start_is_not_used(folder):
    """An earlier start was killed after one rank had written its file of step 5."""
    stale = folder / ".step-00000005.0badcafe.partial"
    stale.mkdir(parents=True)
    (stale / f"rank0.pt.{'0' * 64}").write_bytes(b"of other weights")
    path = save(folder, 5)
    assert names(folder) == ["step-00000005"]
    assert names(path) == ["manifest.json", "rank0.pt"]
    assert checkpoint.load(path).shards[0]["train_s"] == 5 / 7


def test_views_are_saved_without_their_base_and_tied_weights_stay_tied(folder):
    whole = torch.arange(100_000.0)
    module = torch.nn.BatchNorm1d(3)
    state = {"part": whole[5:9], "tied": [whole[5:9], (whole[:4].view(2, 2),)]}
    path = write(folder, 1, state | {"model": module.state_dict()})
    assert (path / "rank0.pt").stat().st_size < 10_000
    back = checkpoint.load(path).shards[0]
    assert back["part"].tolist() == [5, 6, 7, 8]
    assert back["tied"][1][0].tolist() == [[0, 1], [2, 3]]
    back["part"][0] = -1
    assert back["tied"][0][0] == -1
    assert back["model"]._metadata == module.state_dict()._metadata


# ---- the best checkpoints ----


def evaluated(folder, values, higher=True, keep_last=1, keep_best=1):
    for step, value in values.items():
        metric = None if value is None else checkpoint.ValidationMetric("loss", value, higher)
        write(folder, step, shard(step), keep_last=keep_last, keep_best=keep_best, metric=metric)
    return [int(name.removeprefix("step-")) for name in names(folder)]


def test_the_best_checkpoint_is_never_removed(folder):
    values = {1: math.nan, 2: 0.9, 3: None, 4: 0.5, 5: math.inf, 6: 0.3}
    assert evaluated(folder, values) == [2, 6]
    assert checkpoint.find(folder)[0].step == 6
    assert checkpoint.find_best(folder.parent)[0].step == 2
    assert evaluated(folder, {7: 0.9}) == [7], "the newer of two equal values"


def test_later_checkpoints_that_were_passed_over_are_void_however_good(folder):
    """A run that was taken up at step 5, since a later checkpoint was damaged, has reached 7."""
    assert evaluated(folder, {5: 0.5, 10: 0.9}, keep_last=2) == [5, 10]
    assert evaluated(folder, {7: 0.4}) == [5, 7]


def test_the_lowest_value_is_best_if_lower_is_better(folder):
    values = {1: 3.0, 2: 1.0, 3: 2.0, 4: math.inf}
    assert evaluated(folder, values, higher=False, keep_best=2) == [2, 3, 4]
    flip(folder / "step-00000002")
    best, bad = checkpoint.find_best(folder)
    assert (best.step, len(bad)) == (3, 1)
    assert "step-00000002" in bad[0]


def test_without_metrics_there_is_no_best_checkpoint(folder):
    assert evaluated(folder, {1: None, 2: None}) == [2]
    assert checkpoint.find_best(folder) == (None, [])


@pytest.mark.parametrize("said", ["[]", '{"metric": 3}', '{"metric": {"name": 1}}', "[" * 100_000])
def test_a_malformed_manifest_is_ignored_when_choosing_the_best(folder, said):
    evaluated(folder, {1: 0.5}, keep_last=9)
    (folder / "step-00000002").mkdir()
    (folder / "step-00000002" / "manifest.json").write_text(said)
    assert checkpoint.find_best(folder)[0].step == 1
    found, bad = checkpoint.find(folder)
    assert found.step == 1
    assert [len(line.splitlines()) for line in bad] == [1]
    assert "step-00000002" in bad[0]


# ---- on several ranks ----


def saved_on_ranks(rank_of_failure, stage, directory):
    """Save step 1, then step 2 with a failure on one rank, and return the outcome of step 2."""

    ranks = Ranks(CPU, TorchCollective())
    write(directory, 1, {"rank": ranks.rank}, ranks)
    outcome = []

    def attempt():
        real = torch.save, json.dump, Path.mkdir
        try:
            if ranks.rank == rank_of_failure and stage == "shard":
                torch.save = full_disk
            if ranks.rank == rank_of_failure and stage == "manifest":
                json.dump = full_disk
            if ranks.rank == rank_of_failure and stage == "folder":
                Path.mkdir = full_disk
            write(directory, 2, {"rank": ranks.rank}, ranks, keep_last=1)
        except OSError as error:
            outcome.append(str(error))
        except BaseException as error:
            outcome.append(repr(error))
        else:
            outcome.append("saved")
        finally:
            torch.save, json.dump, Path.mkdir = real

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(60)
    assert outcome, "this rank hangs after another rank failed"
    return outcome[0]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("rank", "stage"), [(None, ""), (1, "shard"), (0, "shard"), (0, "folder"), (0, "manifest")]
)
def test_two_ranks_save_or_fail_together(folder, rank, stage):
    outcomes = run_ranks(2, saved_on_ranks, rank, stage, folder)
    found, bad = checkpoint.find(folder)
    assert bad == []
    assert [s["rank"] for s in found.shards] == [0, 1]
    if rank is None:
        assert outcomes == ["saved", "saved"]
        assert names(folder) == ["step-00000002"]
    else:
        who = "rank 1: " if rank else ""
        said = f"checkpoint {folder}/step-00000002: {who}No space left on device"
        assert outcomes == [said, said]
        assert found.step == 1
        assert names(folder) == ["step-00000001"]


def slow_on_rank_1(directory):
    """Write a checkpoint whose rank 1 is late, while training goes on."""
    ranks, sync, gate = Ranks(CPU, TorchCollective()), os.fsync, threading.Event()
    writer = checkpoint.Writer(directory, ranks, 9)
    if ranks.rank == 1:
        os.fsync = lambda descriptor: (gate.wait(20), sync(descriptor))
    try:
        writer.start(3, {"rank": ranks.rank})
        if ranks.is_main:
            time.sleep(0.3)
        seen = checkpoint.find(directory)[0] is not None, writer.pop_saved()
        ranks.any(False)  # stands for the messages of a training step
        gate.set()
        writer.finish()
    finally:
        os.fsync = sync
    return seen, len(checkpoint.find(directory)[0].shards)


@pytest.mark.ranks
def test_a_checkpoint_counts_only_when_all_ranks_have_written(folder):
    assert run_ranks(2, slow_on_rank_1, folder) == [((False, None), 2)] * 2


def left_alone(directory):
    """Let rank 1 end by an error before it writes; rank 0 must soon give up."""
    ranks = Ranks(CPU, TorchCollective())
    writer = checkpoint.Writer(directory, ranks, 9)
    writing.OTHERS_S = 0.2
    if ranks.rank == 1:
        writer._write = lambda saving: saving.own_is_done.set()
    writer.start(4, {"rank": ranks.rank})
    writer.close()
    return writer.pop_saved(), checkpoint.find(directory)[0]


@pytest.mark.ranks
def test_a_rank_that_lost_the_others_does_not_wait_for_their_files(folder):
    assert run_ranks(2, left_alone, folder) == [(None, None)] * 2
