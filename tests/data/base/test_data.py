"""The order of examples, data in memory, CIFAR-10 and folders of images."""

import hashlib
import pickle
import random
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional
from torchvision.datasets import CIFAR10, CIFAR100, ImageFolder

from kfac_bench.data.base.in_memory import LabelledImages
from kfac_bench.data.base.order import (
    Shard,
    epoch_order,
    eval_indices,
    mixed_seed,
    steps_per_epoch,
    train_indices,
)
from kfac_bench.data.folder_options import ImageFolderConfig
from kfac_bench.data.images import cifar, digits, imagefolder, tar_shards
from kfac_bench.data.images import reading as pictures
from kfac_bench.data.options import verify
from kfac_bench.errors import UsageError

ALONE = Shard()


def prepared(data, batches):
    """Return batches as the trainer passes them to a model."""
    return [data.prepare(batch) for batch in batches]


few = settings(max_examples=60, deadline=None)


def equal(left, right):
    """Return whether two sequences of batches are bit-identical. The first must not be empty."""
    left, right = list(left), list(right)
    assert left
    return len(left) == len(right) and all(
        torch.equal(a, b)
        for x, y in zip(left, right, strict=True)
        for a, b in zip(x, y, strict=True)
    )


# ---- the order of examples ----


@few
@given(
    world=st.integers(1, 5),
    local=st.integers(1, 6),
    extra=st.integers(0, 60),
    seed=st.integers(-3, 2**40),
    epoch=st.integers(0, 5),
)
def test_ranks_share_each_global_batch_in_consecutive_parts(world, local, extra, seed, epoch):
    batch, size = world * local, world * local + extra
    whole = list(train_indices(size, batch, seed, epoch, 0, ALONE))
    parts = [
        list(train_indices(size, batch, seed, epoch, 0, Shard(r, world))) for r in range(world)
    ]
    assert len(whole) == steps_per_epoch(size, batch) == size // batch
    for step, expected in enumerate(whole):
        assert [len(part[step]) for part in parts] == [local] * world
        assert torch.equal(torch.cat([part[step] for part in parts]), expected)
    seen = torch.cat(whole).tolist()
    assert seen == epoch_order(size, seed, epoch)[: len(seen)].tolist()
    assert sorted(epoch_order(size, seed, epoch).tolist()) == list(range(size))


@few
@given(world=st.integers(1, 5), batch=st.integers(5, 20), size=st.integers(1, 70))
def test_without_drop_last_every_example_is_seen_once(world, batch, size):
    parts = [
        list(train_indices(size, batch, 3, 1, 0, Shard(r, world), False)) for r in range(world)
    ]
    assert {len(part) for part in parts} == {steps_per_epoch(size, batch, False)}
    seen = []
    for step in zip(*parts, strict=True):
        counts = [len(indices) for indices in step]
        assert max(counts) - min(counts) <= 1
        seen += torch.cat(step).tolist()
    assert seen == epoch_order(size, 3, 1).tolist()


@few
@given(size=st.integers(8, 50), start=st.integers(0, 9), rank=st.integers(0, 1))
def test_start_skips_the_first_batches(size, start, rank):
    all_steps = list(train_indices(size, 8, 7, 1, 0, Shard(rank, 2)))
    rest = list(train_indices(size, 8, 7, 1, start, Shard(rank, 2)))
    assert [b.tolist() for b in rest] == [b.tolist() for b in all_steps[start:]]


