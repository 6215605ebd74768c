"""Small files that announce or unpack to absurd amounts of data: refused, with the number."""

import bz2
import io
import os
import struct
import tarfile
import zlib

import numpy as np
import pytest
from PIL import Image

from kfac_bench import cli
from kfac_bench.data.base.unreadable import Unreadable
from kfac_bench.data.images import cifar10, coco_dataset, lgg, opening, reading, tar_shards
from kfac_bench.data.images.coco_annotations import CocoImage
from kfac_bench.data.language import documents, squad
from kfac_bench.errors import UsageError


def png(width, height):
    """Return a PNG file whose header announces a size; it has the pixels of a small image."""
    out = io.BytesIO()
    Image.new("RGB", (4, 4)).save(out, "PNG")
    content = bytearray(out.getvalue())
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


def jpeg(width, height):
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "JPEG")
    content = bytearray(out.getvalue())
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(content)


@pytest.mark.parametrize("made", [png, jpeg])
@pytest.mark.parametrize(
    ("size", "line"),
    [
        (
            (8001, 8000),
            r"it has 8001 x 8000 pixels \(64.008 megapixels\), allowed are 64 megapixels",
        ),
        ((10_000, 10_000), r"megapixels"),  # Pillow warns
        ((60_000, 60_000), r"it has more than 64 megapixels"),  # Pillow refuses
    ],
)
def test_an_image_of_more_than_64_megapixels_is_refused(made, size, line):
    with pytest.raises(ValueError, match=line):
        reading.decode(made(*size))


def test_an_image_of_64_megapixels_is_allowed():
    with opening.open_image(io.BytesIO(png(8000, 8000))) as image:
        assert image.size == (8000, 8000)


@pytest.mark.filterwarnings("ignore")  # as in a run, where Pillow's warnings are printed
def test_kfac_data_names_the_image_and_the_number(tmp_path, capfd):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / split / "a" / "good.png")
    bomb = tmp_path / "train" / "a" / "bomb.png"
    bomb.write_bytes(png(10_000, 10_000))
    with pytest.raises(SystemExit) as stop:
        cli.data(["verify", str(tmp_path)])
    said = capfd.readouterr()
    assert stop.value.code == 1
    assert said.err == ""
    assert said.out.splitlines() == [
        f"{bomb}: it has 10000 x 10000 pixels (100 megapixels), allowed are 64 megapixels",
        "imagefolder: 1 image in train, 1 image in val; 1 fault",
    ]


def test_slices_and_photographs_are_limited_too(tmp_path):
    path = tmp_path / "x.png"
    path.write_bytes(png(9000, 9000))
    read = (lgg._read(path, path), coco_dataset._decode(CocoImage(1, path, 9000, 9000, ())))
    for fault in read:
        assert isinstance(fault, Unreadable)
        assert "81 megapixels" in fault.reason


def test_an_image_file_of_absurd_size_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "MOST_FILE_BYTES", 2**20)
    path = tmp_path / "x.jpg"
    with path.open("wb") as file:
        file.truncate(2**20 + 1)
    with pytest.raises(ValueError, match="it is larger than 1 MiB"):
        opening.read_file(path)


def test_a_fifo_in_a_dataset_does_not_hang(tmp_path):
    path = tmp_path / "train-0.tar"
    os.mkfifo(path)
    for read in (lambda: opening.read_file(path), lambda: opening.open_image(path).__enter__()):
        with pytest.raises(OSError, match="it is no regular file"):
            read()
    with pytest.raises(UsageError, match="it is no regular file"):
        squad.read(path)
    with pytest.raises(UsageError, match="it is no regular file"):
        tar_shards.TarShards(tmp_path, "train")


@pytest.mark.parametrize("kind", ["member", "long name"])
def test_an_archive_of_cifar_unpacks_to_a_limited_size(tmp_path, monkeypatch, kind):
    """Other files of the archive are passed over, but they are unpacked."""
    monkeypatch.setattr(cifar10, "MAX_ARCHIVE_BYTES", 2**20)
    path = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo("other" if kind == "member" else "././@LongLink")
        member.type = tarfile.REGTYPE if kind == "member" else tarfile.GNUTYPE_LONGNAME
        member.size = 2**21
        tar.addfile(member, io.BytesIO(bytes(2**21)))
    assert path.stat().st_size < 2**13
    with pytest.raises(UsageError, match=f"it unpacks to more than {2**20} bytes"):
        cifar10.load(tmp_path)


def test_a_compressed_text_unpacks_to_a_limited_size(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MOST_BYTES", 2**16)
    path = tmp_path / "wiki_00.bz2"
    path.write_bytes(bz2.compress(bytes(2**20)))
    with pytest.raises(UsageError, match=f"it unpacks to more than {2**16} bytes, 200 times"):
        list(documents.read("wikipedia", tmp_path))
    text = np.random.default_rng(0).bytes(2**17).hex()  # much data that compresses little
    path.write_bytes(bz2.compress(f'{{"text": "{text}"}}'.encode()))
    assert [d.text for d in documents.read("wikipedia", tmp_path)] == [text]
