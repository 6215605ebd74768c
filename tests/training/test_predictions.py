"""Predictions of a run: what is shown, where the files are, and which files may be read."""

import io
import os
import time

import numpy as np
import pytest
import torch
from PIL import Image

from kfac_bench.core.distributed.collective import TorchCollective
from kfac_bench.data.base.order import Shard
from kfac_bench.data.images import digits
from kfac_bench.distributed.backends.fsdp2 import FSDP2
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.record.events import Evaluated, Predicted, RunEnded, read
from kfac_bench.tasks.image_tasks import Reconstruction
from kfac_bench.tasks.task import Prediction
from kfac_bench.training import checkpoint, predictions
from tests.support.distributed import run_ranks
from tests.support.quick import slow
from tests.support.runs import (
    CPU,
    KFAC,
    RESNET,
    before_step,
    end,
    here,
    loss_is,
    of_kind,
    steps_of,
    terminate,
    train,
    trainer_of,
)

SHORT = ("trainer.max_steps=5", "run_id=r", "kfac=none", "trainer.predictions=8")
PICTURE = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


def test_a_run_shows_the_worst_of_its_first_evaluation_examples(tmp_path):
    _, path = train(tmp_path, *SHORT, "trainer.max_steps=8", base=RESNET)
    [event] = of_kind(path, Predicted)
    assert (event.step, event.path) == (8, str(path / "predictions" / "step-8"))
    assert isinstance(read(path)[-1], RunEnded)

    trainer = trainer_of(tmp_path, "kfac=none", base=RESNET)
    trainer.restore(checkpoint.find(path)[0])
    [(images, labels), *_] = map(trainer.data.prepare, digits.load().evaluate(256, Shard()))
    p = trainer.model.eval()(images).softmax(1).detach()
    guess, right = p.argmax(1), p.argmax(1) == labels
    worst = sorted(range(256), key=lambda i: (bool(right[i]), p[i, labels[i]].item()))[:8]
    stored = (images * trainer.data.looks.std[0] + trainer.data.looks.mean[0]) * 255
    for item, i in zip(event.items, worst, strict=True):
        said = f"{guess[i]} ({p[i].max():.2f})"
        right_one = f"right: {said}"
        assert item["caption"] == (right_one if right[i] else f"wrong: {said}, true: {labels[i]}")
        shown = np.asarray(Image.open(path / item["file"]))[16::32, 16::32, 0]
        assert np.abs(shown - stored[i, 0].numpy()).max() < 0.51
    captions = (path / "predictions/step-8/captions.txt").read_text().split("\n\n")
    assert [x.strip() for x in captions] == [
        f"{n:02d}  {item['caption']}" for n, item in enumerate(event.items)
    ]


def test_a_run_that_reaches_its_target_shows_the_chosen_number_of_predictions(tmp_path, capsys):
    status, path = train(tmp_path, *SHORT, "trainer.target=18", "trainer.predictions=3")
    assert status == "reached"
    [event] = of_kind(path, Predicted)
    assert len(event.items) == 3
    assert f"3 predictions in {path}/predictions/step-5" in capsys.readouterr().out


def test_predictions_change_no_weights_and_cost_no_training_time(tmp_path, monkeypatch):
    _, without = train(tmp_path, "trainer.max_steps=5", "run_id=none", "trainer.predictions=0")
    show = Reconstruction.show

    def slow(*arguments):
        time.sleep(1.0)
        return show(*arguments)

    monkeypatch.setattr(Reconstruction, "show", slow)
    _, path = train(tmp_path, "trainer.max_steps=5", "run_id=some")
    assert not (without / "predictions").exists()
    assert of_kind(without, Predicted) == []
    assert end(path).weights_sha256 == end(without).weights_sha256
    [event] = of_kind(path, Predicted)
    assert end(path).train_s - of_kind(path, Evaluated)[-1].train_s < 0.9
    assert event.train_s <= end(path).train_s


@pytest.mark.parametrize("how", ["interrupted", "failed"])
def test_an_interrupted_or_failed_run_has_no_predictions(tmp_path, how):
    spoil = before_step(3, terminate) if how == "interrupted" else loss_is(float("nan"), 3)
    with spoil:
        status, path = train(tmp_path, *SHORT)
    assert status == how
    assert of_kind(path, Predicted) == []
    if how == "interrupted":
        assert train(tmp_path, *SHORT)[0] == "finished"
        assert steps_of(path, Predicted) == [5]


