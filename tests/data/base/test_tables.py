"""Parquet and Arrow files: their splits, columns and rows, and damaged files."""

import pickle
import sys
from itertools import pairwise

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import feather, parquet

from kfac_bench.data.base import tables
from kfac_bench.errors import UsageError
from tests.support.fuzzing import damaged, fuzz, refused_or
from tests.support.table_files import pictures, write_hub, write_saved


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kfac_bench" / "tables"


def refused(call, *arguments):
    with pytest.raises(UsageError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("file", "split"),
    [
        ("train-00000-of-00001.parquet", "train"),
        ("data/validation_matched-00003-of-00009.parquet", "validation_matched"),
        ("data/test_gen-00000-of-00002-3d4cd8309148a71f.parquet", "test_gen"),
        ("data/val-00000-of-00001-b42a775f407cee45.parquet", "validation"),
        ("val/part.parquet", "validation"),
        ("test.arrow", "test"),
        ("my_dev_set.feather", "validation"),
        ("latest.parquet", "train"),
        ("val2017.parquet", "validation"),
        ("test 1.parquet", "test"),
        ("eval.parquet", "test"),
        ("evaluation/part1.feather", "test"),
        ("train/data-00000-of-00002.arrow", "train"),
        ("train.parquet/part-0.parquet", "train"),  # as Spark writes it
    ],
)
def test_the_split_of_a_file_is_in_its_name_or_folder(tmp_path, file, split):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert tables.find(tmp_path) == {split: [path]}
    assert tables.find(path) == {"train": [path]}


@pytest.mark.parametrize(
    ("there", "train", "evaluation", "picked"),
    [
        (("train", "test", "validation"), "train", None, ("train", "validation")),
        (("train", "test"), "train", None, ("train", "test")),
        (("train", "extra"), "train", None, ("train", None)),
        (("train", "extra"), "extra", "train", ("extra", "train")),
        (("test",), "test", None, ("test", None)),
        (("train",), "train", "train", ("train", None)),
    ],
)
def test_validation_is_preferred_to_test(tmp_path, there, train, evaluation, picked):
    splits = {name: [tmp_path] for name in there}
    assert tables.pick(splits, tmp_path, train, evaluation) == picked


def test_each_folder_of_a_saved_dict_is_a_split(tmp_path):
    for name in ("train", "dev", "validation_matched", "unsupervised"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data-00000-of-00001.arrow").touch()
        files = '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}'
        (tmp_path / name / "state.json").write_text(files)
    expected = {"train", "validation", "validation_matched", "unsupervised"}
    assert tables.find(tmp_path).keys() == expected


@pytest.mark.parametrize("end", ["", "-b42a775f407cee45"])
def test_configurations_of_a_hub_dataset_are_not_merged(tmp_path, end):
    for name in ("wikitext-2", "wikitext-103"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"train-00000-of-00001{end}.parquet").touch()
    said = refused(tables.find, tmp_path)
    assert "the split train is in several folders (wikitext-103, wikitext-2)" in said
    assert list(tables.find(tmp_path / "wikitext-2")) == ["train"]


def test_missing_files_splits_and_columns_are_named(tmp_path):
    assert "no such file or folder" in refused(tables.find, tmp_path / "none")
    assert "has no files *.parquet" in refused(tables.find, tmp_path)
    splits = {"train": [], "test": []}
    said = refused(tables.pick, splits, tmp_path, "train", "tests")
    assert "no split tests; did you mean test? it has train, test. Set data.eval_split" in said
    schema = pictures(0, 1).schema
    said = refused(tables.choose, schema, "imag", ("image",), "data.image_column", tmp_path)
    assert "did you mean image? its columns are id, image, label" in said
    said = refused(tables.choose, schema, None, ("text", "content"), "data.text_column", tmp_path)
    assert "no column text or content; its columns are id, image, label. Set data.text" in said


@pytest.mark.parametrize("count", [1, 9, 10, 1000])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.7])
def test_held_out_rows_are_evenly_spread(count, share):
    train, held_out = tables.shares(count, share)
    assert sorted(train + held_out) == list(range(count))
    assert len(held_out) == int(count * share)
    gaps = [b - a for a, b in pairwise(held_out)]
    assert all(abs(gap - 1 / share) < 1 for gap in gaps)


