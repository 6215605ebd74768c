"""kfac-data: demos in published layouts, which the readers can read, and damaged files."""

import shlex
import sys

import pytest
from PIL import Image

from kfac_bench import cli
from kfac_bench.cli import data_command
from kfac_bench.config import compose
from kfac_bench.data.base.order import Shard
from kfac_bench.data.images import imagefolder


def run(capsys, *arguments):
    """Return (exit code, standard output, standard error) of kfac-data."""
    with pytest.raises(SystemExit) as stop:
        cli.data([str(a) for a in arguments])
    return stop.value.code, *capsys.readouterr()


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "imagenet"
    with pytest.raises(SystemExit) as stop:
        cli.data(["make-demo", "imagenet", str(folder)])
    assert stop.value.code == 0
    return folder


def test_the_imagenet_demo_contains_the_digits(capsys, imagenet):
    code, out, _ = run(capsys, "verify", imagenet)
    assert code == 0
    assert out.splitlines() == [
        "imagefolder: 1347 images in train, 450 images in val; no faults",
        f"next: kfac-train data=imagefolder data.root={imagenet}",
    ]
    data = imagefolder.load(imagenet, image_size=32, workers=0)
    assert (data.num_classes, data.train_size, data.eval_size) == (10, 1347, 450)
    images, labels = data.prepare(next(iter(data.evaluate(450, Shard()))))
    assert images.shape == (450, 3, 32, 32)
    zero, one = (images[labels == k].mean(0)[0, 16, 16].item() for k in (0, 1))
    assert one > zero + 1  # the middle of a zero is dark


def test_verify_names_each_damaged_image(capsys, tmp_path):
    for split in ("train", "val"):
        for name in "ab":
            folder = tmp_path / split / f"class_{name}"
            folder.mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(folder / f"{name}.JPEG")
    cut, text = tmp_path / "train" / "class_a" / "cut.JPEG", tmp_path / "val" / "class_b" / "t.JPEG"
    cut.write_bytes((tmp_path / "train" / "class_a" / "a.JPEG").read_bytes()[:300])
    text.write_text("no image")
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1
    lines = out.splitlines()
    assert [line.split(": ")[0] for line in lines[:-1]] == [str(cut), str(text)]
    assert lines[-1] == "imagefolder: 2 images in train, 2 images in val; 2 faults"


def test_verify_has_the_exit_codes_that_its_help_names(capsys, tmp_path):
    code, said, _ = run(capsys, "verify", "--help")
    assert code == 0
    for meaning in ("0 no faults", "1 damaged or missing files", "2 no dataset that can be read"):
        assert meaning in " ".join(said.split())
    images = [tmp_path / split / "class" / "a.JPEG" for split in ("train", "val")]
    for image in images:
        image.parent.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(image)
    assert run(capsys, "verify", tmp_path)[0] == 0
    more = images[0].with_name("b.JPEG")
    more.write_text("no image")
    assert run(capsys, "verify", tmp_path)[0] == 1
    for image in images:
        image.write_text("no image")
    assert run(capsys, "verify", tmp_path)[0] == 1
    for nothing in (tmp_path / "typo", images[0].parent):
        code, _, line = run(capsys, "verify", nothing)
        assert (code, len(line.splitlines())) == (2, 1)


def test_verify_reads_the_lgg_demo(capsys, tmp_path):
    assert run(capsys, "make-demo", "lgg", tmp_path)[0] == 0
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 0
    content, then = out.splitlines()
    assert content == "lgg: 256 good slices in 16 volumes; no faults"
    # The command that follows has a configuration.
    words = shlex.split(then.removeprefix("next: kfac-train "))
    assert compose.load(words).model.name == "unet"
    mask = next(tmp_path.glob("kaggle_3m/TCGA_*/*_mask.tif"))
    mask.unlink()
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1
    assert f"there is no {mask.name}" in out
    assert "\nlgg: 255 good slices in 16 volumes; 1 fault\n" in out


@pytest.mark.parametrize("dataset", ["coco", "squad", "text"])
def test_the_command_after_verify_fits_the_dataset(dataset):
    words = [*data_command._WORDS[dataset], f"data={dataset}", "data.root=demo"]
    assert compose.load(words).data.name == dataset


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("verify", "{folder}/none"), "none: no such folder"),
        (("verify", "{folder}"), "has the layout of no known dataset"),
        # From Python 3.14, Path.exists() hides the reason.
        (("verify", 300 * "x"), "File name too long" if sys.version_info < (3, 14) else "no such"),
        (("make-demo", "mnist", "{folder}"), "invalid choice"),
        (("make-demo", "imagenet", "{folder}/has"), "has train or val already"),
        (("make-demo", "imagenet", "{folder}/file/demo"), "cannot be written (Not a directory)"),
        (
            ("prepare", "text", "--source", "{folder}/file", "{folder}/file"),
            "cannot be written (File exists)",
        ),
        (
            ("prepare", "text", "--source", "{folder}", "{folder}/made"),
            "made: is inside --source",
        ),
    ],
)
def test_bad_input_gives_one_clear_line(capsys, tmp_path, arguments, said):
    (tmp_path / "has" / "train").mkdir(parents=True)
    (tmp_path / "file").write_text("One word.")
    (tmp_path / "text-notes.json").write_text("{}")
    code, out, err = run(capsys, *(a.format(folder=tmp_path) for a in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("kfac-data: ")
    assert len(err.splitlines()) == 1
    assert said in err
