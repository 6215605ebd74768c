"""Decoding and cropping of photographs, and what the trainer makes of the batches."""

import io
import math
import re
import struct
import time
import zlib

import numpy as np
import pytest
import tifffile
import torch
from PIL import ExifTags, Image, ImageOps
from torchvision.transforms import v2

from kfac_bench.data.base.in_memory import LabelledImages
from kfac_bench.data.images import cifar, imagefolder, reading
from kfac_bench.errors import UsageError
from kfac_bench.record.events import Trained
from kfac_bench.record.sinks.view import metrics_of
from tests.data.base.test_data import BINARY, write_cifar
from tests.support.denied import deny_listing
from tests.support.distributed import run_ranks
from tests.support.quick import slow
from tests.support.runs import RESNET, SMALL, end, here, of_kind, train, train_here, trainer_of


class Made:
    """A `Source` of one smooth image."""

    labels = (0,)

    def __init__(self, width, height, mode="RGB", kind="JPEG"):
        generator = np.random.default_rng(0)
        patches = Image.fromarray(generator.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        smooth = patches.resize((width, height), Image.Resampling.BICUBIC)
        content = io.BytesIO()
        smooth.convert(mode).save(content, kind, quality=95)
        self.content = content.getvalue()

    def name(self, index):
        return "made"

    def read(self, index):
        return self.content

    def pixels(self):
        return Image.open(io.BytesIO(self.content)).convert("RGB")


def difference(image, expected):
    return (image.float() - torch.from_numpy(np.array(expected)).permute(2, 0, 1)).abs()


@pytest.mark.parametrize("size", [(500, 375), (333, 500), (1600, 1203), (40, 30), (64, 1000)])
@pytest.mark.parametrize("side", [28, 224])
def test_crops_equal_those_of_torchvision(size, side):
    source = Made(*size)
    resize = v2.Compose([v2.Resize(round(side * 256 / 224)), v2.CenterCrop(side)])
    assert difference(reading.load(source, 0, side), resize(source.pixels())).mean() < 3
    draws = torch.rand(41, generator=torch.Generator().manual_seed(3)).tolist()
    for flip in (0.7, 0.3):
        box = reading.random_box(*size, draws[1:])
        expected = v2.functional.resize(source.pixels().crop(box), [side, side])
        expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip < 0.5 else expected
        image = reading.load(source, 0, side, [flip, *draws[1:]])
        assert image.shape == (3, side, side)
        assert image.is_contiguous()
        assert difference(image, expected).mean() < 3


def test_pillow_decodes_what_torchvision_cannot(monkeypatch):
    source = Made(300, 200)
    draws = torch.rand(41, generator=torch.Generator().manual_seed(3)).tolist()
    fast = [reading.load(source, 0, 64), reading.load(source, 0, 64, draws)]

    def refuse(*arguments, **options):
        raise RuntimeError("torchvision was built without libjpeg")

    monkeypatch.setattr(reading, "decode_jpeg", refuse)
    for one, other in zip(
        fast, [reading.load(source, 0, 64), reading.load(source, 0, 64, draws)], strict=True
    ):
        assert (one.int() - other.int()).abs().max() <= 2
    monkeypatch.setattr(reading, "decode", refuse)
    assert isinstance(reading.load(source, 0, 64), reading.Unreadable)


@pytest.mark.parametrize(("mode", "kind"), [("L", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "PNG")])
def test_other_kinds_of_images_become_rgb(mode, kind):
    source = Made(400, 300, mode, kind)
    expected = source.pixels().crop(reading.centre_box(400, 300)).resize((48, 48))
    assert difference(reading.load(source, 0, 48), expected).mean() < 8


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("factor", [1, 16, 257, 2**22], ids=["8", "12", "16", "30"])
def test_an_image_of_more_bits_keeps_its_greys(kind, factor):
    if factor > 257 and kind == "PNG":
        return  # which has at most 16 bits
    grey = np.arange(256, dtype=np.uint32 if factor > 257 else np.uint16).reshape(16, 16)
    wide = grey * grey.dtype.type(factor)
    content = io.BytesIO()
    Image.fromarray(wide.astype(np.int32) if factor > 257 else wide).save(content, kind)
    assert (reading.decode(content.getvalue()).numpy() == grey).all()


def colors_of_16_bits(kind, pixels):
    """Return a file of 16 bits per colour, which Pillow cannot write."""
    if kind == "TIFF":
        content = io.BytesIO()
        tifffile.imwrite(content, pixels, photometric="rgb")
        return content.getvalue()
    chunks = b"\x89PNG\r\n\x1a\n"
    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 16, 2, 0, 0, 0)
    rows = zlib.compress(b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels))
    for name, body in ((b"IHDR", head), (b"IDAT", rows), (b"IEND", b"")):
        chunks += struct.pack(">I", len(body)) + name + body
        chunks += struct.pack(">I", zlib.crc32(name + body))
    return chunks


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_colours_of_16_bits_are_read_or_refused(kind):
    colors = np.arange(255, -1, -1).repeat(3).reshape(16, 16, 3)
    full = reading.decode(colors_of_16_bits(kind, (colors * 257).astype(np.uint16)))
    assert (full.permute(1, 2, 0).numpy() == colors).all()
    part = colors_of_16_bits(kind, (colors * 16).astype(np.uint16))
    if kind == "PNG":
        assert (reading.decode(part).permute(1, 2, 0).numpy() == colors).all()
    else:
        with pytest.raises(ValueError, match=r"use at most 14 of them.*Convert the file to 8 bits"):
            reading.decode(part)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_exif_data_say(kind, orientation):
    image = Image.open(io.BytesIO(Made(60, 40, kind="PNG").content))
    exif = image.getexif()
    exif[ExifTags.Base.Orientation] = orientation
    content = io.BytesIO()
    image.save(content, kind, exif=exif, quality=100)
    expected = ImageOps.exif_transpose(Image.open(content)).convert("RGB")
    pixels = reading.decode(content.getvalue())
    assert pixels.shape == ((3, 60, 40) if orientation > 4 else (3, 40, 60))
    assert difference(pixels, expected).max() <= 2


