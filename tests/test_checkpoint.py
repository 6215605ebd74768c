"""Checkpoints: whole or not there, verified when read, never a reason to lose an older one."""

import hashlib
import json
import threading
from pathlib import Path

import pytest
import torch

from kfac_bench import checkpoint
from kfac_bench.core.collective import TorchCollective
from kfac_bench.errors import UsageError
from kfac_bench.ranks import Ranks
from tests.distributed import run_ranks

CPU = torch.device("cpu")
ALONE = Ranks(CPU)


def shard(step):
    return {
        "model": {"w": torch.arange(6.0).reshape(2, 3) + step, "n": torch.tensor(step)},
        "kfac": None,
        "train_s": step / 7,
        "rng": torch.get_rng_state(),
    }


def save(directory, *steps, keep_last=9):
    paths = [checkpoint.save(directory, s, shard(s), ALONE, keep_last) for s in steps]
    return paths[-1]


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


def test_what_is_saved_is_what_is_loaded(folder):
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


def test_newest_is_found_from_run_directory_folder_and_itself(folder):
    newest = save(folder, 9, 10, 100_000_000)  # not the last in the order of names
    for path in (folder.parent, folder, newest):
        found, bad = checkpoint.find(path)
        assert (found.step, found.path, bad) == (100_000_000, newest, [])
    assert checkpoint.find(folder / "step-00000009")[0].step == 9


def test_nothing_is_found_where_nothing_is(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "no_such", tmp_path / "empty" / "checkpoints"):
        assert checkpoint.find(path) == (None, [])


def test_saving_a_step_again_replaces_it(folder):
    save(folder, 5)
    checkpoint.save(folder, 5, shard(5) | {"train_s": 99.0}, ALONE, 9)
    assert checkpoint.find(folder)[0].shards[0]["train_s"] == 99.0
    assert names(folder) == ["step-00000005"]


def test_leftovers_of_a_killed_writer_do_not_count(folder):
    good = save(folder, 5)
    partial = folder / ".step-00000010.partial"
    partial.mkdir()
    (partial / "rank0.pt").write_bytes(b"half")
    (folder / "step-00000020").mkdir()  # renamed by hand: no manifest
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
    "a rank's part is missing": (edit_manifest(world_size=2), "rank1.pt: damaged"),
    "a part is not listed": (edit_manifest(sha256={}), "rank0.pt: damaged"),
    "no ranks": (edit_manifest(world_size=0), "manifest.json"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_damage_is_named_and_the_newest_good_one_used(folder, kind):
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
    """Creates a file if it is ever unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def sign(path):
    """Make the manifest fit what lies there, as an attacker would."""
    digest = hashlib.sha256((path / "rank0.pt").read_bytes()).hexdigest()
    edit_manifest(sha256={"rank0.pt": digest})(path)


@pytest.mark.parametrize("content", ["pickle", "garbage", "empty"])
def test_a_signed_file_that_is_no_checkpoint_is_refused_and_not_run(folder, tmp_path, content):
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


# ---- which ones are kept ----


def test_the_last_ones_are_kept(folder):
    for step in (1, 2, 3, 4):
        save(folder, step, keep_last=2)
    assert names(folder) == ["step-00000003", "step-00000004"]
    save(folder, 5, keep_last=1)
    assert names(folder) == ["step-00000005"]


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_new_checkpoint_is_kept_beside_damaged_later_ones(folder, keep_last):
    """After a fall back to an older one, steps are counted from there again."""
    save(folder, 10, 20, 30)
    flip(folder / "step-00000020")
    flip(folder / "step-00000030")
    path = save(folder, 15, keep_last=keep_last)
    assert path.exists(), "the checkpoint just written was deleted"
    assert checkpoint.find(folder)[0].step == 15


# ---- a disk that fails ----


def full_disk(*_, **__):
    raise OSError(28, "No space left on device")


def torch_full_disk(*_, **__):
    raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")


@pytest.mark.parametrize("failure", [full_disk, torch_full_disk])
def test_a_failed_write_leaves_older_checkpoints_alone(folder, monkeypatch, failure):
    save(folder, 1, 2)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    monkeypatch.setattr(torch, "save", failure)
    with pytest.raises(OSError, match="step-00000003"):
        save(folder, 3, keep_last=1)
    with pytest.raises(OSError, match="step-00000002"):
        save(folder, 2, keep_last=1)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    assert names(folder) == ["step-00000001", "step-00000002"]


def test_where_no_folder_can_be_made_it_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        save(tmp_path / "file" / "checkpoints", 1)


def saved_on_ranks(rank_of_failure, stage, directory):
    """Save 1, then 2 with a failure on one rank; runs on every rank. What became of it."""

    ranks = Ranks(CPU, TorchCollective())
    checkpoint.save(directory, 1, {"rank": ranks.rank}, ranks, 9)
    outcome = []

    def attempt():
        real = torch.save, json.dump
        try:
            if ranks.rank == rank_of_failure and stage == "shard":
                torch.save = full_disk
            if ranks.rank == rank_of_failure and stage == "manifest":
                json.dump = full_disk
            checkpoint.save(directory, 2, {"rank": ranks.rank}, ranks, 1)
        except OSError:
            outcome.append("OSError")
        except BaseException as error:
            outcome.append(repr(error))
        else:
            outcome.append("saved")
        finally:
            torch.save, json.dump = real

    if rank_of_failure == 0 and stage == "folder" and ranks.rank == 0:
        (directory / ".step-00000002.partial").write_text("in the way")
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(8)
    assert outcome, "hangs: another rank has given up"
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
        assert outcomes == ["OSError", "OSError"]
        assert found.step == 1
        assert "step-00000002" not in names(folder)
