"""The fingerprint of every dataset notices a change, and not where the dataset lies."""

import shutil
import tracemalloc

import numpy as np
import pytest
import torch

from kfac_bench.config.groups import TABLES
from kfac_bench.data.base import dataset
from kfac_bench.data.base.dataset import (
    MOST_SIZES,
    difference,
    fingerprint,
    of_files,
    of_tensors,
)
from kfac_bench.data.base.in_memory import InMemory
from kfac_bench.data.demo import demo_folder
from kfac_bench.data.images import imagefolder
from kfac_bench.data.language import squad
from tests.support.configs import quick_load
from tests.support.language import make_squad, make_text
from tests.support.quick import slow
from tests.support.runs import write_pictures

TASKS = {
    "coco": ("task=detection", "model=maskrcnn_tiny"),
    "lgg": ("task=segmentation", "model=unet"),
    "pictures": ("task=denoising", "model=unet"),
    "pydoc": ("task=language_model", "model=lstm"),
    "squad": (
        "task=question_answering",
        "model=bert_tiny",
        "data.sequence_length=32",
        "data.stride=12",
        "data.question_length=8",
    ),
    "text": (
        "task=pretraining",
        "model=bert_tiny",
        "data.sequence_length=32",
        "data.masked=0.3",
        "data.max_predictions=12",
    ),
}
SMALL = {"squad": make_squad, "text": make_text}
"""Smaller than the demos."""
BUILT_IN = ("digits", "patches", "pictures", "pydoc")


def open_data(name, root=None, *options):
    where = () if root is None else (f"data.root={root}",)
    config = quick_load([f"data={name}", *TASKS.get(name, ()), *where, *options])
    return config.data.build(config.task.name)


def make(name, root):
    return SMALL[name](root) if name in SMALL else demo_folder.make(name, root)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_dataset_has_the_same_fingerprint_each_time(name):
    first = fingerprint(open_data(name))
    assert first == fingerprint(open_data(name))
    assert first["train"]["sha256"] != first["eval"]["sha256"]


def change(root, name):
    """Change one training example, and keep the number of examples."""
    if name == "coco":
        (file,) = root.glob("annotations/instances_train*.json")
        text = file.read_text()
        file.write_text(text.replace('"area": ', '"area": 1', 1))
    elif name == "squad":
        file = root / squad.FILES["train"]
        text = file.read_text()
        at = text.index('"question": "') + len('"question": "')
        file.write_text(text[:at] + "why " + text[at:])
    elif name == "lgg":
        _append(next(iter(sorted(root.glob("**/*_mask.tif")))))
    elif name == "cifar10":
        (file,) = (p for p in root.rglob("data_batch_1*") if p.is_file())
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        raise AssertionError(name)


def _append(path):
    with path.open("ab") as file:
        file.write(b"\0")


def test_folders_notice_a_missing_and_another_image(tmp_path):
    data = write_pictures(tmp_path / "data", "{}.png", train=4, val=4)
    before = fingerprint(imagefolder.load(data))
    moved = shutil.copytree(data, tmp_path / "moved")
    assert fingerprint(imagefolder.load(moved)) == before
    _append(moved / "train/class1/1.png")
    said = difference(before, fingerprint(imagefolder.load(moved)))
    assert said == "train has 4 examples as before, but names, sizes or labels changed"
    (moved / "train/class1/1.png").unlink()
    (moved / "val/class0/0.png").rename(moved / "val/class1/0.png")
    said = difference(before, fingerprint(imagefolder.load(moved)))
    assert said == (
        "train has 3 examples, before 4; "
        "eval has 4 examples as before, but names, sizes or labels changed"
    )


def test_sizes_of_many_files_are_sampled(monkeypatch, tmp_path):
    paths = [tmp_path / f"{i}" for i in range(10)]
    for path in paths:
        path.write_bytes(b"12")
    assert list(of_files(paths, tmp_path)) == [f"{i}\0002\n".encode() for i in range(10)]
    monkeypatch.setattr("kfac_bench.data.base.dataset.MOST_SIZES", 4)
    sized = [line.endswith(b"2\n") for line in of_files(paths, tmp_path)]
    assert sized == [i % 3 == 0 for i in range(10)]
    paths[0].unlink()
    assert next(of_files(paths, tmp_path)) == b"0\0-1\n"
    assert MOST_SIZES == 100_000


