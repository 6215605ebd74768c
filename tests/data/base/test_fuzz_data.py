"""Damaged files of image and text datasets: one clear error, or examples left out and counted."""

import io
import tarfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kfac_bench.data.base.files import Unreadable
from kfac_bench.data.images import cifar, reading, tar_shards
from kfac_bench.data.language import text_shards
from kfac_bench.training.predictions import read as read_picture
from tests.support.fuzzing import damaged, fuzz, refused_or

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (20, 30, 3), np.uint8)
TWO = RANDOM.integers(0, 256, (2, cifar.PIXELS), np.uint8)


def encoded(kind):
    out = io.BytesIO()
    Image.fromarray(PIXELS).save(out, kind)
    return out.getvalue()


IMAGES = {kind: encoded(kind) for kind in ("JPEG", "PNG", "TIFF", "GIF", "BMP", "WEBP")}


class OneImage:
    """A `Source` of one image."""

    labels = (0,)

    def __init__(self, content):
        self.content = content

    def name(self, index):
        return "the image"

    def read(self, index):
        return self.content


@pytest.mark.parametrize("kind", sorted(IMAGES))
def test_intact_images_are_read(kind):
    assert reading.load(OneImage(IMAGES[kind]), 0, 8).shape == (3, 8, 8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@fuzz(150)
@given(data=st.data())
def test_damaged_images_are_read_or_reported_as_unreadable(data):
    content = data.draw(damaged(IMAGES[data.draw(st.sampled_from(sorted(IMAGES)))]))
    found = reading.load(OneImage(content), 0, 8)
    if isinstance(found, Unreadable):
        assert found.reason.strip()
        assert "\n" not in found.reason
    else:
        assert found.shape == (3, 8, 8)


@pytest.mark.filterwarnings("ignore")
@fuzz(40)
@given(content=damaged(IMAGES["PNG"]))
def test_damaged_prediction_images_are_left_out(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("run")
    (folder / "predictions" / "step-1").mkdir(parents=True)
    (folder / "predictions" / "step-1" / "00.png").write_bytes(content)
    assert read_picture(folder, "predictions/step-1/00.png") in (None, content)


@pytest.mark.slow
@fuzz(100)
@given(data=st.data())
def test_a_damaged_cifar10_file_is_read_or_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cifar")
    good = b"".join(bytes([i]) + TWO[i].tobytes() for i in range(2))
    for name in cifar.CIFAR10.folders["cifar-10-batches-bin"]:
        (folder / name).write_bytes(good)
    (folder / "data_batch_3.bin").write_bytes(data.draw(damaged(good)))
    refused_or(lambda: cifar.load(folder))


@fuzz(60)
@given(data=st.data())
def test_a_damaged_shard_index_is_rebuilt(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch, tarfile.open(folder / "train-0.tar", "w") as tar:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for name, content in (("a.jpg", IMAGES["JPEG"]), ("a.cls", b"3")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        tar.close()
        good = tar_shards.index_of(folder / "train-0.tar")
        (cached,) = (folder / "cache").rglob("*.npz")
        cached.write_bytes(data.draw(damaged(cached.read_bytes())))
        again = tar_shards.index_of(folder / "train-0.tar")
        assert (again.keys, again.labels.tolist()) == (good.keys, [3])
        assert (again.offsets.tolist(), again.sizes.tolist()) == (
            good.offsets.tolist(),
            good.sizes.tolist(),
        )


@fuzz(60)
@given(data=st.data())
def test_damaged_text_shards_are_refused_and_listed(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("text")
    shard = text_shards.TextShard("text-8-train-00000.npy", 4, "")
    manifest = text_shards.Manifest(8, 30, "", {"train": (shard,), "eval": (shard,)}, {})
    rows = np.zeros((4, 11), np.uint16)
    rows[:, :3] = (0, 3, 6)
    out = io.BytesIO()
    np.save(out, rows)
    (folder / shard.file).write_bytes(data.draw(damaged(out.getvalue())))
    found = refused_or(lambda: text_shards.open_shard(folder, manifest, shard))
    if found is not None:
        assert found.shape == (4, 11)
        assert [text_shards.well_formed(row, manifest) for row in found]
    assert text_shards.faults(folder, manifest)
