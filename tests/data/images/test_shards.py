"""ImageNet as tar shards: exchange with the webdataset package, order, and damaged shards."""

import io
import os
import tarfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from webdataset import TarWriter, tariterators

from kfac_bench.data.base.dataset import fingerprint
from kfac_bench.data.base.files import cache_folder
from kfac_bench.data.base.order import Shard, epoch_order
from kfac_bench.data.images import imagefolder, tar_shards
from kfac_bench.data.options import verify
from kfac_bench.errors import UsageError
from kfac_bench.record.events import SampleSkipped
from tests.cli.test_kfac_data import run
from tests.data.base.test_data import ALONE, equal
from tests.support.runs import end, of_kind, train
from tests.training.test_skip import BASE

SPLITS = {"train": 23, "val": 5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root, generator = tmp_path_factory.mktemp("folders"), np.random.default_rng(0)
    for split, count in SPLITS.items():
        for i in range(count):
            folder = root / split / f"n{i % 3:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 256, (9, 7, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"image_{i}.JPEG")
    return root


@pytest.fixture
def root(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    list(tar_shards.write(tmp_path / "shards", folders, per_shard=10))
    return tmp_path / "shards"


def write_tar(path, members, kind=tarfile.REGTYPE):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size, member.type = len(content), kind
            tar.addfile(member, io.BytesIO(content))


def members(path):
    with tarfile.open(path) as tar:
        return [(m.name, tar.extractfile(m).read()) for m in tar]


# ---- as images in folders ----


def read_by_webdataset(path):
    """Read with the package's iterators, because its pipelines leave files open."""
    with open(path, "rb") as file:
        members = tariterators.tar_file_expander([{"url": path, "stream": file}])
        found = list(tariterators.group_by_keys(members))
    return [(example["jpg"], example["cls"]) for example in found]


def test_the_webdataset_package_reads_our_shards(root, folders, capsys, tmp_path):
    for split, count in SPLITS.items():
        paths = sorted(str(path) for path in root.glob(f"{split}-*.tar"))
        assert len(paths) == -(-count // 10)
        theirs = [example for path in paths for example in read_by_webdataset(path)]
        assert len(theirs) == count
        ours = tar_shards.TarShards(root, split)
        assert [ours.read(i) for i in range(count)] == [image for image, _ in theirs]
        assert [str(label).encode() for label in ours.labels] == [label for _, label in theirs]
        source = imagefolder.Folder(folders, split)
        order = epoch_order(count, 0, 0).tolist()
        assert [source.read(i) for i in order] == [image for image, _ in theirs]
        assert [source.labels[i] for i in order] == ours.labels
    assert (root / "classes.txt").read_text().split() == [f"n{i:08d}" for i in range(3)]
    code, out, _ = run(capsys, "prepare", "shards", tmp_path / "cli", "--source", folders)
    assert (code, len(out.splitlines())) == (0, 2)
    assert out.splitlines()[0] == f"{tmp_path / 'cli'}/train-000000.tar: 23 images"


def test_options_of_text_are_refused(tmp_path, capsys):
    words = ("prepare", "shards", tmp_path, "--source", tmp_path, "--sequence-length", "64")
    code, _, error = run(capsys, *words)
    assert code == 2
    assert "--sequence-length is for text, and shards have images. Leave it out" in error


def test_shards_of_the_webdataset_package_are_read(tmp_path, monkeypatch, folders):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = imagefolder.Folder(folders, "train")
    with TarWriter(str(tmp_path / "train-0.tar"), encoder=True) as writer:
        for i in range(5):
            content = source.read(i)
            writer.write({"__key__": f"a/b_{i}", "jpg": content, "cls": i % 2, "json": {"x": 1}})
    (tmp_path / "val-0.tar").write_bytes((tmp_path / "train-0.tar").read_bytes())
    data = tar_shards.load(tmp_path, 8, 0)
    assert (data.train_size, data.num_classes) == (5, 2)
    found = tar_shards.TarShards(tmp_path, "train")
    assert [found.read(i) for i in range(5)] == [source.read(i) for i in range(5)]
    assert found.labels == [0, 1, 0, 1, 0]
    assert found.name(3) == f"{tmp_path}/train-0.tar:a/b_3"


def test_batches_do_not_depend_on_workers_start_or_sharding(root):
    here, there = tar_shards.load(root, 8, 0), tar_shards.load(root, 8, 2)
    full = list(here.train(4, 5, 1, 0, ALONE))
    assert len(full) == 5
    assert equal(full, there.train(4, 5, 1, 0, ALONE))
    assert equal(full[2:], here.train(4, 5, 1, 2, ALONE))
    parts = [list(here.train(4, 5, 1, 0, Shard(rank, 2))) for rank in range(2)]
    assert equal(
        full, [tuple(map(torch.cat, zip(*p, strict=True))) for p in zip(*parts, strict=True)]
    )
    labels = torch.cat([y for _, y in here.evaluate(2, ALONE)])
    assert labels.tolist() == tar_shards.TarShards(root, "val").labels


@pytest.mark.slow
def test_a_run_on_shards_resumes_at_the_next_sample(root, tmp_path):
    options = (*BASE, "data=shards", f"data.root={root}", "data.workers=1", "trainer.batch_size=5")
    status, whole = train(tmp_path, "run_id=whole", base=options)
    assert status == "finished"
    train(tmp_path, "run_id=part", "trainer.max_steps=2", base=options)
    _, rest = train(tmp_path, "run_id=rest", f"resume={tmp_path}/part", base=options)
    assert end(rest).weights_sha256 == end(whole).weights_sha256


# ---- the index ----


def test_the_index_is_cached_until_the_shard_changes(root, monkeypatch):
    calls = []
    original = tar_shards.read_index

    def count(path):
        calls.append(path.name)
        return original(path)

    monkeypatch.setattr(tar_shards, "read_index", count)
    first, second = tar_shards.TarShards(root, "train"), tar_shards.TarShards(root, "train")
    assert calls == [f"train-00000{i}.tar" for i in range(3)]
    assert [first.name(i) for i in range(23)] == [second.name(i) for i in range(23)]
    assert [first.read(i) for i in range(23)] == [second.read(i) for i in range(23)]
    assert first.labels == second.labels
    path = root / "train-000001.tar"
    write_tar(path, members(path)[:4])
    assert len(tar_shards.TarShards(root, "train").labels) == 15
    os.utime(path, ns=(1, 1))
    tar_shards.TarShards(root, "train")
    assert calls[3:] == ["train-000001.tar"] * 2
    for cached in cache_folder("shards").glob("*.npz"):
        cached.write_bytes(cached.read_bytes()[:50])  # torn
    assert len(tar_shards.TarShards(root, "train").labels) == 15
    assert len(calls) == 8


def test_a_cache_that_cannot_be_written_is_ignored(root, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(tar_shards.TarShards(root, "train").labels) == 23


# ---- what is wrong with a shard ----


def cut(path):
    path.write_bytes(path.read_bytes()[:3000])


def cut_between(path):
    """Cut before the header of the third member, so that the rest looks complete."""
    with tarfile.open(path) as tar:
        offset = tar.getmembers()[2].offset
    path.write_bytes(path.read_bytes()[:offset])


def scramble(path):
    """Overwrite the header of the third member."""
    with tarfile.open(path) as tar:
        offset = tar.getmembers()[2].offset
    content = bytearray(path.read_bytes())
    content[offset : offset + 512] = b"x" * 512
    path.write_bytes(content)


def edit(change):
    return lambda path: write_tar(path, change(members(path)))


FAULTS = {
    "cut": (cut, "damaged"),
    "cut between members": (cut_between, "its end is missing"),
    "a bad header": (scramble, "its end is missing"),
    "empty": (lambda path: path.write_bytes(b""), "damaged"),
    "text": (lambda path: path.write_text("no tar" * 200), "damaged"),
    "no label": (edit(lambda m: [m[0], *m[2:]]), r"its label \d+\.cls is missing"),
    "no image": (edit(lambda m: m[1:]), "its image is missing"),
    "twice": (edit(lambda m: [*m, m[0]]), "another member has this name"),
    "a word": (edit(lambda m: [m[0], (m[1][0], b"cat"), *m[2:]]), "it is not a class number"),
    "a long label": (
        edit(lambda m: [m[0], (m[1][0], b"1" * 30), *m[2:]]),
        "it is not a class number",
    ),
    "leads out": (edit(lambda m: [("../" + m[0][0], m[0][1]), *m]), "leads out of the archive"),
    "absolute": (edit(lambda m: [("/" + m[0][0], m[0][1]), *m]), "leads out of the archive"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_shard_is_fatal_or_its_examples_are_left_out(root, fault, capsys):
    path, (spoil, said) = root / "train-000001.tar", FAULTS[fault]
    spoil(path)
    with pytest.raises(UsageError, match=rf"{path}.*{said}.*on_error=skip") as caught:
        tar_shards.load(root, 8, 0)
    assert "\n" not in str(caught.value)
    data = tar_shards.load(root, 8, 0, "skip")
    assert any(path.name in f.path for f in data.faults.new)
    seen = sum(len(labels) for _, labels in data.train(4, 0, 0, 0, ALONE))
    assert seen == data.train_size // 4 * 4
    assert data.train_size in (13, 14, 22, 23)
    code, out, _ = run(capsys, "verify", root)
    assert code == 1
    assert path.name in out
    assert "good images in train, 5 good images in val" in out


def test_links_are_reported_and_not_followed(root, tmp_path):
    path = root / "train-000000.tar"
    with tarfile.open(path, "a") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            member = tarfile.TarInfo(f"link{kind.decode()}.jpg")
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
    faults = tar_shards.TarShards(root, "train").faults
    assert len(faults) == 3
    assert {fault.reason for fault in faults} == {"it is neither a file nor a folder"}


def test_an_image_damaged_after_indexing_is_left_out(root, tmp_path):
    found = tar_shards.TarShards(root, "train")
    path, offset = found.paths[0], int(found._offsets[2])
    content, stat = bytearray(path.read_bytes()), path.stat()
    content[offset : offset + 200] = bytes(200)
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    options = (*BASE, "data=shards", f"data.root={root}", "trainer.batch_size=5")
    _, run_path = train(tmp_path, base=options)
    assert [e.path for e in of_kind(run_path, SampleSkipped)] == [found.name(2)]
    with pytest.raises(UsageError, match=rf"{path}:00000002 cannot be read"):
        train(tmp_path, "data.on_error=fatal", base=options)
    said, faults = verify(root)
    assert said == "shards: 22 good images in train, 5 good images in val"
    assert faults[0].path == found.name(2)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(position=st.integers(0, 4000), change=st.binary(max_size=600), keep=st.integers(0, 12000))
def test_a_damaged_shard_gives_faults_and_no_exception(tmp_path_factory, position, change, keep):
    path = tmp_path_factory.mktemp("fuzz") / "train-0.tar"
    write_tar(path, [("a.cls", b"1"), ("a.jpg", b"i" * 700), ("b.cls", b"2"), ("b.jpg", b"j")])
    content = bytearray(path.read_bytes())
    content[position : position + len(change)] = change
    path.write_bytes(content[:keep])
    index = tar_shards.read_index(path)
    assert len(index.keys) == len(index.labels) == len(index.offsets)
    places = list(zip(index.offsets, index.sizes, strict=True))
    assert all(offset + size <= len(content) for offset, size in places)
    assert all(fault.reason and "\n" not in fault.reason for fault in index.faults)


def test_an_incomplete_image_is_not_among_the_examples(tmp_path):
    path = tmp_path / "train-0.tar"
    write_tar(path, [("a.cls", b"1"), ("a.jpg", b"i" * 700), ("b.cls", b"2"), ("b.jpg", b"j")])
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        ends = [m.offset_data + m.size for m in tar if m.name.endswith("jpg")]
    for length in range(0, ends[1] + 100, 61):
        path.write_bytes(whole[:length])
        index = tar_shards.read_index(path)
        assert len(index.keys) == sum(length >= end for end in ends)
        assert index.faults or length >= ends[1]


def test_shards_that_were_not_all_written_are_removed(folders, tmp_path):
    writing = tar_shards.write(tmp_path / "new", folders, per_shard=10)
    next(line for line in writing if ".tar" in line)
    writing.close()  # as Ctrl-C does
    assert not [*(tmp_path / "new").glob("*.tar")]


def test_wrong_shards_are_usage_errors(root, folders, tmp_path):
    with pytest.raises(UsageError, match="has shards already"):
        list(tar_shards.write(root, folders))
    with pytest.raises(UsageError, match="images per shard must be at least 1"):
        list(tar_shards.write(tmp_path / "new", folders, 0))
    with pytest.raises(UsageError, match=r"no shards .*nowhere/train-\*\.tar: expected train-"):
        tar_shards.load(tmp_path / "nowhere")
    write_tar(root / "val-000000.tar", [("a.jpg", b"x"), ("a.cls", b"7")])
    with pytest.raises(UsageError, match=r"class 7, but the classes of train-\*\.tar are 0 to 2"):
        tar_shards.load(root)
    write_tar(root / "val-000000.tar", [("a.txt", b"x")])
    with pytest.raises(UsageError, match=r"23 good images .* 0 in val"):
        tar_shards.load(root)
    assert not list(root.glob("*.tmp"))


def test_a_file_that_is_too_large_is_named(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("kfac_bench.data.images.opening.MOST_FILE_BYTES", 100)
    with pytest.raises(UsageError, match=r"image_\d+\.JPEG: it is larger than"):
        list(tar_shards.write(tmp_path / "new", folders))


def test_names_of_classes_that_are_not_utf_8_are_kept(tmp_path):
    for split in ("train", "val"):
        folder = tmp_path / split / os.fsdecode(b"caf\xe9")
        folder.mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(folder / "a.JPEG")
    assert len(list(tar_shards.write(tmp_path / "shards", tmp_path))) == 2
    assert (tmp_path / "shards" / "classes.txt").read_bytes() == b"caf\xe9\n"


def test_names_in_a_shard_that_are_not_utf_8_have_a_fingerprint(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    picture = io.BytesIO()
    Image.new("RGB", (4, 4)).save(picture, "JPEG")
    for split in ("train", "val"):
        path = tmp_path / f"{split}-0.tar"
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
            for name, content in (("caf\xe9.jpg", picture.getvalue()), ("caf\xe9.cls", b"0")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    assert fingerprint(tar_shards.load(tmp_path, 4, 0))["train"]["examples"] == 1
