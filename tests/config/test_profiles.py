"""One experiment at several sizes; the demo sets that the smallest is trained on."""

from pathlib import Path

import pytest
import torch

from kfac_bench.config import compose, conf_files
from kfac_bench.data.base.order import Shard
from kfac_bench.data.demo import demo_folder
from kfac_bench.data.images import digits
from kfac_bench.errors import UsageError
from tests.support.distributed import run_ranks
from tests.support.quick import quick_if

FLAT = ("digits", "embedded", "heldout", "lgg")
"""Folders of conf/experiment/ whose files are experiments, not profiles of one experiment."""
ROWS = sorted(
    {p.parent.name for p in (compose.CONF_DIR / "experiment").glob("*/*.yaml")} - {*FLAT, "cpu"}
)


@pytest.mark.parametrize(
    "row",
    quick_if(("fig5a_resnet50_convergence", "table4b_bert_kfac_phase1").__contains__, ROWS),
)
def test_every_row_has_all_profiles_and_its_smoke_needs_no_data(row):
    found = {p.stem for p in (compose.CONF_DIR / "experiment" / row).glob("*.yaml")}
    assert found == set(conf_files.PROFILES)
    paper = compose.load([f"experiment={row}"])
    assert paper == compose.load([f"experiment={row}", "profile=paper"])
    smoke = compose.load(["profile=smoke", f"experiment={row}"])
    assert smoke.data.name == "digits" or smoke.data.root == "demo"
    assert smoke.trainer.target is not None
    assert smoke != compose.load([f"experiment={row}", "profile=one_gpu"]) != paper


@pytest.mark.parametrize("name", ["pydoc_transformer", "pictures_unet"])
def test_a_name_without_its_folder_is_refused_with_the_whole_name(name):
    with pytest.raises(UsageError) as caught:
        compose.load([f"experiment={name}"])
    said = f"experiment={name}: no such experiment; did you mean embedded/{name}?"
    assert str(caught.value) == said


def test_the_command_line_wins_over_a_profile():
    config = compose.load(["experiment=kaisa_unet_lgg", "profile=smoke", "trainer.max_steps=3"])
    assert (config.trainer.max_steps, config.data.image_size) == (3, 64)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["profile=smoke"], "profile=smoke: only an experiment has profiles; set experiment=NAME"),
        (["experiment=kaisa_unet_lgg", "profile=smok"], "profile=smok: choose one of smoke, one"),
        (["profile=paper", "profile=smoke"], "profile=paper and profile=smoke: name one profile"),
        (["experiment=lgg/unet", "profile=smoke"], "experiment=lgg/unet has no profiles; leave"),
        (["experiment=mine", "profile=paper"], "no such profile; it has smoke"),
        (["experiment=kaisa_unet", "profile=smoke"], "no such experiment; did you mean kaisa_u"),
    ],
)
def test_bad_input(tmp_path, overrides, said):
    (tmp_path / "experiment" / "mine").mkdir(parents=True)
    (tmp_path / "experiment" / "mine" / "smoke.yaml").write_text("# @package _global_\nseed: 3\n")
    with pytest.raises(UsageError, match=said):
        compose.load(overrides, tmp_path)
    assert compose.load(["experiment=mine", "profile=smoke"], tmp_path).seed == 3


def test_sweeps_have_one_profile_for_all_experiments():
    given = ["experiment=a,b", "profile=smoke", "seed=1,2"]
    assert conf_files.with_profiles(given, []) == [
        "experiment=a,b",
        "seed=1,2",
    ]  # unknown: Hydra says so
    assert compose.expanded(["experiment=kaisa_unet_lgg,lgg/unet"]) == [
        "experiment=kaisa_unet_lgg/paper,lgg/unet"
    ]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kfac_bench"


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_demo_is_made_once_and_equals_that_of_kfac_data(cache, tmp_path, monkeypatch):
    place = demo_folder.folder("lgg")
    demo_folder.make("lgg", tmp_path / "own")
    assert files(place) == files(tmp_path / "own") != {}
    assert [p.name for p in cache.iterdir()] == [place.name]
    monkeypatch.setattr(demo_folder, "make", pytest.fail)
    assert demo_folder.folder("lgg") == place


def test_data_root_demo(cache):
    config = compose.load(["experiment=kaisa_unet_lgg", "profile=smoke"])
    assert config.data.build(config.task.name).train_size == 192
    config.data.name = "mine"
    with pytest.raises(UsageError, match="no demo of data=mine, only of imagenet, shards"):
        config.data.build(config.task.name)


@pytest.mark.slow
def test_the_digits_are_the_same_in_all_layouts(cache):
    found = {}
    for name in ("imagefolder", "shards", "cifar10"):
        data = compose.load([f"data={name}", "data.root=demo"]).data.build("classification")
        assert (data.num_classes, data.train_size, data.eval_size) == (10, 1347, 450)
        if name != "cifar10":
            batches = list(data.evaluate(450, Shard()))
            found[name] = sorted(labels_of(batches))
            assert batches[0][0].float().std() > 50
    [(images, labels)] = data.evaluate(450, Shard())
    assert sorted(labels.tolist()) == found["imagefolder"] == found["shards"]
    [(digit, their_labels)] = digits.load(32, normalize=False).evaluate(450, Shard())
    assert torch.equal(labels, their_labels)
    expected = (digit * 255).round().expand(-1, 3, -1, -1)
    assert (images - expected).abs().max() <= 1


def labels_of(batches):
    return [label for _, labels in batches for label in labels.tolist()]


def test_a_cache_that_cannot_be_written_is_reported(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="cannot be written"):
        demo_folder.folder("lgg")


def made_here(cache):
    import os

    os.environ["XDG_CACHE_HOME"] = cache
    try:
        return str(demo_folder.folder("lgg"))
    finally:
        del os.environ["XDG_CACHE_HOME"]


@pytest.mark.ranks
def test_ranks_that_make_a_demo_at_once_share_one(tmp_path):
    first, second = run_ranks(2, made_here, str(tmp_path))
    assert first == second
    assert list((tmp_path / "kfac_bench").iterdir()) == [Path(first)]
    assert len(files(Path(first))) == 512
