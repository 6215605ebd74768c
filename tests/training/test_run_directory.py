"""Faults of a run directory: lost files, a record behind its checkpoint, and hostile files."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kfac_bench import cli
from kfac_bench.errors import UsageError
from kfac_bench.record import event_log
from kfac_bench.record.events import Checkpointed, Resumed, read
from kfac_bench.record.own_files import sync_folder
from kfac_bench.training import checkpoint, run, run_directory
from kfac_bench.training.run_directory import RunDirectory
from tests.support.runs import ALONE, before_step, config_of, end, kill, of_kind, steps_of, train

STEPS = ("run_id=r", "kfac=none")


def begun(folder):
    """Return the directory of a run that was killed after the checkpoint of step 5."""
    with before_step(7, kill), pytest.raises(RuntimeError, match="killed"):
        train(folder, *STEPS, "trainer.max_steps=10", "trainer.log_freq=1")
    return folder / "r"


def continued(folder, *options):
    return train(folder, *STEPS, "trainer.max_steps=10", "trainer.log_freq=1", *options)


def kinds(path):
    return [type(event).__name__ for event in read(path)]


# ---- config.yaml and run.json ----


def test_a_start_rewrites_nothing_about_the_first_start(tmp_path):
    path = begun(tmp_path)
    before = {name: (path / name).stat().st_ino for name in ("config.yaml", "run.json")}
    assert continued(tmp_path)[0] == "finished"
    assert {name: (path / name).stat().st_ino for name in before} == before


@pytest.mark.parametrize(("name", "is_removed"), [("wandb", True), ("mine", False)])
def test_a_run_that_cannot_begin_leaves_only_what_is_not_its_own(tmp_path, name, is_removed):
    config = config_of(tmp_path, *STEPS)
    directory = RunDirectory(config)

    def begin():
        with directory.open(config, {}):
            (directory.path / name).mkdir()
            raise UsageError("no data")

    with pytest.raises(UsageError, match="no data"):
        begin()
    assert directory.path.exists() is not is_removed


@pytest.mark.parametrize("lost", ["empty", "missing", "zeros"])
def test_an_empty_config_neither_stops_nor_hides_the_run(tmp_path, lost):
    """A power cut may leave an empty file, or one of zeros. The next start writes it again."""
    path = begun(tmp_path)
    names = ("config.yaml", "run.json")
    before = {name: (path / name).read_text() for name in names}
    for name in names:
        (path / name).unlink()
        if lost != "missing":
            (path / name).write_bytes(b"\0" * 40 if lost == "zeros" else b"")
    with pytest.raises(UsageError, match=r"run with model\.hidden=\[16, 6\], not"):
        continued(tmp_path, "model.hidden=[16,7]")
    assert continued(tmp_path)[0] == "finished"
    assert {name: (path / name).read_text() for name in names} == before


def test_a_run_continues_where_its_small_files_cannot_be_written(tmp_path, monkeypatch):
    """As under a quota: the files of the first start are there."""
    begun(tmp_path)

    def refuse(*_):
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    monkeypatch.setattr("pathlib.Path.write_bytes", refuse)
    assert continued(tmp_path, "trainer.predictions=0")[0] == "finished"


def test_a_start_that_differs_says_so(tmp_path, capsys):
    path = begun(tmp_path)
    lines = (path / "events.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    first["environment"]["versions"]["torch"] = "1.\x1b0"
    (path / "events.jsonl").write_text("\n".join([json.dumps(first), *lines[1:], ""]))
    assert continued(tmp_path)[0] == "finished"
    said = capsys.readouterr().out
    assert "this start differs from the one before: versions.torch 1.\\x1b0 -> " in said
    assert of_kind(path, Resumed)[0].environment["versions"]["torch"] in said


# ---- the lock ----


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UsageError, match=r"cannot be locked \(No locks available\). Set runs_dir"):
        train(tmp_path, *STEPS)


def test_a_file_system_that_cannot_sync_folders_ends_no_run():
    """Folders in /proc cannot be synced, as those of some network file systems."""
    folder = os.open("/proc/self", os.O_RDONLY)
    with pytest.raises(OSError, match="Invalid argument"):
        os.fsync(folder)
    os.close(folder)
    sync_folder(Path("/proc/self"))


def test_a_fork_does_not_keep_the_lock_of_a_killed_run(tmp_path):
    """Loader workers are forks, and live some seconds longer than a process that is killed."""
    config = config_of(tmp_path, *STEPS)
    reader, writer = os.pipe()
    holder = os.fork()
    if holder == 0:
        with RunDirectory(config).open(config, {}):
            worker = os.fork()
            if worker == 0:
                time.sleep(60)
                os._exit(0)
            time.sleep(0.2)  # the fork closes its descriptor
            os.write(writer, str(worker).encode())
            time.sleep(60)
    worker = int(os.read(reader, 20))
    try:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        with RunDirectory(config).open(config, {}):
            os.kill(worker, 0)  # it still lives
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_dying_run_is_waited_for_with_a_line(tmp_path, capsys):
    config = config_of(tmp_path, *STEPS)
    reader, writer = os.pipe()
    holder = os.fork()
    if holder == 0:
        with RunDirectory(config).open(config, {}):
            os.write(writer, b"1")
            time.sleep(0.5)
        os._exit(0)
    os.read(reader, 1)
    with RunDirectory(config).open(config, {}):
        pass
    os.waitpid(holder, 0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"{tmp_path}/r: another process still runs it; waits up to 10 s"


# ---- a record behind its checkpoint ----


def cut(events):
    content = events.read_bytes()
    events.write_bytes(content[: content.index(b"\n") + 40])


def delete(events):
    events.unlink()


def change(events):
    events.write_bytes(events.read_bytes().replace(b'"step": 3', b'"step": 4'))


def empty(events):
    events.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, delete, change, empty])
def test_a_record_behind_the_checkpoint_is_marked(tmp_path, capsys, damage):
    path = begun(tmp_path)
    damage(path / "events.jsonl")
    assert continued(tmp_path)[0] == "finished"
    reason = "its first [0-9,]+ bytes were changed" if damage is change else "it has [0-9,]+ bytes"
    assert re.search(rf"events before step 5 are missing \({reason}", capsys.readouterr().out)
    found = kinds(path)
    assert found[0] == "RunStarted"
    assert found.count("RecordGap") == found.count("RunStarted") == 1
    assert end(path).step == 10
    assert steps_of(path, Checkpointed) == [5, 10]
    assert cli_code(["compare", str(path)]) == 0
    assert "has a gap before step 5" in capsys.readouterr().out


def test_a_finished_run_without_its_record_gets_one_with_a_gap(tmp_path):
    _, path = continued(tmp_path)
    (path / "events.jsonl").unlink()
    assert continued(tmp_path)[0] == "finished"
    assert {"RunStarted", "RecordGap", "Resumed", "RunEnded"} < set(kinds(path))


def test_a_finished_run_says_that_events_are_missing(tmp_path, capsys):
    _, path = continued(tmp_path)
    lines = (path / "events.jsonl").read_bytes().splitlines(keepends=True)
    assert continued(tmp_path)[0] == "finished"
    assert "are missing" not in capsys.readouterr().out
    (path / "events.jsonl").write_bytes(b"".join(lines[:3] + lines[5:]))
    said = "events before step 10 are missing ("
    assert run_directory.stop_if_complete(config_of(tmp_path, *STEPS, "trainer.max_steps=10"))
    assert said in capsys.readouterr().out
    assert continued(tmp_path)[0] == "finished"
    assert said in capsys.readouterr().out
    assert cli_code(["compare", str(path)]) == 0
    assert said in capsys.readouterr().out


def test_a_whole_record_has_no_gap(tmp_path, capsys):
    path = begun(tmp_path)
    assert continued(tmp_path)[0] == "finished"
    assert "RecordGap" not in kinds(path)
    assert "missing" not in capsys.readouterr().out


def test_a_record_that_is_removed_during_the_run_ends_the_run(tmp_path):
    remove = lambda trainer: (trainer.directory / "events.jsonl").unlink()  # noqa: E731
    with before_step(7, remove):
        assert continued(tmp_path)[0] == "failed"
    assert continued(tmp_path)[0] == "finished"
    assert "RecordGap" in kinds(tmp_path / "r")


def test_a_kill_after_a_checkpoint_does_not_lose_its_event(tmp_path):
    path = begun(tmp_path)
    lines = (path / "events.jsonl").read_text().splitlines(keepends=True)
    (path / "events.jsonl").write_text("".join(x for x in lines if '"Checkpointed"' not in x))
    assert continued(tmp_path)[0] == "finished"
    assert steps_of(path, Checkpointed) == [5, 10]


def test_a_checkpoint_without_a_position_continues_with_a_line(tmp_path, capsys):
    path = begun(tmp_path)
    rewrite(path, lambda state: state.pop("record"))
    assert continued(tmp_path)[0] == "finished"
    said = [
        x
        for x in capsys.readouterr().out.splitlines()
        if "does not say how long its record was" in x
    ]
    assert len(said) == 1
    assert "RecordGap" not in kinds(path)


def rewrite(path, edit):
    """Change the state in the newest checkpoint, with a manifest that fits."""
    saved, _ = checkpoint.find(path)
    state = saved.shards[0]
    edit(state)
    torch.save(state, saved.path / "rank0.pt")
    digest = hashlib.sha256((saved.path / "rank0.pt").read_bytes()).hexdigest()
    manifest = json.loads((saved.path / "manifest.json").read_text())
    manifest["sha256"] = {"rank0.pt": digest}
    (saved.path / "manifest.json").write_text(json.dumps(manifest))


# ---- hostile files ----


def cli_code(words):
    with pytest.raises(SystemExit) as caught:
        cli.bench(words)
    return caught.value.code


def fifo(path, _):
    os.mkfifo(path)


def link(path, outside):
    path.symlink_to(outside)


def device(path, _):
    path.symlink_to("/dev/zero")


def huge(path, _):
    with path.open("wb") as file:
        file.truncate(100 << 30)


HOSTILE = [fifo, link, device, huge]
READERS = [
    ["compare", "RUN"],
    ["compare", "RUN", "--markdown"],
    ["wandb", "upload", "RUN", "--offline"],
]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return begun(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def copied(tmp_path, original):
    """Return a copy of the run and a file outside, which nobody may touch."""
    shutil.copytree(original, tmp_path / "runs" / "r")
    outside = tmp_path / "outside"
    outside.write_text("mine\n")
    yield tmp_path / "runs" / "r", outside
    assert outside.read_text() == "mine\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["outside", "runs"]


@pytest.mark.parametrize("make", HOSTILE)
def test_a_hostile_event_file_is_one_line(copied, make, capsys):
    path, outside = copied
    (path / "events.jsonl").unlink()
    make(path / "events.jsonl", outside)
    config = config_of(path.parent, *STEPS)
    with pytest.raises(UsageError, match=r"events\.jsonl: (is|has) "):
        run.train(config, ALONE)
    capsys.readouterr()
    for words in READERS:
        code = cli_code([str(path) if word == "RUN" else word for word in words])
        said = capsys.readouterr()
        lines = (said.err + said.out).splitlines()
        assert code in (1, 2), (words, lines)
        assert "events.jsonl: " in lines[0], (words, lines)
        assert "Traceback" not in said.err


@pytest.mark.parametrize("make", HOSTILE)
def test_commands_that_need_other_files_survive_a_hostile_event_file(copied, make, capsys):
    """A command names the file, or does its work without the file."""
    path, outside = copied
    (path / "events.jsonl").unlink()
    make(path / "events.jsonl", outside)
    kept = sorted(p.name for p in (path / "checkpoints").iterdir())
    runs = str(path.parent)
    for words, code, line in (
        (["export", str(path)], 0, "model.safetensors: 8 tensors"),
        (["runs", "list", "--runs-dir", runs], 0, "unreadable"),
        (["runs", "prune", "--runs-dir", runs], 0, ""),
        (["dashboard", "dry-run", str(path), "--out", "-"], 2, "events.jsonl: "),
    ):
        assert cli_code(words) == code, words
        said = capsys.readouterr()
        assert line in said.err + said.out, (words, said)
        assert "Traceback" not in said.err
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == kept
    # Only the checkpoint of the other run is read.
    options = ("run_id=other", "kfac=none", "trainer.max_steps=7", f"resume={path}")
    assert train(path.parent, *options)[0] == "finished"


@pytest.mark.parametrize(
    "name", [".lock", "config.yaml", "run.json", "state.partial", "checkpoints"]
)
@pytest.mark.parametrize("make", [fifo, link])
def test_other_hostile_files_stop_the_start_with_one_line(copied, name, make):
    path, outside = copied
    file = path / name
    if file.is_dir():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    make(file, outside)
    with pytest.raises(UsageError, match="never used in a run directory"):
        continued(path.parent)


@pytest.mark.parametrize("make", [fifo, link])
def test_an_export_writes_through_no_link(copied, make):
    path, outside = copied
    make(path / "model.safetensors", outside)
    assert cli_code(["export", str(path)]) == 0
    assert not (path / "model.safetensors").is_symlink()
    assert (path / "model.safetensors").stat().st_size > 1000


def test_a_linked_folder_of_wandb_is_not_written_to(copied, tmp_path, capsys):
    path, _ = copied
    elsewhere = tmp_path / "runs" / "elsewhere"
    elsewhere.mkdir()
    (path / "wandb").symlink_to(elsewhere)
    assert cli_code(["wandb", "upload", str(path), "--offline"]) == 1
    assert f"{path / 'wandb'}: is a link" in capsys.readouterr().out
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["checkpoints", "step", "manifest.json", "rank0.pt"])
def test_linked_checkpoints_are_not_read(copied, name, tmp_path, capsys):
    """Every reader of checkpoints refuses a link, wherever it leads."""
    path, _ = copied
    saved = checkpoint.find(path)[0].path
    file = {"checkpoints": saved.parent, "step": saved}.get(name, saved / name)
    target = path.parent / "elsewhere"
    file.rename(target)
    file.symlink_to(target)
    assert cli_code(["export", str(path)]) == 2
    assert f"{file}: is a link" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"is a link|no good checkpoint"):
        train(path.parent, "run_id=other", "kfac=none", f"resume={path}")


def test_a_run_in_a_folder_whose_name_is_not_utf_8(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    options = ("kfac=none", "run_id=r", "trainer.max_steps=1", "trainer.predictions=0")
    config = replace(config_of(tmp_path, *options), runs_dir=str(folder))
    assert run.train(config, ALONE) == ("finished", 0)
    state = (folder / "r" / "state").read_bytes()
    assert state == b"finished 1 " + os.fsencode(folder / "r") + b"\n"


def test_a_record_that_is_removed_in_a_folder_whose_name_is_not_utf_8(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    config = replace(config_of(tmp_path, "kfac=none", "run_id=r"), runs_dir=str(folder))
    with before_step(2, lambda trainer: (folder / "r" / "events.jsonl").unlink()):
        assert run.train(config, ALONE) == ("failed", 0)


def test_a_record_that_is_too_long_ends_the_run_and_another_one_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "MOST_BYTES", event_log.BLOCK_BYTES + 20_000)
    often = ("kfac=none", "trainer.max_steps=300", "trainer.log_freq=1", "trainer.eval_freq=50")
    status, path = train(tmp_path, *often, "run_id=r")
    assert (status, end(path).status) == ("failed", "failed")
    assert f"another run_id, resume={path} and a larger trainer.log_freq" in end(path).message
    saved = steps_of(path, Checkpointed)[-1]
    assert 0 < saved < 300
    more = ("kfac=none", "trainer.max_steps=300", "trainer.log_freq=100", "trainer.eval_freq=50")
    status, path = train(tmp_path, *more, "run_id=other", f"resume={path}")
    assert (status, end(path).step) == ("finished", 300)
    assert of_kind(path, Resumed)[0].step == saved
