"""Small files that announce or unpack to absurd amounts of data: refused, with the number."""

import bz2
import io
import os
import struct
import tarfile
import zlib

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from kfac_bench import cli
from kfac_bench.data.base.files import Unreadable
from kfac_bench.data.images import (
    coco_dataset,
    lgg,
    opening,
    reading,
    tar_shards,
)
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


def test_a_program_that_has_the_name_of_an_image_does_not_run(tmp_path, monkeypatch):
    Image.new("RGB", (8, 8)).save(tmp_path / "x.jpg", "EPS")
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path}/has_run\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # it may have looked before
    fault = coco_dataset._decode(CocoImage(1, tmp_path / "x.jpg", 8, 8, ()))
    assert not (tmp_path / "has_run").exists()
    assert (isinstance(fault, Unreadable), "PostScript" in fault.reason) == (True, True)


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


def header(name, size=0):
    """Return a header of a tar archive, with a size of any sign."""
    member = tarfile.TarInfo(name)
    member.size = max(0, size)
    block = bytearray(member.tobuf(tarfile.USTAR_FORMAT))
    if size < 0:
        block[124:136] = b"\xff" + size.to_bytes(11, "big", signed=True)
        block[148:156] = b" " * 8
        block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


def test_a_shard_whose_members_lead_back_is_damaged(tmp_path, monkeypatch):
    """Python's tarfile read such members again and again until it refused negative sizes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "train-0.tar"
    path.write_bytes(header("a.txt") + header("b.txt", -512) + bytes(1024))
    (fault,) = tar_shards.index_of(path).faults
    assert (fault.path, "damaged" in fault.reason) == (str(path), True)


def test_an_image_of_absurd_size_in_a_shard_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, size = tmp_path / "train-0.tar", 2**30
    with path.open("wb") as file:  # most of this file is a hole
        file.write(header("0.jpg", size))
        file.seek(size, os.SEEK_CUR)
        file.write(header("0.cls", 1) + b"0".ljust(512, b"\0") + bytes(1024))
    fault = reading.load(tar_shards.TarShards(tmp_path, "train"), 0, 8)
    assert isinstance(fault, Unreadable)
    assert fault.reason == "it is larger than 512 MiB"


def test_a_long_name_in_a_shard_does_not_widen_a_table_of_all_names(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        for name in ("a" * 2**20, "b"):
            for kind in ("jpg", "cls"):
                member = tarfile.TarInfo(f"{name}.{kind}")
                member.size = 1
                tar.addfile(member, io.BytesIO(b"0"))
    assert len(tar_shards.index_of(tmp_path / "train-0.tar").keys) == 2
    assert not (tmp_path / "cache").exists()


def test_a_compressed_text_unpacks_to_a_limited_size(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MOST_BYTES", 2**16)
    path = tmp_path / "wiki_00.bz2"
    path.write_bytes(bz2.compress(bytes(2**20)))
    with pytest.raises(UsageError, match=f"it unpacks to more than {2**16} bytes, 200 times"):
        list(documents.read("wikipedia", tmp_path))
    text = np.random.default_rng(0).bytes(2**17).hex()  # much data that compresses little
    path.write_bytes(bz2.compress(f'{{"text": "{text}"}}'.encode()))
    assert [d.text for d in documents.read("wikipedia", tmp_path)] == [text]
