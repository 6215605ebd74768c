"""Fuzz tests of checkpoints and weights: code in a file never runs, and errors are one line."""

import hashlib
import io
import json
import pickle
import shutil
import zipfile
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from kfac_bench.data.images import cifar
from kfac_bench.errors import UsageError
from kfac_bench.models import maskrcnn
from kfac_bench.training import checkpoint, weights
from kfac_bench.training.resume import start_or_resume
from kfac_bench.training.run import build_trainer
from kfac_bench.training.run_directory import RunDirectory
from tests.support.configs import quick_load
from tests.support.fuzzing import as_json, damaged, fuzz, refused_or, spoilt
from tests.support.runs import ALONE, KFAC, config_of, train

STEPS = (*KFAC, "trainer.max_steps=5", "optimizer=adam", "optimizer.lr=0.001")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the checkpoint of step 5 of a run."""
    _, path = train(tmp_path_factory.mktemp("runs"), *STEPS, "run_id=r")
    (found,) = (path / "checkpoints").iterdir()
    return found


def signed(folder, content, **more):
    """Write a checkpoint whose manifest fits any content of its only shard."""
    folder.mkdir(parents=True)
    (folder / "rank0.pt").write_bytes(content)
    sha256 = {"rank0.pt": hashlib.sha256(content).hexdigest()}
    manifest = {"step": 5, "world_size": 1, "sha256": sha256, **more}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def read_everywhere(path):
    """Read a checkpoint with every reader but training."""
    refused_or(lambda: checkpoint.load(path))
    refused_or(lambda: checkpoint.find(path))
    refused_or(lambda: checkpoint.find(path.parent))
    refused_or(lambda: checkpoint.find_best(path.parent))
    refused_or(lambda: weights.export(path.parent, path.parent / "out.safetensors"))
    model = nn.Linear(2, 2)
    config = quick_load(["model=autoencoder", f"model.weights={path.parent}"]).model
    refused_or(lambda: weights.load(model, config))


class Evil:
    """An object that writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (eval, (f"open({str(self.path)!r}, 'w').close()",))


@pytest.fixture
def trap(tmp_path):
    """Return a path that must not exist at the end. Unpickling `Evil` would create the file."""
    path = tmp_path / "executed"
    pickle.loads(pickle.dumps(Evil(path)))
    assert path.exists(), "the trap does not work"
    path.unlink()
    yield path
    assert not path.exists(), "code of a file was executed"


def evil_contents(path):
    """Yield evil content in each format that torch reads, and in pickle's own formats."""
    for new in (True, False):
        out = io.BytesIO()
        torch.save({"model": Evil(path)}, out, _use_new_zipfile_serialization=new)
        yield out.getvalue()
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.dumps({"model": Evil(path), "data": Evil(path)}, protocol)
    out = io.BytesIO()
    torch.save({"model": {"0.weight": torch.zeros(2)}}, out)
    repacked = io.BytesIO()
    with zipfile.ZipFile(out) as old, zipfile.ZipFile(repacked, "w") as new_zip:
        for name in old.namelist():
            evil = name.endswith("data.pkl")
            new_zip.writestr(name, pickle.dumps(Evil(path)) if evil else old.read(name))
    yield repacked.getvalue()


def test_readers_of_checkpoints_run_no_code(tmp_path, trap):
    for number, content in enumerate(evil_contents(trap)):
        path = signed(tmp_path / str(number) / "checkpoints" / "step-00000005", content)
        read_everywhere(path)
        with pytest.raises(UsageError, match="not a checkpoint of ours"):
            checkpoint.load(path)


def test_readers_of_weights_run_no_code(tmp_path, trap):
    body = nn.Sequential(nn.Linear(2, 2))
    for number, content in enumerate(evil_contents(trap)):
        for ending in ("pt", "pth", "safetensors", "bin"):
            file = tmp_path / f"{number}.{ending}"
            file.write_bytes(content)
            with pytest.raises(UsageError):
                maskrcnn._load(body, file)
        (tmp_path / f"folder{number}").mkdir()
        shutil.copy(file, tmp_path / f"folder{number}" / weights.SAFETENSORS)
        config = quick_load(["model=autoencoder", f"model.weights={tmp_path}/folder{number}"]).model
        with pytest.raises(UsageError):
            weights.load(body, config)


