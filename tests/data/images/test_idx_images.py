"""Fashion-MNIST from idx files, and patches of pictures with labels."""

import gzip
import os
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kfac_bench.config import compose
from kfac_bench.data.base.order import Shard, epoch_order
from kfac_bench.data.image_options import FashionMNISTConfig, MNISTConfig, PatchesConfig
from kfac_bench.data.images import digits, idx_images, pictures
from kfac_bench.data.options import verify
from kfac_bench.errors import UsageError
from tests.cli.test_kfac_data import run
from tests.support.fuzzing import damaged, fuzz, refused_or
from tests.support.runs import train

COUNTS = {"train": 12, "t10k": 5}
IMAGES, LABELS = "-images-idx3-ubyte", "-labels-idx1-ubyte"


def content(split):
    """Return random images and labels of a split; the labels 0 and 9 are there."""
    generator = np.random.default_rng(COUNTS[split])
    images = generator.integers(0, 256, (COUNTS[split], 28, 28), np.uint8)
    return images, generator.permutation(np.arange(COUNTS[split], dtype=np.uint8) * 9 % 10)


def idx(array):
    """Return the bytes of an idx file, written by the format's description and not by the code."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">i", n) for n in array.shape)
    return header + array.tobytes()


def write_files(root, packed=True):
    """Write the four files of the published layout."""
    root.mkdir(exist_ok=True)
    for split in COUNTS:
        for end, array in zip((IMAGES, LABELS), content(split), strict=True):
            whole = idx(array)
            name = f"{split}{end}"
            if packed:
                (root / f"{name}.gz").write_bytes(gzip.compress(whole))
            else:
                (root / name).write_bytes(whole)
    return root


def batch_of(data, split):
    """Return the prepared images and labels of a whole split, and the stored ones."""
    raw = data.train(data.train_size, 0, 0, 0, Shard())
    [batch] = raw if split == "train" else data.evaluate(data.eval_size, Shard())
    images, labels = content(split)
    order = epoch_order(len(labels), 0, 0) if split == "train" else torch.arange(len(labels))
    stored = torch.from_numpy(images)[order].unsqueeze(1) / 255
    return *data.prepare(batch), stored, torch.from_numpy(labels)[order].long()


@pytest.mark.parametrize("packed", [True, False])
def test_images_and_labels_are_read_from_plain_and_packed_files(tmp_path, packed):
    data = idx_images.load(write_files(tmp_path, packed))
    assert (data.shape, data.num_classes) == ((1, 28, 28), 10)
    assert (data.train_size, data.eval_size) == (12, 5)
    for split in COUNTS:
        images, labels, stored, expected = batch_of(data, split)
        torch.testing.assert_close(images, (stored - 0.2860) / 0.3530)
        assert torch.equal(labels, expected)
        assert labels.dtype == torch.int64


def test_mnist_is_read_from_the_folder_that_torchvision_makes(tmp_path):
    root = write_files(tmp_path, packed=False)
    (tmp_path / "MNIST").mkdir()
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir()
    for path in [path for path in root.iterdir() if path.is_file()]:
        path.rename(raw / path.name)
    data = MNISTConfig("mnist", str(root)).build("classification")
    images, labels, stored, expected = batch_of(data, "t10k")
    torch.testing.assert_close(images, (stored - 0.1307) / 0.3081)
    assert torch.equal(labels, expected)
    assert data.looks.classes[7] == "7"
    with pytest.raises(UsageError, match="data=mnist is read from disk"):
        MNISTConfig("mnist").build("classification")


def test_the_two_datasets_are_told_apart(tmp_path):
    labels = np.array([7, 2, 1, 0, 4, 1, 4, 9, 5, 9, 0], np.uint8)
    write_files(tmp_path, packed=False)
    (tmp_path / f"t10k{LABELS}").write_bytes(idx(labels))
    (tmp_path / f"t10k{IMAGES}").write_bytes(idx(np.zeros((11, 28, 28), np.uint8)))
    assert verify(tmp_path)[0].startswith("mnist: 12 images to train on")
    with pytest.raises(UsageError, match=r"has the files of MNIST, not of Fashion-MNIST\. Use"):
        idx_images.load(tmp_path)


def test_the_first_images_are_used_and_reconstruction_keeps_pixels(tmp_path):
    root = write_files(tmp_path)
    options = FashionMNISTConfig("fashion_mnist", str(root), train_images=7, eval_images=3)
    data = options.build("reconstruction")
    assert (data.train_size, data.eval_size) == (7, 3)
    [(images, labels)] = data.evaluate(3, Shard())
    stored, expected = content("t10k")
    assert labels.tolist() == expected[:3].tolist()
    torch.testing.assert_close(
        data.prepare((images, labels))[0], torch.from_numpy(stored[:3]).unsqueeze(1) / 255
    )
    classified = options.build("classification")
    assert classified.prepare((images, labels))[0].min() < 0
    wrong = r"^data.train_images=13: .* has only 12 such images. Set .* to 12 or less"
    with pytest.raises(UsageError, match=wrong):
        idx_images.load(root, train_images=13)
    wrong = r"^data.eval_images=6: .* has only 5 such images. Set .* to 5 or less"
    with pytest.raises(UsageError, match=wrong):
        idx_images.load(root, eval_images=6)


def train_file(root, array=None, header=None, cut=None, more=b""):
    """Replace the plain file of training images by a bad one."""
    whole = idx(content("train")[0] if array is None else array)
    whole = whole if header is None else struct.pack(">4I", *header) + whole[16:]
    (root / f"train{IMAGES}").write_bytes(whole[:cut] + more)


BAD = {
    "cut": (lambda r: train_file(r, cut=-1), "announces 9408 bytes of data, but it has only 9407"),
    "too long": (lambda r: train_file(r, more=b"x"), "announces 9408 bytes of data, .* has more"),
    "empty": (lambda r: train_file(r, cut=0), "its header has only 0 bytes"),
    "cut header": (lambda r: train_file(r, cut=15), "its header has only 15 bytes"),
    "magic": (
        lambda r: train_file(r, header=(0x801, 12, 28, 28)),
        "the magic number 0x801 .* allowed are 0x803",
    ),
    "sides": (
        lambda r: train_file(r, header=(0x803, 12, 27, 28)),
        r"items of the shape \[27, 28\]; allowed .* of the shape \[28, 28\]",
    ),
    "none": (
        lambda r: train_file(r, header=(0x803, 0, 28, 28)),
        "announces 0 items .* 1 to 60000",
    ),
    "too many": (
        lambda r: train_file(r, header=(0x803, 2**32 - 1, 28, 28)),
        "announces 4294967295 items .* 1 to 60000",
    ),
    "other count": (
        lambda r: train_file(r, content("train")[0][:11]),
        f"train{LABELS}.gz has 12 labels, but train{IMAGES} has 11 images",
    ),
    "label": (
        lambda r: (r / f"train{LABELS}").write_bytes(idx(np.full(12, 10, np.uint8))),
        "is damaged: it has the label 10, allowed are 0 to 9",
    ),
    "missing": (lambda r: (r / f"t10k{LABELS}.gz").unlink(), f"t10k{LABELS}.gz is missing"),
    "no gzip": (
        lambda r: (r / f"t10k{LABELS}.gz").write_bytes(b"text"),
        "is damaged: it is not a whole gzip file",
    ),
    "cut gzip": (
        lambda r: (r / f"t10k{IMAGES}.gz").write_bytes(gzip.compress(idx(content("t10k")[0]))[:-9]),
        "is damaged: it is not a whole gzip file",
    ),
    "checksum": (
        lambda r: (r / f"t10k{LABELS}.gz").write_bytes(
            gzip.compress(idx(content("t10k")[1]))[:-8] + bytes(4) + struct.pack("<I", 13)
        ),
        "is damaged: it is not a whole gzip file: CRC check failed",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_in_one_line(tmp_path, name):
    spoil, reason = BAD[name]
    spoil(write_files(tmp_path))
    with pytest.raises(UsageError, match=rf"^Fashion-MNIST: {tmp_path}/.*{reason}") as caught:
        idx_images.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert "dataset-fashion-mnist installs them" in str(caught.value)
    _, faults = idx_images.scan(tmp_path)
    assert len(faults) == 1


def test_a_command_says_how_to_get_the_data(tmp_path, monkeypatch):
    monkeypatch.setattr(idx_images, "DEBIAN", tmp_path / "none")
    with pytest.raises(UsageError, match="is missing") as caught:
        compose.load(["data=fashion_mnist"]).data.build("classification")
    said = str(caught.value)
    assert "Install Debian's package dataset-fashion-mnist, or set data.root" in said
    assert all(name in said for name in idx_images.NAMES)
    with pytest.raises(UsageError, match=r"data.image_size=32: must be 28 \(images are"):
        compose.load(["data=fashion_mnist", "data.image_size=32"])
    with pytest.raises(UsageError, match=r"data.image_size=64: must be 32 \(images"):
        compose.load(["data=cifar10", "data.image_size=64"])


def test_a_fifo_does_not_hang(tmp_path):
    (write_files(tmp_path) / f"train{IMAGES}.gz").unlink()
    os.mkfifo(tmp_path / f"train{IMAGES}")
    with pytest.raises(UsageError, match="is missing"):
        idx_images.load(tmp_path)


def test_a_gzip_bomb_fills_no_memory(tmp_path):
    write_files(tmp_path)
    bomb = idx(content("train")[0]) + bytes(100_000_000)
    (tmp_path / f"train{IMAGES}.gz").write_bytes(gzip.compress(bomb, 1))
    del bomb
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match="has more"):
            idx_images.load(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000


WHOLE = {end: idx(array) for end, array in zip((IMAGES, LABELS), content("train"), strict=True)}


@fuzz(30)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(tmp_path_factory, data):
    folder = write_files(tmp_path_factory.mktemp("idx"))
    end = data.draw(st.sampled_from(sorted(WHOLE)))
    packed = data.draw(st.booleans())
    whole = gzip.compress(WHOLE[end]) if packed else WHOLE[end]
    (folder / f"train{end}{'.gz' if packed else ''}").write_bytes(data.draw(damaged(whole)))
    found = refused_or(lambda: idx_images.load(folder))
    assert found is None or found.train_size == 12


def test_verify_reads_the_demo_which_contains_the_digits(capsys, tmp_path):
    root = tmp_path / "demo"
    assert run(capsys, "make-demo", "fashion_mnist", root)[0] == 0
    code, out, _ = run(capsys, "verify", root)
    assert (code, out) == (
        0,
        "fashion_mnist: 1347 images to train on, 450 to evaluate; no faults\n"
        f"next: kfac-train data=fashion_mnist data.root={root}\n",
    )
    [(images, labels)] = idx_images.load(root, normalize=False).evaluate(450, Shard())
    [(grey, expected)] = digits.load(28, normalize=False).evaluate(450, Shard())
    assert torch.equal(labels, expected)
    assert (images / 255 - grey).abs().max() < 0.51 / 255
    code, _, err = run(capsys, "make-demo", "fashion_mnist", root)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "already" in err
    (root / f"t10k{IMAGES}.gz").write_bytes(b"")
    (root / f"train{LABELS}.gz").unlink()
    code, out, _ = run(capsys, "verify", root)
    assert code == 1
    assert out.splitlines()[0].endswith(f"train{LABELS}.gz: is missing")
    assert out.splitlines()[2].endswith("0 images to train on, 0 to evaluate; 2 faults")


@pytest.mark.parametrize("task", ["classification", "reconstruction"])
def test_both_tasks_train_on_the_files(tmp_path, task):
    root = write_files(tmp_path / "data")
    model = "model=resnet8" if task == "classification" else "model=autoencoder"
    base = (model, "data=fashion_mnist", f"data.root={root}", "logger=none", "trainer.threads=1")
    short = ("trainer.batch_size=6", "trainer.max_steps=2", "optimizer.lr=0.01")
    assert train(tmp_path, *short, base=base)[0] == "finished"


@pytest.mark.slow
def test_the_files_of_debian():
    if not idx_images.DEBIAN.is_dir():
        pytest.skip("needs Debian's package dataset-fashion-mnist")
    data = FashionMNISTConfig("fashion_mnist").build("classification")
    assert (data.train_size, data.eval_size) == (60_000, 10_000)
    images, labels = data._train
    assert labels.bincount().tolist() == [6000] * 10
    assert data._evaluation[1].bincount().tolist() == [1000] * 10
    std, mean = torch.std_mean(images.double() / 255)
    assert mean.item() == pytest.approx(idx_images.FASHION_MNIST.mean, abs=5e-5)
    assert std.item() == pytest.approx(idx_images.FASHION_MNIST.std, abs=5e-5)
    # The images are what their labels say: trousers have two legs and an empty middle below.
    below = images[:, 0, 20:].double().mean(1)
    trousers = below[labels == idx_images.FASHION_MNIST.classes.index("trouser")].mean(0)
    dresses = below[labels == idx_images.FASHION_MNIST.classes.index("dress")].mean(0)
    assert trousers[13:15].mean() < 0.7 * trousers[9:12].mean()
    assert dresses[13:15].mean() > 0.9 * dresses[9:12].mean()


# ---- patches of pictures, with labels ----


def test_patches_are_labelled_by_their_picture():
    data = pictures.load_labelled(16)
    assert data.num_classes == PatchesConfig.num_classes == len(data.looks.classes) == 13
    images, labels = data._evaluation
    for label, name in enumerate(pictures.CLASSES):
        patches = pictures._patches(name, 16)
        assert torch.equal(images[labels == label], patches[::4])
        train = data._train[0][data._train[1] == label]
        assert len(train) == len(patches) - len(patches[::4])
        assert torch.equal(train[0], patches[1])
    prepared, _ = data.prepare((images, labels))
    torch.testing.assert_close(prepared, (images - 0.5) / 0.25)
    wrong = r"data.image_size=200: coins.png has less than two.* Set data.image_size to 191 or less"
    with pytest.raises(UsageError, match=wrong):
        pictures.load_labelled(200)
    assert pictures.load_labelled(191).train_size >= len(pictures.CLASSES)