def test_a_picture_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys):
    folder = tmp_path / "r" / "predictions" / "step-5"
    (folder / "02.png").mkdir(parents=True)
    status, path = train(tmp_path, *SHORT)
    assert status == "finished"
    said = [x for x in capsys.readouterr().out.splitlines() if "02.png" in x]
    assert said == [
        f"{folder}/02.png cannot be written: Is a directory; the run itself is complete"
    ]
    [event] = of_kind(path, Predicted)
    files = [f"predictions/step-5/0{n}.png" for n in range(2)]
    assert [item["file"] for item in event.items] == files + 6 * [None]
    assert all(item["caption"].startswith("squared error") for item in event.items)
    assert sorted(os.listdir(folder)) == ["00.png", "01.png", "02.png"]
    assert isinstance(read(path)[-1], RunEnded)


@pytest.mark.parametrize("name", ["00.png", "captions.txt", ".", ".."])
def test_links_and_fifos_among_the_predictions_are_not_followed(tmp_path, name):
    """Somebody else's run directory may have them. No file outside may change."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "00.png").write_text("mine")
    folder = tmp_path / "r" / "predictions" / "step-7"
    linked = {".": folder, "..": folder.parent}.get(name)
    (tmp_path / "r").mkdir()
    if linked is not None:
        linked.parent.mkdir(exist_ok=True)
        linked.symlink_to(outside)
    else:
        folder.parent.mkdir()
        folder.mkdir()
        (folder / name).symlink_to(outside / "00.png")
        os.mkfifo(folder / "01.png")
    shown = 2 * [Prediction("x", PICTURE)]
    items, complaint = predictions.write(tmp_path / "r", 7, shown)
    assert (outside / "00.png").read_text() == "mine"
    assert os.listdir(outside) == ["00.png"]
    if linked is not None:
        assert complaint == f"{linked}: is a link, which is never used in a run directory. " + (
            "Remove it, or put a copy of the real file or folder there"
        )
    else:
        assert complaint is None
        assert (folder / "captions.txt").read_text().startswith("00  x")
        assert all(predictions.read(tmp_path / "r", item["file"]) for item in items)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "predictions").write_text("a file")
    status, path = train(tmp_path, *SHORT)
    assert status == "finished"
    assert capsys.readouterr().out.count("r/predictions: is a regular file") == 1
    assert {item["file"] for item in of_kind(path, Predicted)[0].items} == {None}


def sharded_or_not(folder, backend, *overrides):
    ranks = Ranks(CPU, TorchCollective())
    chosen = FSDP2(ranks) if backend == "fsdp2" else here()
    write, written = predictions.write, []
    predictions.write = lambda *arguments: written.append(1) or write(*arguments)
    try:
        return train(folder, *overrides, f"backend={backend}", backend=chosen)[0], len(written)
    finally:
        predictions.write = write


@pytest.mark.ranks
@pytest.mark.parametrize("backend", [slow("ddp"), "fsdp2"])
def test_ranks_show_the_same_predictions_as_one_process(tmp_path, backend):
    # With decompositions whose steps are the same on any number of ranks.
    stable = (*KFAC, "optimizer.lr=0.02", "kfac.damping=0.1", "kfac.spread=false")
    stable += ("trainer.max_steps=5",)
    _, alone = train(tmp_path, *stable, "run_id=alone")
    ended = run_ranks(2, sharded_or_not, tmp_path, backend, *stable, "run_id=r")
    assert ended == [("finished", 1), ("finished", 0)]

    def errors(path):
        [event] = of_kind(path, Predicted)
        assert all((path / item["file"]).is_file() for item in event.items)
        return [float(item["caption"].split()[2].rstrip(";")) for item in event.items]

    assert errors(tmp_path / "r") == pytest.approx(errors(alone), rel=0.01)


class Lists:
    """A task whose batches are lists of texts."""

    def show(self, model, batch, count):
        assert batch[0], "an empty batch"
        return [Prediction(x, text=f"asked\n{x}") for x in batch[0][:count]]


def test_examples_come_from_several_batches_until_there_are_enough():
    batches = [([],), (["a", "b", "c"],), (["d", "e"],), (["never"],)]
    assert [x.caption for x in predictions.choose(Lists(), None, batches, 4)] == list("abcd")
    assert len(predictions.choose(Lists(), None, batches, 9)) == 6
    read_ahead = iter([(["x"],) for _ in range(1000)])

    class Nothing:
        def show(self, model, batch, count):
            return []

    assert predictions.choose(Nothing(), None, read_ahead, 4) == []
    assert len(list(read_ahead)) == 1000 - predictions.POOL


def test_a_prediction_of_text_has_no_picture(tmp_path):
    items, complaint = predictions.write(tmp_path, 7, Lists().show(None, (["a\ud800", "b"],), 2))
    assert complaint is None
    assert items[1] == {"caption": "b", "file": None, "text": "asked\nb"}
    kept = (tmp_path / "predictions/step-7/captions.txt").read_text()
    assert kept == "00  a\\ud800\nasked\na\\ud800\n\n01  b\nasked\nb\n"


NAME = "predictions/step-1/00.png"


@pytest.fixture
def run(tmp_path):
    """Make a run with one picture, and other pictures that do not belong to the run."""
    (tmp_path / "run").mkdir()
    predictions.write(tmp_path / "run", 1, [Prediction("x", PICTURE)])
    Image.fromarray(PICTURE).save(tmp_path / "00.png")
    Image.fromarray(PICTURE).save(tmp_path / "run" / "00.png")
    Image.fromarray(PICTURE).save(tmp_path / "run" / f"{NAME}.png")
    return tmp_path / "run"


def test_a_picture_reads_back_as_it_was_written(run):
    content = predictions.read(run, NAME)
    assert content == (run / NAME).read_bytes()
    assert (np.asarray(Image.open(io.BytesIO(content))) == PICTURE).all()
    assert predictions.read(run.parent / "run" / ".." / "run", NAME) == content


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "../00.png",
        "00.png",
        "predictions/step-1/99.png",
        f"{NAME}.png",
        "predictions/step-1/../../00.png",
        f"./{NAME}",
        f"{NAME}\n",
        f"{NAME}\0",
        "",
        None,
        7,
        ["x"],
        "predictions/step-1/captions.txt",
        "predictions/step-" + "1" * 5000 + "/00.png",
    ],
)
def test_a_foreign_name_reads_nothing(run, name):
    assert predictions.read(run, name) is None
    if isinstance(name, str) and name.startswith("../0"):
        assert (run / name).is_file()  # otherwise this test shows nothing


def test_an_absolute_name_reads_nothing(run):
    assert predictions.read(run, str(run / NAME)) is None


def replaced(run, how):
    path = run / NAME
    if how == "link to a file":
        path.unlink()
        path.symlink_to(run.parent / "00.png")
    elif how == "link within the run":
        path.unlink()
        path.symlink_to(run / "00.png")
    elif how == "link to itself":
        path.unlink()
        path.symlink_to(path)
    elif how == "linked folder":
        path.parent.rename(run.parent / "elsewhere")
        path.parent.symlink_to(run.parent / "elsewhere")
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "torn":
        path.write_bytes(path.read_bytes()[:45])
    elif how == "text":
        path.write_text("root:x:0:0")
    elif how == "JPEG":
        Image.fromarray(PICTURE).save(path, "JPEG")
    elif how == "long":
        path.write_bytes(path.read_bytes() + bytes(predictions.MOST_BYTES))
    else:
        Image.new("1", (predictions.MOST_SIDE + 1, 1)).save(path)


@pytest.mark.parametrize(
    "how",
    [
        "link to a file",
        "link within the run",
        "link to itself",
        "linked folder",
        "pipe",
        "folder",
        "torn",
        "text",
        "JPEG",
        "long",
        "wide",
    ],
)
def test_a_file_that_no_run_writes_is_not_read(run, how):
    replaced(run, how)
    assert predictions.read(run, NAME) is None


def test_the_largest_picture_that_a_run_writes_is_read(tmp_path):
    """Two pictures of noise side by side compress worst."""
    noise = torch.randint(0, 256, (512, 1028, 3), dtype=torch.uint8).numpy()
    items, _ = predictions.write(tmp_path, 1, [Prediction("x", noise)])
    assert predictions.read(tmp_path, items[0]["file"]) is not None