def test_of_an_animation_the_first_frame_is_read():
    content = io.BytesIO()
    frames = [Image.new("RGB", (6, 4), color) for color in ("red", "blue")]
    frames[0].save(content, "GIF", save_all=True, append_images=frames[1:])
    assert reading.decode(content.getvalue())[:, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("pixel", [0.5, -1])
def test_an_image_of_fractions_is_unreadable(pixel):
    content = io.BytesIO()
    pixels = np.full((8, 8), pixel, np.float32 if pixel > 0 else np.int32)
    Image.fromarray(pixels).save(content, "TIFF")
    with pytest.raises(ValueError, match="not whole numbers from 0 on"):
        reading.decode(content.getvalue())


def test_random_crops_have_the_areas_and_ratios_of_the_paper():
    generator, shares, ratios = torch.Generator().manual_seed(0), [], []
    seen = np.zeros((80, 100))
    for _ in range(3000):
        draws = torch.rand(40, generator=generator).tolist()
        left, top, right, bottom = reading.random_box(100, 80, draws)
        assert 0 <= left < right <= 100
        assert 0 <= top < bottom <= 80
        seen[top:bottom, left:right] += 1
        shares.append((right - left) * (bottom - top) / (100 * 80))
        ratios.append((right - left) / (bottom - top))
    assert (seen > 0).mean() > 0.99
    assert 0.075 < min(shares) < 0.1
    assert 0.95 < max(shares) < 1.03
    assert 0.72 < min(ratios) < 0.78
    assert 1.28 < max(ratios) < 1.37
    torch.manual_seed(0)
    crop, image = v2.RandomResizedCrop(8), torch.empty(3, 80, 100)
    reference = [crop.make_params([image]) for _ in range(3000)]
    theirs = [p["height"] * p["width"] / (100 * 80) for p in reference]
    their_ratios = np.log([p["width"] / p["height"] for p in reference])
    assert np.log(ratios).mean() == pytest.approx(their_ratios.mean(), abs=0.02)
    assert np.log(ratios).std() == pytest.approx(their_ratios.std(), abs=0.02)
    assert np.mean(shares) == pytest.approx(np.mean(theirs), abs=0.02)
    assert np.std(shares) == pytest.approx(np.std(theirs), abs=0.02)


@pytest.mark.parametrize("size", [(1000, 3), (3, 1000), (1, 1)])
def test_if_no_random_crop_fits_the_central_one_is_taken(size):
    left, top, right, bottom = reading.random_box(*size, [0.99] * 40)
    assert min(right - left, bottom - top) >= 1
    assert left == pytest.approx((size[0] - (right - left)) / 2, abs=0.5)
    assert top == pytest.approx((size[1] - (bottom - top)) / 2, abs=0.5)
    if max(size) > 1:
        assert max(right - left, bottom - top) == 4


def test_a_truncated_image_is_read_or_reported_as_unreadable():
    source = Made(60, 40)
    whole, faults = source.content, 0
    for length in range(0, len(whole), 7):
        source.content = whole[:length]
        made = reading.load(source, 0, 16, [0.5] * 41)
        if isinstance(made, reading.Unreadable):
            faults += 1
            assert "\n" not in made.reason
            assert made.reason
        assert isinstance(reading.load(source, 0, 1), reading.Unreadable)
    assert faults > 0.9 * len(whole) / 7


# ---- what the trainer makes of it ----


def test_batches_are_uint8_on_the_device_and_float_in_the_model(tmp_path):
    options = ("data=cifar10", f"data.root={write_cifar(tmp_path, BINARY)}", "run_id=x")
    trainer = trainer_of(tmp_path, *options, "trainer.batch_size=4", base=RESNET)
    raw = next(trainer.data.train(4, 0, 0, 0, reading.Shard()))
    assert raw[0].dtype == torch.uint8
    batch = next(iter(trainer._batches()))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (cifar.CIFAR10.mean, cifar.CIFAR10.std))
    torch.testing.assert_close(batch[0], (raw[0] / 255 - mean) / std)
    assert batch[0].is_contiguous()
    trainer.config.channels_last = True
    batch = next(iter(trainer._batches()))
    assert batch[0].is_contiguous(memory_format=torch.channels_last)