@pytest.mark.parametrize("write", [write_hub, write_saved])
def test_cells_are_those_that_were_written_in_any_order(tmp_path, write):
    table = pictures(0, 11)
    found = tables.Columns(
        tables.find(write(tmp_path / "d", train=table))["train"], ["label", "id"]
    )
    assert (len(found), [found.cell("id", i) for i in (10, 0, 5, 4)]) == (11, [10, 0, 5, 4])
    assert found.all_of("label").to_pylist() == list(found) == table["label"].to_pylist()
    copied = pickle.loads(pickle.dumps(found))
    assert copied.cell("id", 7) == 7
    assert found.place(10).endswith(":row 5")


def test_a_parquet_file_is_unpacked_once_and_again_if_it_changes(tmp_path, cache):
    root = write_hub(tmp_path / "d", train=pictures(0, 4))
    paths = tables.find(root)["train"]
    for _ in range(2):
        tables.Columns(paths, ["label"])
        assert len(list(cache.iterdir())) == 2
    for copy in cache.iterdir():
        copy.write_bytes(b"")  # as after a power cut
    assert tables.Columns(paths, ["id"]).cell("id", 0) == 0
    parquet.write_table(pictures(50, 7), paths[0])
    assert tables.Columns(paths, ["id"]).cell("id", 0) == 50


def test_feather_files_and_files_of_other_types_or_columns(tmp_path):
    feather.write_feather(pictures(0, 3), tmp_path / "a.feather", compression="lz4")
    assert tables.Columns([tmp_path / "a.feather"], ["id"]).cell("id", 2) == 2
    feather.write_feather(pyarrow.table({"id": ["x"]}), tmp_path / "b.feather")
    both = [tmp_path / "a.feather", tmp_path / "b.feather"]
    said = refused(tables.Columns(both, ["id"]).all_of, "id")
    assert "the column id has the type string, but int64 in a.feather" in said
    assert "b.feather has no column label, which" in refused(tables.Columns, both, ["label"])


def test_a_small_file_cannot_fill_the_disk(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(tables, "MOST_BYTES", 10_000)
    path = tmp_path / "zeros.parquet"
    parquet.write_table(pyarrow.table({"x": [bytes(1000)] * 2000}), path)
    assert path.stat().st_size < 10_000
    assert "it unpacks to more than" in refused(tables.Columns, [path], ["x"])
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    root = write_hub(tmp_path / "d", train=pictures(0, 4))
    (tmp_path / "file").touch()

    def fail(*_):
        raise PermissionError(13, "Permission denied", "x")

    monkeypatch.setattr(tables, "_copy", fail)
    said = refused(tables.Columns, tables.find(root)["train"], ["id"])
    assert "cannot be written (Permission denied)" in said
    assert "set XDG_CACHE_HOME" in said


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    root = write_hub(tmp_path / "d", train=pictures(0, 4))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    said = refused(tables.columns, tables.find(root)["train"][0])
    assert said.endswith("type pip install '.[parquet]'")


@fuzz(15)
@given(data=st.data())
def test_damaged_files_are_read_or_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("d")
    write = data.draw(st.sampled_from([write_hub, write_saved]))
    path = tables.find(write(folder, train=pictures(0, 6)))["train"][0]
    path.write_bytes(data.draw(damaged(path.read_bytes())))

    def read():
        found = tables.Columns([path], ["image", "label"])
        return [found.cell(name, i) for name in found.names for i in range(len(found))]

    refused_or(read)


@fuzz(20)
@given(content=damaged(b'{"_data_files": [{"filename": "../x.arrow"}]}'))
def test_a_damaged_list_of_files_is_read_or_refused(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("d")
    (folder / "x.arrow").touch()
    (folder / "state.json").write_bytes(content)
    assert refused_or(lambda: tables.find(folder)) is None  # no file outside of the folder
