"""Images of Parquet and Arrow files: batches, labels, ranks, and runs that stop and continue."""

import pyarrow
import pytest
import torch
from pyarrow import parquet

from kfac_bench import cli
from kfac_bench.data.base.dataset import fingerprint
from kfac_bench.data.base.order import Shard, epoch_order
from kfac_bench.data.images import table_images
from kfac_bench.data.images.table_images import TableOptions
from kfac_bench.data.options import verify
from kfac_bench.record.events import SampleSkipped
from tests.data.base.test_tables import cache, refused  # noqa: F401 (a fixture)
from tests.support.runs import before_step, end, of_kind, terminate, train
from tests.support.table_files import SIDE, pictures, png, write_hub, write_saved
from tests.training.test_skip import BASE


def load(root, workers=0, **options):
    return table_images.load(root, TableOptions(**options), SIDE, workers, augment=False)


def numbers(batches):
    """Return the red pixel of each picture, and the labels."""
    found = list(batches)
    return [x for images, _ in found for x in images[:, 0, 0, 0].tolist()], [
        y for _, labels in found for y in labels.tolist()
    ]


@pytest.mark.parametrize("write", [write_hub, write_saved])
def test_batches_have_the_rows_in_the_order_of_the_run(tmp_path, write):
    root = write(tmp_path / "d", train=pictures(0, 20), test=pictures(100, 7))
    data = load(root)
    assert (data.train_size, data.eval_size, data.num_classes) == (20, 7, 3)
    order = epoch_order(20, 3, 1).tolist()
    seen, labels = numbers(data.train(4, 3, 1, 2, Shard()))
    assert (seen, labels) == (order[8:], [n % 3 for n in order[8:]])
    assert numbers(data.evaluate(4, Shard()))[0] == [*range(100, 107)]
    parts = [numbers(data.train(4, 3, 1, 2, Shard(r, 2)))[0] for r in (0, 1)]
    assert sorted(parts[0] + parts[1]) == sorted(seen)
    (line,) = data.notes
    assert "images are in the column image, labels in label" in line
    assert "Training reads the split train, evaluation the split test" in line


def test_workers_and_augmentation_change_nothing_that_is_not_asked_for(tmp_path):
    root = write_hub(tmp_path / "d", train=pictures(0, 20), test=pictures(100, 7))
    assert numbers(load(root, workers=2).train(5, 0, 0, 0, Shard())) == numbers(
        load(root).train(5, 0, 0, 0, Shard())
    )
    augmented = table_images.load(root, TableOptions(), SIDE, 0, augment=True)
    batches = [list(augmented.train(5, 0, 0, 1, Shard())) for _ in range(2)]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(*batches, strict=True))


def test_one_split_gives_both_sets_and_other_columns_are_found(tmp_path):
    table = pictures(0, 20, label="fine_label", image="img", names=["ant", "bee", "cat", "dog"])
    parquet.write_table(table, tmp_path / "mine.parquet")
    data = load(tmp_path / "mine.parquet", eval_share=0.25)
    assert numbers(data.evaluate(9, Shard()))[0] == [3, 7, 11, 15, 19]
    assert sorted(numbers(data.train(15, 0, 0, 0, Shard()))[0]) == [
        n for n in range(20) if n % 4 != 3
    ]
    assert (data.num_classes, data.looks.classes) == (4, ["ant", "bee", "cat", "dog"])
    assert "column img, labels in fine_label" in data.notes[0]
    assert "evaluation 0.25 of the rows" in data.notes[0]


def test_one_column_for_images_and_labels_is_refused(tmp_path):
    root = write_hub(tmp_path / "d", train=pictures(0, 4), test=pictures(0, 4))
    assert "column label is used for images and for labels" in refused(
        lambda: load(root, image_column="label")
    )


def test_strings_are_sorted_classes_and_raw_bytes_are_images(tmp_path):
    table = pyarrow.table(
        {"image": [png(1), png(2), png(3)], "label": pyarrow.array(["b", "a", "b"])}
    ).set_column(1, "label", pyarrow.array(["b", "a", "b"]).dictionary_encode())
    held_out = pyarrow.table({"image": [png(4)], "label": ["a"]})
    parquet.write_table(table, tmp_path / "train.parquet")
    parquet.write_table(held_out, tmp_path / "test.parquet")
    data = load(tmp_path)
    assert (data.num_classes, data.looks.classes) == (2, ["a", "b"])
    assert numbers(data.evaluate(4, Shard())) == ([4], [0])
    parquet.write_table(held_out.set_column(1, "label", [["aa"]]), tmp_path / "test.parquet")
    assert "no training image has the label 'aa'; did you mean a?" in refused(load, tmp_path)


def with_labels(root, split, labels):
    path = root / f"{split}.parquet"
    table = pyarrow.table({"image": [png(i) for i in range(len(labels))], "label": labels})
    parquet.write_table(table, path)


