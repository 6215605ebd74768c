"""Folders of MRI slices of anybody, damaged: examples, or one clear line that names the file."""

import io
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kfac_bench import cli
from kfac_bench.data.base.order import Shard
from kfac_bench.data.images import lgg
from kfac_bench.data.options import verify
from kfac_bench.errors import UsageError
from tests.support.fuzzing import damaged, fuzz, refused_or

RANDOM = np.random.default_rng(0)
NAMES = ("TCGA_A_1_20000101", "TCGA_B_2_20000101")


def tiff(mode, size=(8, 8), value=None, **options):
    shape = (*size[::-1], 3) if mode == "RGB" else size[::-1]
    pixels = RANDOM.integers(0, 256, shape, np.uint8) if value is None else np.full(shape, value)
    out = io.BytesIO()
    kind = options.pop("kind", "TIFF")
    Image.fromarray(pixels.astype(np.uint8)).convert(mode).save(out, kind, **options)
    return out.getvalue()


IMAGE, MASK = tiff("RGB"), tiff("L", value=255)
WHOLE = {
    f"kaggle_3m/{name}/{name}_{i}{end}.tif": content
    for name in NAMES
    for i in (1, 2)
    for end, content in (("", IMAGE), ("_mask", MASK))
}
OTHERS = (
    tiff("RGB", (16, 4)),
    tiff("L", (4, 4), 0),
    tiff("L", value=7),
    tiff("1", value=255),
    tiff("CMYK"),
    tiff("RGBA"),
    tiff("P"),
    tiff("I;16", value=3),
    tiff("RGB", (1, 1)),
    tiff("RGB", kind="JPEG"),
    tiff("L", value=255, kind="PNG"),
    b"",
    b"II*\0",
    b"MM\0*" * 9,
    tiff("RGB", save_all=True, append_images=[Image.new("L", (3, 3))]),
    tiff("RGB", compression="tiff_lzw"),
    tiff("RGB", compression="jpeg"),
)
"""Instead of a file."""
PLACES = st.sampled_from(
    [
        "{name}_3.tif",
        "{name}_3_mask.tif",
        "{name}_01.tif",
        "{name}_x.tif",
        "_1.tif",
        ".tif",
        "{name}_1.TIF",
        "{name}_-1.tif",
        "{name}_\u0663.tif",
        "{name}_\u00b2.tif",
        "a\nb_1.tif",
        "{name}_1_mask_mask.tif",
        f"{'9' * 200}_{'9' * 50}.tif",
        "\x1b[31m_1.tif",
        "[x]_7.tif",
        "\udcff_5.tif",
        "{name}_1.tif/x",
        "*_1.tif",
        "\u202e_4.tif",
        "-1.tif",
        "a b_2_mask.tif",
    ]
)


def put(root, path, content):
    """As a file; or nothing, where that cannot be."""
    try:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    except OSError:
        pass


@st.composite
def folders(draw):
    """Files by path: those of two good volumes, one to four of which are spoilt, moved or added."""
    files = dict(WHOLE)
    for _ in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from(sorted(files)))
        name = draw(st.sampled_from(NAMES))
        new = draw(
            st.sampled_from([f"kaggle_3m/{name}/", f"kaggle_3m/{name}x/", "kaggle_3m/TCGA_"])
        )
        new += draw(PLACES).format(name=name)
        match draw(
            st.sampled_from(["damage", "damage", "other", "drop", "move", "copy", "folder"])
        ):
            case "damage":
                files[path] = draw(damaged(files[path]))
            case "other":
                files[path] = draw(st.sampled_from(OTHERS))
            case "drop":
                del files[path]
            case "move":
                files[new] = files.pop(path)
            case "copy":
                files[new] = files[path]
            case "folder":
                files[f"{path}/in"] = files.pop(path)
        if not files:
            break
    return files


def read_all(root, on_error):
    """Read every batch of training and evaluation."""
    data = refused_or(lambda: lgg.load(root, 8, on_error=on_error, eval_share=0.5))
    if data is None:
        return
    for images, masks in data.train(2, 0, 0, 0, Shard(), drop_last=False):
        assert images.shape[1:] == (3, 8, 8)
        assert masks.shape[1:] == (1, 8, 8)
        assert torch.isfinite(images).all()
        assert masks.max() <= 1
    evaluated = sum(len(images) for images, _, _ in data.evaluate(2, Shard()))
    assert evaluated == data.eval_size
    assert all(x.reason and "\n" not in x.reason for x in data.faults.new)


def test_two_intact_volumes_are_read(tmp_path):
    for path, content in WHOLE.items():
        put(tmp_path, path, content)
    assert verify(tmp_path) == ("lgg: 4 good slices in 2 volumes", [])
    read_all(tmp_path, "fatal")


@pytest.mark.filterwarnings("ignore")
@fuzz(80)
@given(files=folders(), on_error=st.sampled_from(["fatal", "skip"]))
def test_damaged_folders_are_read_or_refused(tmp_path_factory, files, on_error):
    root = tmp_path_factory.mktemp("lgg")
    for path, content in files.items():
        put(root, path, content)
    read_all(root, on_error)
    found = refused_or(lambda: verify(root))
    if found is not None:
        assert all(fault.reason and "\n" not in fault.reason for fault in found[1])


@pytest.mark.parametrize("name", ["a\nb_9.tif", "\udcff_9.tif", "\x1b[31m_9.tif"])
def test_names_that_cannot_be_printed_are_reported_in_one_line(tmp_path, name, capfd):
    for path, content in WHOLE.items():
        put(tmp_path, path, content)
    put(tmp_path, f"kaggle_3m/{NAMES[0]}/{name}", b"no image")
    with pytest.raises(SystemExit) as caught:
        cli.data(["verify", str(tmp_path)])
    out = capfd.readouterr().out
    assert caught.value.code == 1
    assert len(out.splitlines()) == 2
    assert "\x1b" not in out
    assert out.endswith("1 fault\n")
    with pytest.raises(UsageError, match=r"_9\.tif") as refused:
        lgg.load(tmp_path, 8)
    os.fsencode(str(refused.value))
    assert "\n" not in str(refused.value)