def test_tensors_compare_integers_and_shapes():
    def of(train):
        data = InMemory("x", train, train, shape=(1,), num_classes=2)
        return fingerprint(data)["train"]["sha256"]

    x, y = torch.rand(4, 3), torch.arange(4)
    assert of((x, y)) == of((x + 1e-7, y))
    assert of((x, y)) != of((x[:, :2], y))
    assert of((x, y)) != of((x, y.flip(0)))


def test_differences_of_foreign_content_are_words():
    good = {"train": {"examples": 3, "sha256": "a"}, "eval": {"examples": 2, "sha256": "b"}}
    assert difference(good, good) is None
    assert difference({}, good) == (
        "only one of the two has a split train; only one of the two has a split eval"
    )
    assert difference(good | {"train": 3}, good) == "only one of the two has a split train"


@pytest.mark.parametrize(
    "name", [n if n == "cifar10" else slow(n) for n in ("coco", "lgg", "squad", "cifar10")]
)
def test_a_changed_file_changes_the_fingerprint(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make(name, tmp_path / "a")
    before = fingerprint(open_data(name, tmp_path / "a"))
    moved = shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert fingerprint(open_data(name, moved)) == before
    change(moved, name)
    said = difference(before, fingerprint(open_data(name, moved)))
    assert said is not None
    assert said.startswith("train has ")
    assert "eval" not in said or name == "lgg"


@pytest.mark.parametrize("name", [slow("shards"), slow("text"), "fashion_mnist"])
def test_other_packed_data_have_another_fingerprint(name, tmp_path, monkeypatch):
    """Shards are compared by their indices, text by its manifest, Fashion-MNIST by its pixels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make(name, tmp_path / "a")
    data = open_data(name, tmp_path / "a")
    before = fingerprint(data)
    assert fingerprint(open_data(name, shutil.move(tmp_path / "a", tmp_path / "b"))) == before
    assert before["train"]["sha256"] != before["eval"]["sha256"]
    if name == "shards":
        data._train._sizes[3] += 1
    elif name == "text":
        root, manifest, *rest = data._open
        from dataclasses import replace

        first, *others = manifest.splits["train"]
        shards = (replace(first, sha256="0" * 64), *others)
        splits = {**manifest.splits, "train": shards}
        data._open = (root, replace(manifest, splits=splits), *rest)
    else:
        data._train[0][5, 0, 3, 3] += 1
    after = fingerprint(data)
    assert after["train"] != before["train"]
    assert after["eval"] == before["eval"]


def test_every_dataset_has_contents():
    """A dataset without `fingerprint_parts` would be compared by its size alone."""
    tested = {*BUILT_IN, "imagefolder", "coco", "lgg", "squad", "cifar10"}
    elsewhere = {"shards", "text", "fashion_mnist", "problem", "parquet", "text_parquet"}
    same_readers = {"cifar100", "mnist"}
    assert tested | elsewhere | same_readers == set(TABLES["data"])


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(60).view(3, 4, 5).transpose(0, 2),
        torch.tensor([[True, False], [False, True]]),
        torch.tensor(7),
        torch.zeros(0, 3, dtype=torch.int32),
    ],
    ids=["transposed", "bool", "number", "empty"],
)
def test_integers_are_read_in_parts_with_the_same_hash(x, monkeypatch):
    monkeypatch.setattr(dataset, "MOST_COPIED", 7)
    _, *parts = of_tensors([x])
    assert b"".join(parts) == x.contiguous().numpy().tobytes()
    assert all(len(part) <= 7 for part in parts)


def test_a_mapped_file_is_not_copied_as_a_whole(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", np.zeros(1_000_000, np.int32))
    mapped = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="c"))
    monkeypatch.setattr(dataset, "MOST_COPIED", 100_000)
    tracemalloc.start()
    try:
        for part in of_tensors([mapped]):
            assert part
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