def test_readers_of_data_run_no_code(tmp_path, trap):
    for content in evil_contents(trap):
        for name in cifar.CIFAR10.folders["cifar-10-batches-py"]:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match="is not the published file"):
            cifar.load(tmp_path)


@fuzz(30)
@given(data=st.data())
def test_a_malformed_manifest_is_refused_or_read(tmp_path_factory, saved, data):
    folder = tmp_path_factory.mktemp("r") / "checkpoints" / saved.name
    shutil.copytree(saved, folder)
    tree = json.loads((saved / "manifest.json").read_text())
    (folder / "manifest.json").write_text(as_json(data.draw(spoilt(tree))))
    read_everywhere(folder)


@fuzz(40)
@given(data=st.data())
def test_a_damaged_shard_with_a_fitting_manifest_is_refused_or_read(tmp_path_factory, saved, data):
    content = data.draw(damaged((saved / "rank0.pt").read_bytes()))
    read_everywhere(signed(tmp_path_factory.mktemp("r") / "checkpoints" / saved.name, content))


@fuzz(40)
@given(content=st.data())
def test_damaged_weights_are_refused_or_read(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("w")
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    save_file(model.state_dict(), folder / "good.safetensors")
    torch.save(model.state_dict(), folder / "good.pt")
    for ending in ("safetensors", "pt"):
        good = (folder / f"good.{ending}").read_bytes()
        (folder / f"model.{ending}").write_bytes(content.draw(damaged(good)))
        refused_or(lambda e=ending: maskrcnn._load(model, folder / f"model.{e}"))
    config = quick_load(["model=autoencoder", f"model.weights={folder}"]).model
    refused_or(lambda: weights.load(model, config))


def plain(tree):
    """Return the state as plain containers with tensors as leaves."""
    if isinstance(tree, dict):
        return {k: plain(v) for k, v in tree.items()}
    return [plain(v) for v in tree] if isinstance(tree, list | tuple) else tree


TENSORS = st.sampled_from(
    [
        torch.zeros(0),
        torch.zeros(()),
        torch.full((3, 2), torch.nan),
        torch.empty(0, 5),
        torch.zeros(2, dtype=torch.int8),
        torch.zeros(1, 1, 1, dtype=torch.complex64),
        torch.zeros(4, 4).to_sparse(),
    ]
)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Return the configuration of a run like the one of `saved`."""
    return config_of(tmp_path_factory.mktemp("runs"), *STEPS, "run_id=again")


@pytest.mark.slow
@fuzz(40)
@given(data=st.data())
def test_a_foreign_state_does_not_resume(tmp_path_factory, saved, template, data):
    """torch reads the shard and the manifest fits, but the state is not this run's."""
    folder = tmp_path_factory.mktemp("runs")
    state = torch.load(saved / "rank0.pt", weights_only=True)
    tree = data.draw(spoilt(plain(state)))
    if data.draw(st.booleans()) and isinstance(tree, dict):
        part = data.draw(st.sampled_from(sorted(map(str, tree))))
        tree[part] = data.draw(TENSORS)
    out = io.BytesIO()
    try:
        torch.save(tree, out)
    except (RecursionError, OverflowError):
        return
    signed(folder / "from" / "checkpoints" / saved.name, out.getvalue())
    config = replace(template, runs_dir=str(folder), resume=str(folder / "from"))
    directory = RunDirectory(config)
    trainer = build_trainer(config, ALONE, directory)
    refused_or(lambda: start_or_resume(config, trainer, directory, {}))


@pytest.mark.parametrize("part", ["scaler", "train_s", "rng", "optimizer", "model", "kfac"])
def test_a_tensor_instead_of_a_part_does_not_resume(tmp_path, saved, template, part):
    state = torch.load(saved / "rank0.pt", weights_only=True)
    out = io.BytesIO()
    torch.save(state | {part: torch.zeros(0)}, out)
    signed(tmp_path / "from" / "checkpoints" / saved.name, out.getvalue())
    config = replace(template, runs_dir=str(tmp_path), resume=str(tmp_path / "from"))
    directory = RunDirectory(config)
    trainer = build_trainer(config, ALONE, directory)
    with pytest.raises(UsageError, match="resume: "):
        start_or_resume(config, trainer, directory, {})