@pytest.mark.parametrize(
    ("train", "test", "said"),
    [
        ([0, 1], [2], "test.parquet:row 0: the label 2 is out of range; the classes are 0 to 1"),
        ([0, 1], [0, -1], "test.parquet:row 1: the label -1 is out of range"),
        ([0, 10**9], [0], "train.parquet:row 1: the label 1000000000 is out of range"),
        ([0, None], [0], "train.parquet:row 1: the label is 'None'"),
        ([0.5, 1.0], [0], "the label is '0.5' (type double), but labels must be integers or"),
        ([], [0], "has no row for training"),
        (["1", "2"], [1, 0], "labels of one split are strings, those of the other integers"),
    ],
)
def test_labels_out_of_range_are_refused(tmp_path, train, test, said):
    with_labels(tmp_path, "train", train)
    with_labels(tmp_path, "test", test)
    assert said in refused(load, tmp_path)


def test_other_names_of_classes_in_another_split_are_refused(tmp_path):
    parquet.write_table(pictures(0, 9, names=("cat", "dog", "fox")), tmp_path / "train.parquet")
    # In a file without a dog, 1 is a fox.
    parquet.write_table(pictures(0, 8, classes=2, names=("cat", "fox")), tmp_path / "test.parquet")
    said = refused(load, tmp_path)
    assert "test.parquet: the classes of the column label are cat, fox, but cat, dog, fox" in said


@pytest.mark.parametrize(
    "cell", [b"no image", {"bytes": None, "path": "/etc/passwd"}, {"bytes": b"", "path": None}]
)
def test_an_image_that_cannot_be_decoded_is_refused_before_training(tmp_path, cell):
    table = pyarrow.table({"image": [cell] * 4, "label": [0, 1, 0, 1]})
    parquet.write_table(table, tmp_path / "train.parquet")
    assert "train.parquet:row 0 cannot be read" in refused(lambda: load(tmp_path, eval_share=0.5))


def test_verify_finds_images_and_names_bad_ones(tmp_path):
    root = write_saved(tmp_path / "d", train=pictures(0, 8), test=pictures(9, 3))
    content, faults = verify(root)
    assert (content, faults) == (
        "parquet: 8 good images in train, 3 good images in evaluation",
        [],
    )
    cells = [b"bad" if i == 1 else png(i) for i in range(10)]
    table = pictures(0, 10).set_column(1, "image", [cells])
    parquet.write_table(table, tmp_path / "one.parquet")
    content, (fault,) = verify(tmp_path / "one.parquet")
    assert fault.path.endswith("one.parquet:row 1")


def test_the_fingerprint_notices_other_labels_and_files(tmp_path):
    prints = []
    for i, classes in enumerate((3, 3, 2)):
        # Arrow files have the same size, whatever the labels are.
        root = write_saved(tmp_path / str(i), train=pictures(0, 8, classes=classes))
        prints.append(fingerprint(load(root, eval_share=0.5)))
    assert prints[0] == prints[1]
    assert prints[0]["train"] != prints[2]["train"]
    assert prints[0]["eval"] != prints[2]["eval"]


def parquet_words(root):
    return (
        *(word for word in BASE if word != "data=imagefolder"),
        "data=parquet",
        f"data.root={root}",
    )


@pytest.mark.slow
def test_a_stopped_run_continues_with_the_same_bits(tmp_path):
    root = write_hub(tmp_path / "d", train=pictures(0, 32), test=pictures(40, 6))
    base = (*parquet_words(root), "data.workers=1")
    _, straight = train(tmp_path, "run_id=straight", base=base)
    with before_step(3, terminate):
        train(tmp_path, "run_id=stopped", base=base)
    status, stopped = train(tmp_path, "run_id=stopped", base=base)
    assert (status, end(stopped).step) == ("finished", 6)
    assert end(stopped).weights_sha256 == end(straight).weights_sha256


def test_unreadable_images_are_left_out_and_reported(tmp_path):
    table = pictures(0, 33)
    cells = [b"bad" if i == 20 else png(i) for i in range(33)]
    table = table.set_column(1, "image", [cells])
    root = write_hub(tmp_path / "d", train=table, test=pictures(40, 6))
    status, path = train(tmp_path, base=parquet_words(root))
    assert status == "finished"
    assert any(":row 4" in event.path for event in of_kind(path, SampleSkipped))


def test_the_command_says_what_is_wrong_in_one_line(tmp_path, capsys):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(SystemExit) as stop:
        cli.train(
            ["data=parquet", f"data.root={tmp_path}", f"runs_dir={tmp_path}", "model=resnet8"]
        )
    said = capsys.readouterr().err
    assert (stop.value.code, len(said.splitlines())) == (2, 1)
    assert "has no files *.parquet, *.arrow, *.feather" in said