@few
@given(size=st.integers(0, 70), batch=st.integers(1, 20), world=st.integers(1, 9))
def test_evaluation_sees_every_example_exactly_once(size, batch, world):
    per_rank = [list(eval_indices(size, batch, Shard(rank, world))) for rank in range(world)]
    seen = [i for batches in per_rank for indices in batches for i in indices.tolist()]
    assert sorted(seen) == list(range(size))
    sizes = [len(indices) for batches in per_rank for indices in batches]
    assert all(1 <= n <= -(-batch // world) for n in sizes)
    counts = [sum(map(len, batches)) for batches in per_rank]
    assert max(counts) - min(counts) <= 1
    assert [len(b) for b in per_rank] == [-(-n // -(-batch // world)) for n in counts]


def test_orders_of_neighbouring_seeds_and_epochs_are_unrelated():
    size = 400
    orders = torch.stack([epoch_order(size, s, e) for s in range(8) for e in range(8)]).double()
    correlation = torch.corrcoef(orders) - torch.eye(64)
    assert correlation.abs().max() < 0.25  # 5 standard deviations
    assert mixed_seed(0, 0) == 5104172916443561106  # the same in every process and version
    assert mixed_seed(1, 12) != mixed_seed(11, 2)


def test_impossible_batch_sizes_are_usage_errors():
    with pytest.raises(UsageError, match=r"64 .* 63"):
        train_indices(63, 64, 0, 0, 0, ALONE)
    with pytest.raises(UsageError, match=r"3 .* 4 ranks"):
        train_indices(100, 3, 0, 0, 0, Shard(1, 4))
    with pytest.raises(UsageError, match="at least 1"):
        train_indices(100, 0, 0, 0, 0, ALONE)
    with pytest.raises(UsageError, match="at least 1"):
        eval_indices(100, 0, ALONE)
    with pytest.raises(ValueError, match="rank 2"):
        Shard(2, 2)


# ---- data in memory ----


def numbered(augment=None, dtype=torch.float64, **kwargs):
    """40 training and 5 evaluation images whose pixels and label are their number."""
    labels = torch.arange(45)
    images = labels.to(dtype).view(-1, 1, 1, 1).expand(-1, 2, 3, 4)
    return LabelledImages(
        "numbered",
        (images[:40], labels[:40]),
        (images[40:], labels[40:]),
        45,
        augment=augment,
        **kwargs,
    )


@pytest.mark.parametrize(("dtype", "scale"), [(torch.uint8, 255), (torch.float64, 1)])
def test_images_are_scaled_and_normalised_and_keep_their_labels(dtype, scale):
    data = numbered(dtype=dtype, mean=[0.5, 2.0], std=[2.0, 0.25])
    assert data.shape == (2, 3, 4)
    assert (data.train_size, data.eval_size, data.num_classes) == (40, 5, 45)
    seen = []
    batches = [*data.train(8, 0, 0, 0, ALONE), *data.evaluate(3, ALONE)]
    for images, labels in prepared(data, batches):
        assert images.dtype == torch.float32
        assert images.shape[1:] == (2, 3, 4)
        assert labels.dtype == torch.int64
        expected = torch.stack([(labels / scale - 0.5) / 2, (labels / scale - 2) / 0.25], dim=1)
        torch.testing.assert_close(images[:, :, 1, 2], expected)
        seen += labels.tolist()
    assert sorted(seen) == list(range(45))


def noise(images, draws):
    return images + draws[:, 0].view(-1, 1, 1, 1)


def test_a_resumed_run_sees_bit_identical_augmented_batches():
    data, state = numbered(augment=noise), torch.get_rng_state()
    full = list(data.train(8, 3, 2, 0, Shard(1, 2)))
    torch.rand(3)
    assert equal(full[2:], numbered(augment=noise).train(8, 3, 2, 2, Shard(1, 2)))
    torch.set_rng_state(state)
    list(data.train(8, 3, 2, 0, ALONE))
    assert torch.equal(torch.get_rng_state(), state)
    assert equal(numbered().evaluate(5, ALONE), data.evaluate(5, ALONE))


def test_augmentation_is_a_function_of_seed_epoch_and_image_alone():
    draws = {}
    for seed, epoch in [(0, 0), (1, 0), (0, 1)]:
        for who, batch_size in [(ALONE, 8), (ALONE, 40), (Shard(0, 2), 8), (Shard(1, 2), 8)]:
            for images, labels in numbered(augment=noise).train(batch_size, seed, epoch, 0, who):
                for image, label in zip(images[:, 0, 0, 0].tolist(), labels.tolist(), strict=True):
                    assert draws.setdefault((seed, epoch, label), image) == image
    assert len(draws) == 120
    assert len({round(drawn - label, 9) for (_, _, label), drawn in draws.items()}) == 120


def test_digits_split_is_fixed_stratified_and_scaled():
    data = digits.load(normalize=False)
    assert (data.shape, data.train_size, data.eval_size) == ((1, 8, 8), 1347, 450)
    images, labels = next(data.evaluate(450, ALONE))
    assert labels[:12].tolist() == [2, 0, 4, 9, 4, 1, 2, 4, 6, 7, 9, 1]
    counts = labels.bincount(minlength=10)
    assert (counts.min(), counts.max()) == (43, 46)
    train, train_labels = next(data.train(1347, 0, 0, 0, ALONE))
    every = torch.cat([images, train])
    assert (every.min(), every.max()) == (0, 1)
    assert torch.equal(every * 16, (every * 16).round())
    assert torch.cat([labels, train_labels]).bincount().tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip


def test_digits_are_normalised_by_the_training_set_and_resized():
    data = digits.load()
    [(images, _)] = prepared(data, data.train(1347, 0, 0, 0, ALONE))
    assert abs(images.mean()) < 1e-5
    assert abs(images.std() - 1) < 1e-5
    small, _ = next(digits.load(normalize=False).evaluate(450, ALONE))
    large, _ = next(digits.load(16, normalize=False).evaluate(450, ALONE))
    assert large.shape == (450, 1, 16, 16)
    torch.testing.assert_close(
        large, functional.interpolate(small, scale_factor=2, mode="bilinear")
    )
    with pytest.raises(UsageError, match="image_size"):
        digits.load(0)


# ---- CIFAR-10 ----

COUNT = 4  # records per file; the published files have 10000


def cifar_content(file):
    generator = np.random.default_rng(file)
    pixels = generator.integers(0, 256, (COUNT, 3072), dtype=np.uint8)
    return pixels, generator.integers(0, 10, COUNT).tolist()


def binary_file(pixels, labels):
    return b"".join(
        bytes([label]) + row.tobytes() for row, label in zip(pixels, labels, strict=True)
    )


def python_file(pixels, labels):
    return pickle.dumps({"data": pixels, "labels": labels}, 2)


BINARY = ("cifar-10-batches-bin", "cifar-10-binary.tar.gz", binary_file)
PYTHON = ("cifar-10-batches-py", "cifar-10-python.tar.gz", python_file)


def write_cifar(root, layout):
    folder, _, encode = layout
    end = ".bin" if folder.endswith("bin") else ""
    names = [f"data_batch_{i}{end}" for i in range(1, 6)] + [f"test_batch{end}"]
    (root / folder).mkdir(parents=True)
    for file, name in enumerate(names):
        (root / folder / name).write_bytes(encode(*cifar_content(file)))
    return root


def pack(root, layout):
    """Replace the folder by its archive, and return the archive."""
    folder, archive, _ = layout
    with tarfile.open(root / archive, "w:gz") as tar:
        tar.add(root / folder, folder)
    shutil.rmtree(root / folder)
    return root / archive


def check_cifar(data):
    assert (data.shape, data.num_classes) == ((3, 32, 32), 10)
    assert (data.train_size, data.eval_size) == (5 * COUNT, COUNT)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (cifar.CIFAR10.mean, cifar.CIFAR10.std))
    [(images, labels)] = prepared(data, data.evaluate(COUNT, ALONE))
    pixels, expected = cifar_content(5)
    assert labels.tolist() == expected
    stored = torch.from_numpy(pixels).view(-1, 3, 32, 32)
    torch.testing.assert_close(images, (stored / 255 - mean) / std)
    [(images, labels)] = prepared(data, data.train(5 * COUNT, 0, 0, 0, ALONE))
    source = [cifar_content(file) for file in range(5)]
    order = epoch_order(5 * COUNT, 0, 0)
    stored = torch.from_numpy(np.concatenate([p for p, _ in source])).view(-1, 3, 32, 32)[order]
    torch.testing.assert_close(images, (stored / 255 - mean) / std)
    assert labels.tolist() == torch.tensor([v for _, y in source for v in y])[order].tolist()


def publish(monkeypatch, root, layout):
    """Declare the files of a folder to be the published ones, whose MD5 torchvision knows."""
    (root / layout[0] / "batches.meta").write_bytes(pickle.dumps({"label_names": ["x"] * 10}))

    def md5(name):
        path = root / layout[0] / name
        return hashlib.md5(path.read_bytes()).hexdigest() if path.is_file() else ""

    for part in ("train_list", "test_list"):
        files = [[name, md5(name)] for name, _ in getattr(CIFAR10, part)]
        monkeypatch.setattr(CIFAR10, part, files)
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": md5("batches.meta")})


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", [BINARY, PYTHON])
def test_cifar10_is_read_from_every_published_layout(tmp_path, monkeypatch, layout, packed):
    root = write_cifar(tmp_path, layout)
    publish(monkeypatch, root, layout)
    if packed:
        archive = pack(root, layout)
        md5 = hashlib.md5(archive.read_bytes()).hexdigest()
        monkeypatch.setitem(cifar.CIFAR10.archives, archive.name, md5)
    for place in (root, root / layout[1 if packed else 0]):
        check_cifar(cifar.load(place, augment=False))
        assert verify(place)[0].startswith(f"cifar10: {5 * COUNT} images")
    assert len(list(root.iterdir())) == 1  # nothing was extracted there


@pytest.mark.parametrize("kind", ["binary", "python"])
def test_cifar100_has_the_fine_labels_of_both_layouts(tmp_path, monkeypatch, kind):
    pixels, _ = cifar_content(0)
    fine, coarse = [99, 0, 7, 7], [19, 1, 2, 3]
    folder = tmp_path / f"cifar-100-{kind}"
    folder.mkdir()
    if kind == "binary":
        for name in ("train.bin", "test.bin"):
            rows = zip(coarse, fine, pixels, strict=True)
            content = b"".join(bytes([c, f]) + row.tobytes() for c, f, row in rows)
            (folder / name).write_bytes(content)
    else:
        content = pickle.dumps({"data": pixels, "fine_labels": fine, "coarse_labels": coarse}, 2)
        md5 = hashlib.md5(content).hexdigest()
        for part, name in (("train_list", "train"), ("test_list", "test")):
            (folder / name).write_bytes(content)
            monkeypatch.setattr(CIFAR100, part, [[name, md5]])
        meta = pickle.dumps({"fine_label_names": list(cifar.CIFAR100.classes)})
        (folder / "meta").write_bytes(meta)
        md5 = hashlib.md5(meta).hexdigest()
        monkeypatch.setattr(CIFAR100, "meta", CIFAR100.meta | {"md5": md5})
    for place in (tmp_path, folder):
        data = cifar.load(place, cifar.CIFAR100)
        [(images, labels)] = data.evaluate(COUNT, ALONE)
        assert (data.num_classes, labels.tolist()) == (100, fine)
        assert images.flatten(1).tolist() == pixels.tolist()
        assert data.looks.classes[99] == "worm"
        assert verify(place)[0].startswith("cifar100: 4 images")


@pytest.mark.parametrize("keep", [-1, 0])
@pytest.mark.parametrize("layout", [BINARY, PYTHON])
def test_a_truncated_cifar10_file_is_named(tmp_path, monkeypatch, layout, keep):
    root = write_cifar(tmp_path, layout)
    publish(monkeypatch, root, layout)
    path = next((root / layout[0]).glob("data_batch_3*"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UsageError, match=rf"{path.name} (in .* damaged|is not the published file)"):
        cifar.load(root)
    path.unlink()
    with pytest.raises(UsageError, match=f"(lacks the file {path.name}|{path.name} is missing)"):
        cifar.load(root)


@pytest.mark.parametrize("layout", [BINARY, PYTHON])
def test_another_cifar10_archive_is_refused_before_it_is_unpacked(tmp_path, monkeypatch, layout):
    archive = pack(write_cifar(tmp_path, layout), layout)
    monkeypatch.setattr(tarfile, "open", None)
    with pytest.raises(UsageError, match=f"{archive} is not the published archive"):
        cifar.load(tmp_path)


def test_cifar10_contents_are_checked(tmp_path):
    pixels, labels = cifar_content(0)
    with pytest.raises(ValueError, match="label"):
        cifar.decode_binary(binary_file(pixels, [10, *labels[1:]]), cifar.CIFAR10)
    with pytest.raises(UsageError, match=r"cifar-10-batches-bin/data_batch_1\.bin") as caught:
        cifar.load(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in str(caught.value)
    assert "\n" not in str(caught.value)


class Touch:
    """Creates a file when unpickled without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["data_batch_2", "test_batch", "batches.meta"])
def test_a_malicious_pickle_is_refused_and_executes_nothing(tmp_path, monkeypatch, name):
    canary = tmp_path / "executed"
    content = pickle.dumps({"data": Touch(canary)})
    pickle.loads(content)
    assert canary.exists()  # the attack works on the ordinary unpickler
    canary.unlink()
    publish(monkeypatch, write_cifar(tmp_path, PYTHON), PYTHON)
    (tmp_path / PYTHON[0] / name).write_bytes(content)
    with pytest.raises(UsageError, match=f"{name} is not the published file: its MD5 is wrong"):
        cifar.load(tmp_path)
    assert not canary.exists()


DRAWN = torch.rand(4000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_crop_and_flip_gives_every_crop_of_the_padded_image_and_its_mirror():
    images = torch.randint(1, 256, (4000, 3, 6, 8), dtype=torch.uint8)
    result = cifar.crop_and_flip(images, DRAWN)
    assert result.dtype == torch.uint8
    padded = functional.pad(images, (4, 4, 4, 4))
    crops = [padded[:, :, y : y + 6, x : x + 8] for y in range(9) for x in range(9)]
    found = torch.stack(
        [(c == result).flatten(1).all(1) for crop in crops for c in (crop, crop.flip(3))]
    )
    assert found.any(dim=0).all()  # each result is a crop of its own image
    assert found.any(dim=1).all()  # each of 81 crops and 81 mirrors occurs
    counts = found.sum(dim=1)
    assert counts.max() < 60  # about 25 expected: no crop is preferred


def test_cifar10_augmentation_is_on_by_default_and_for_training_only(tmp_path):
    data = cifar.load(write_cifar(tmp_path, BINARY))
    plain = cifar.load(tmp_path, augment=False)
    assert not equal(data.train(10, 0, 0, 0, ALONE), plain.train(10, 0, 0, 0, ALONE))
    assert equal(data.evaluate(10, ALONE), plain.evaluate(10, ALONE))


# ---- folders of images ----

COLOURS = {"cat": (200, 30, 90), "dog": (20, 160, 240)}


@pytest.fixture
def folders(tmp_path):
    generator = np.random.default_rng(0)
    for split, count in (("train", 7), ("val", 3)):
        for name, colour in COLOURS.items():
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = generator.integers(0, 256, (40, 30, 3), dtype=np.uint8)
                if split == "val":
                    pixels[:] = colour
                image = Image.fromarray(pixels)
                image.save(tmp_path / split / name / f"{i}.JPEG", quality=100, subsampling=0)
    return tmp_path


def test_image_folders_are_decoded_cropped_and_normalised(folders):
    data = imagefolder.load(folders, image_size=16, workers=0)
    assert (data.shape, data.num_classes) == ((3, 16, 16), 2)
    assert (data.train_size, data.eval_size) == (14, 6)
    images, labels = next(data.train(14, 0, 0, 0, ALONE))
    assert images.shape == (14, 3, 16, 16)
    assert labels.sum() == 7
    batches = prepared(data, data.evaluate(4, ALONE))
    images, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    assert (images.dtype, labels.tolist()) == (torch.float32, [0, 0, 0, 1, 1, 1])
    colours = torch.tensor(list(COLOURS.values()))[labels] / 255
    expected = (colours - torch.tensor(pictures.MEAN)) / torch.tensor(pictures.STD)
    assert (images - expected[:, :, None, None]).abs().max() < 0.05  # JPEG rounds by 1 or 2


def test_image_batches_do_not_depend_on_workers_start_or_sharding(folders):
    here = imagefolder.load(folders, image_size=16, workers=0)
    full = list(here.train(4, 5, 1, 0, ALONE))
    there = imagefolder.load(folders, image_size=16, workers=2)
    assert equal(full, there.train(4, 5, 1, 0, ALONE))
    assert equal(full[2:], here.train(4, 5, 1, 2, ALONE))
    parts = [list(here.train(4, 5, 1, 0, Shard(rank, 2))) for rank in range(2)]
    joined = [tuple(map(torch.cat, zip(*pair, strict=True))) for pair in zip(*parts, strict=True)]
    assert equal(full, joined)
    assert not equal(full, here.train(4, 6, 1, 0, ALONE))
    assert not equal(full, here.train(4, 5, 2, 0, ALONE))


def test_each_epoch_augments_the_same_image_differently(folders):
    data = imagefolder.load(folders, image_size=16, workers=0)
    versions = []
    for epoch in range(3):
        images, _ = next(data.train(14, 0, epoch, 0, ALONE))
        versions.append(images[epoch_order(14, 0, epoch) == 3])
    assert not torch.equal(versions[0], versions[1])
    assert not torch.equal(versions[1], versions[2])


def test_without_augmentation_training_images_are_those_of_an_evaluation(folders):
    shutil.copytree(folders / "train", folders / "val", dirs_exist_ok=True)
    config = ImageFolderConfig(name="imagefolder", root=str(folders), image_size=16, augment=False)
    data = config.build("classification")
    evaluated, _ = next(data.evaluate(14, ALONE))
    for epoch in range(2):
        trained, _ = next(data.train(14, 0, epoch, 0, ALONE))
        assert torch.equal(trained[epoch_order(14, 0, epoch).argsort()], evaluated)


def test_equal_images_of_one_epoch_are_augmented_differently(folders):
    original, *copies = sorted((folders / "train").glob("*/*"))
    for copy in copies:
        copy.write_bytes(original.read_bytes())
    images, _ = next(imagefolder.load(folders, 16, workers=0).train(14, 0, 0, 0, ALONE))
    assert len(images.flatten(1).unique(dim=0)) == 14


@pytest.mark.parametrize("workers", [0, 1])
def test_image_loading_leaves_global_random_state_alone(folders, workers):
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    before = states()
    data = imagefolder.load(folders, image_size=16, workers=workers)
    assert len([*data.train(7, 0, 0, 0, ALONE), *data.evaluate(6, ALONE)]) == 3
    assert states() == before


def test_skipped_images_are_not_read(folders):
    data = imagefolder.load(folders, image_size=16, workers=0)
    files = sorted((folders / "train").glob("*/*"))
    for i in epoch_order(14, 0, 0)[:8].tolist():
        files[i].unlink()
    assert len(list(data.train(4, 0, 0, 2, ALONE))) == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("content", ["half", "text"])
def test_a_corrupt_image_is_named(folders, workers, content):
    path = folders / "train" / "dog" / "1.JPEG"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content == "half" else b"no image")
    data = imagefolder.load(folders, image_size=16, workers=workers)
    with pytest.raises(UsageError, match=str(path)) as caught:
        list(data.train(2, 0, 0, 0, ALONE))
    assert "\n" not in str(caught.value)


def test_images_are_found_as_torchvision_finds_them_but_links_end(folders):
    inner = folders / "train" / "cat" / "more"
    inner.mkdir()
    shutil.copy(next((folders / "train" / "dog").iterdir()), inner / "0.PNG")
    (inner / "notes.txt").touch()
    expected = ImageFolder(str(folders / "train"))
    (inner / "up").symlink_to("..")
    (inner / "class").symlink_to(folders / "train" / "dog")
    (folders / "train" / "dog" / "cat").symlink_to(inner.parent)
    (folders / "train" / "dog" / "self").symlink_to(".")
    found = imagefolder.Folder(folders, "train")
    linked = [path for path in found.paths if "/more/class/" in path or "/dog/cat/" in path]
    rest = [i for i in zip(found.paths, found.labels, strict=True) if i[0] not in linked]
    assert (found.classes, rest) == (expected.classes, expected.samples)
    dogs, cats = (len(list((folders / "train" / name).glob("*.*"))) for name in ("dog", "cat"))
    assert len(linked) == dogs + cats + 1


def test_files_that_are_no_images_are_counted(folders, tmp_path_factory):
    cats = folders / "train" / "cat"
    image = Image.open(cats / "0.JPEG")
    image.save(cats / "7.gif")
    for name in ("8.HEIC", "9.heic", "labels.txt", "README", ".DS_Store"):
        (cats / name).touch()
    (folders / "val" / "stray.jpg").touch()
    data = imagefolder.load(folders, image_size=16)
    assert data.train_size == 15
    expected = [
        f"{folders}/train: 4 files left out, by ending: .heic (2), no ending (1), .txt (1)",
        f"{folders}/val: 1 file left out, by ending: .jpg (1)",
    ]
    assert data.notes == expected
    content, faults = verify(folders)
    assert content == "; ".join(["imagefolder: 15 images in train, 6 images in val", *expected])
    assert not faults
    lines = list(tar_shards.write(tmp_path_factory.mktemp("shards"), folders))
    assert lines[0] == expected[0]


def test_wrong_folders_are_named(folders):
    with pytest.raises(UsageError, match=r"nowhere/train.*<class>"):
        imagefolder.load(folders / "nowhere")
    with pytest.raises(UsageError, match="workers"):
        imagefolder.load(folders, workers=-1)
    (folders / "val" / "dog").rename(folders / "val" / "wolf")
    with pytest.raises(UsageError, match=r"dog only in .*train, wolf only in .*val"):
        imagefolder.load(folders)
    (folders / "val" / "bird").mkdir()
    with pytest.raises(UsageError, match=r"bird.*expected .*val/<class>") as caught:
        imagefolder.load(folders)
    assert "\n" not in str(caught.value)