def cifar_parts(root):
    data, ranks = cifar.load(root), here().ranks
    shard = reading.Shard(ranks.rank, ranks.world_size)
    return [data.prepare(batch) for batch in data.train(8, 3, 1, 0, shard)]


@pytest.mark.ranks
def test_another_number_of_ranks_sees_the_same_crops(tmp_path):
    root = write_cifar(tmp_path, BINARY)
    data = cifar.load(root)
    whole = [data.prepare(batch) for batch in data.train(8, 3, 1, 0, reading.Shard())]
    parts = run_ranks(2, cifar_parts, root)
    assert len(whole) == len(parts[0]) == 2
    for one, *two in zip(whole, *parts, strict=True):
        for a, *b in zip(one, *two, strict=True):
            assert torch.equal(a, torch.cat(b))


STABLE = (
    "trainer.max_steps=4",
    "trainer.log_freq=1",
    "kfac.update_freq=2",
    "kfac.damping=0.1",
    "kfac.kl_clip=0.001",
    "kfac.trust_ratio=null",
    "kfac.grafting=false",
)


@pytest.mark.parametrize(
    "kind", [slow(("kfac=none",)), (), slow(("kfac.method=inverse", "kfac.fisher=mc"))]
)
def test_channels_last_gives_the_same_result(tmp_path, kind):
    options = (*RESNET, *STABLE, "kfac.factor_update_freq=1", "optimizer.lr=0.02", *kind)
    _, first = train(tmp_path, "run_id=first", base=options)
    _, last = train(tmp_path, "run_id=last", "trainer.channels_last=true", base=options)
    losses = [[e.loss for e in of_kind(path, Trained)] for path in (first, last)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    cosines = [of_kind(path, Trained)[-1].cosine for path in (first, last)]
    assert cosines[1] == pytest.approx(cosines[0], rel=1e-3)
    model = trainer_of(tmp_path, "run_id=x", "trainer.channels_last=true", base=RESNET).model
    weights = [p for p in model.parameters() if p.ndim == 4 and p.shape[2] > 1 and p.shape[1] > 1]
    assert weights
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)


@pytest.mark.ranks
def test_channels_last_gives_the_same_result_on_two_ranks(tmp_path):
    options = (*SMALL, *STABLE, "kfac.factor_update_freq=1", "trainer.channels_last=true")
    options += ("kfac.spread=false",)  # decompositions in the same steps on any number of ranks
    _, alone = train(tmp_path, "run_id=alone", base=options)
    done = run_ranks(2, train_here, tmp_path, ("run_id=ranks",), options)
    assert {status for status, _, _ in done} == {"finished"}
    losses = [[e.loss for e in of_kind(p, Trained)] for p in (alone, tmp_path / "ranks")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    with pytest.raises(UsageError, match="channels_last=true does not fit backend=fsdp2"):
        train(tmp_path, "backend=fsdp2", base=options)


def test_the_share_of_time_spent_waiting_is_recorded(tmp_path, capsys):
    _, path = train(tmp_path, "trainer.max_steps=10", "trainer.log_freq=5")
    shares = [e.data_wait_share for e in of_kind(path, Trained)]
    assert len(shares) == 2
    assert all(0 < share < 0.9 for share in shares)
    assert math.isfinite(sum(shares))
    last = of_kind(path, Trained)[-1]
    assert metrics_of(last)["train/data_wait_share"] == shares[-1]
    said = capsys.readouterr().out
    assert re.search(r"step 5/10 .* ex/s \(\d+% waiting for data\)", said)


def test_a_slow_reader_increases_the_share_of_waiting(tmp_path, monkeypatch):
    original = LabelledImages.train

    def slow(self, *arguments):
        for batch in original(self, *arguments):
            time.sleep(0.2)
            yield batch

    monkeypatch.setattr(LabelledImages, "train", slow)
    _, path = train(tmp_path, "trainer.max_steps=4", "trainer.log_freq=2", "kfac=none")
    for event in of_kind(path, Trained):
        assert event.data_wait_share > 0.5
    assert event.train_s > 0.8
    assert end(path).status == "finished"


def test_a_folder_that_cannot_be_looked_into_is_named(tmp_path):
    options = ("data=imagefolder", f"data.root={300 * 'x'}")
    with pytest.raises(UsageError, match=r"^data=imagefolder: x+/train cannot be read \(File name"):
        train(tmp_path, *options, base=RESNET)


def test_a_folder_of_images_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    for split in ("train", "val"):
        for place in ("cat/x", "cat/y"):
            (tmp_path / split / place).mkdir(parents=True)
            (tmp_path / split / place / "a.png").touch()
    deny_listing(monkeypatch, tmp_path / "train" / "cat" / "x")
    with pytest.raises(UsageError, match=r"cat/x: the folder cannot be read \(Permission denied\)"):
        imagefolder.Folder(tmp_path, "train")
    assert len(imagefolder.Folder(tmp_path, "val").paths) == 2
