"""Recipes: which one follows from data and model, how it is scaled, and that user's words win."""

import os
import subprocess

import pytest
import yaml

from kfac_bench.benchmark import local_runs
from kfac_bench.cli import plan_command, setup_command, train_command
from kfac_bench.cli.bench_command import build_parser
from kfac_bench.config import compose, option_help, recipes
from kfac_bench.errors import UsageError
from kfac_bench.training.run_directory import run_id
from tests.support import ROOT

IMAGENET = ("data=imagefolder", "model=resnet50")
CIFAR = ("data=cifar10", "model=resnet32")


SQUAD = ("data=squad", "model=bert_large")


@pytest.mark.parametrize(
    ("script", "words"),
    [("resnet32_cifar10", CIFAR), ("unet_lgg", ("data=lgg", "model=unet")), ("squad", SQUAD)],
)
def test_a_batch_script_scales_as_the_recipe_does(tmp_path, script, words):
    (tmp_path / "common.sh").write_text("train() { printf '%s\\n' \"$@\"; }\n")
    variables = {"PATH": os.environ["PATH"], "KFAC_SLURM": str(tmp_path), "SLURM_NTASKS": "8"}
    command = ["bash", ROOT / "slurm" / f"{script}.sbatch", "data.root=x"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    of_script = compose.load(done.stdout.split())
    of_recipe = compose.load([*words, "data.root=x"], ranks=8)
    assert of_script.trainer.batch_size == of_recipe.trainer.batch_size
    assert of_script.schedule.warmup_start == of_recipe.schedule.warmup_start


def name_of(*words, config_dir=None):
    found = recipes.choose(words, config_dir, 1)
    return None if found is None else found.name


@pytest.fixture
def own(tmp_path):
    """Write a recipe into a folder of the user's own, and return the folder."""

    def write(name, text):
        (tmp_path / "recipe").mkdir(exist_ok=True)
        (tmp_path / "recipe" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (IMAGENET, "imagenet_resnet"),
        (("data=shards", "model=resnet152"), "imagenet_resnet"),
        (("data=digits", *IMAGENET), "imagenet_resnet"),  # the last word counts
        ((*IMAGENET, "kfac=none"), "imagenet_resnet_first_order"),
        ((*IMAGENET, "kfac.enabled=False"), "imagenet_resnet_first_order"),
        (CIFAR, "cifar10_resnet"),
        ((*CIFAR, "kfac=none"), "cifar10_resnet_first_order"),
        (("model=maskrcnn_resnet50_fpn",), "coco_maskrcnn"),
        (("model=maskrcnn_resnet50_fpn", "kfac=none"), "coco_maskrcnn"),
        (("model=bert_base",), "text_bert"),  # the file of the model chooses data=text
        (("model=bert_large", "kfac=none"), "text_bert_first_order"),
        (("model=bert_large", "data=squad", "task=question_answering"), "squad_bert"),
        (("recipe=imagenet_resnet",), "imagenet_resnet"),
        ((*IMAGENET, "recipe=none"), None),
        ((*IMAGENET, "data.root=demo"), None),  # the demo is no ImageNet
        (("data=imagefolder",), None),  # the default model is no model of the recipe
        (("data=cifar10", "model=resnet50"), None),
        (("model=bert_tiny",), "text_demo_bert_tiny"),
        (("model=resnet50",), "digits_resnet"),
        (("model=resnet152",), "digits_deep_resnet"),
        (("model=unet",), "lgg_demo_unet"),
        (("model=unet", "data.root=demo"), "lgg_demo_unet"),
        (("model=unet", "data.root=/d"), "lgg_unet"),
        (("model=bert_tiny", "data=text"), None),
        ((), None),
        (("experiment=lgg/unet", "model=unet"), None),
        (("problem=mine.py", *IMAGENET), None),
    ],
)
def test_the_recipe_follows_from_data_and_model(words, name):
    assert name_of(*words) == name


@pytest.mark.parametrize(
    ("ranks", "intervals"),
    [(16, (2000, 200)), (32, (1000, 100)), (64, (500, 50)), (128, (250, 25)), (256, (125, 25))],
)
def test_imagenet_is_scaled_to_the_ranks_as_in_figure_8(ranks, intervals):
    found = compose.load(IMAGENET, ranks=ranks)
    assert found.trainer.batch_size == 32 * ranks
    assert (found.kfac.update_freq, found.kfac.factor_update_freq) == intervals
    assert found.schedule.warmup_start == 1 / ranks
    rate = found.optimizer.lr * found.schedule.factor(10**4, 1000, 10**5, found.trainer.batch_size)
    assert rate == pytest.approx(0.0125 * ranks)


@pytest.mark.parametrize(
    ("words", "ranks", "expected"),
    [
        ((*CIFAR, "trainer.batch_size=256"), 1, {"schedule.warmup_start": 0.5}),
        (CIFAR, 8, {"trainer.batch_size": 1024, "kfac.update_freq": 10}),
        (("model=unet", "data=lgg"), 4, {"trainer.batch_size": 64, "kfac.update_freq": 200}),
        # BERT's batch stays: 4096 sequences on each of 16 ranks are 46 parts of at most 90.
        (("model=bert_large",), 16, {"trainer.batch_size": 65536, "trainer.accumulate": 46}),
        (("model=bert_large",), 32, {"trainer.batch_size": 65536, "trainer.accumulate": 23}),
        # The batch of the user gives the intervals.
        ((*IMAGENET, "trainer.batch_size=4096"), 8, {"kfac.update_freq": 250}),
        # No divisor of 10667 is near to its tenth, so the interval is rounded.
        ((*IMAGENET, "trainer.batch_size=96"), 3, {"kfac.update_freq": 10670}),
        ((*IMAGENET, "kfac.update_freq=500"), 16, {"kfac.factor_update_freq": 50}),
        ((*CIFAR, "kfac.update_freq=100"), 1, {"kfac.factor_update_freq": 10}),
        ((*IMAGENET, "kfac.factor_update_freq=30"), 64, {"kfac.update_freq": 510}),
        (
            (*IMAGENET, "kfac.update_freq=8", "kfac.factor_update_freq=4"),
            64,
            {"kfac.update_freq": 8, "kfac.factor_update_freq": 4},
        ),
    ],
)
def test_values_follow_the_batch_and_the_words_of_the_user(words, ranks, expected):
    found = compose.load(words, ranks=ranks)
    for name, value in expected.items():
        group, _, option = name.partition(".")
        assert getattr(getattr(found, group), option) == value, name


@pytest.mark.parametrize(
    ("words", "epochs", "milestones"),
    [(IMAGENET, 90, [30, 60, 80]), (CIFAR, 200, [100, 150])],
)
def test_without_kfac_the_recipe_is_the_baseline_of_the_paper(words, epochs, milestones):
    found = compose.load([*words, "kfac=none"], ranks=4)
    assert not found.kfac.enabled
    assert (found.trainer.max_epochs, found.schedule.milestones) == (epochs, milestones)
    assert found.optimizer == compose.load(words, ranks=4).optimizer


def test_another_optimizer_has_its_own_rate_and_another_schedule_keeps_the_warm_up():
    found = compose.load([*IMAGENET, "optimizer=adamw", "schedule=cosine"], ranks=16)
    assert (found.optimizer.name, found.optimizer.lr) == ("adamw", 0.001)
    assert (found.schedule.warmup_epochs, found.schedule.base_batch_size) == (5, None)
    assert found.task.label_smoothing == 0.1
    assert compose.load([*IMAGENET, "optimizer=eigen_adam"], ranks=16).kfac.damping is None


def test_benchmarks_choose_no_recipe_and_experiments_load_the_same_files():
    assert compose.load(IMAGENET).optimizer.lr == 0.1
    assert "recipe=none" in local_runs.local_command(IMAGENET, 1)
    row = compose.load(["experiment=table5_fig6_update_interval", "trainer.target=null"])
    chosen = compose.load(["recipe=imagenet_resnet"], ranks=64)
    assert chosen == row == compose.load(["recipe=imagenet_resnet"])
    # Nothing but its values identifies a recipe.
    assert run_id(chosen, job="") == run_id(row, job="")


def test_a_file_of_the_user_is_a_recipe_by_its_name(own):
    own("digits_resnet8", "# Mine. Not this.\noptimizer: {lr: 0.03}\ntrainer: {batch_size: 64}")
    folder = own("lgg_demo_unet", "defaults: [/recipe/lgg_unet, _self_]\noptimizer: {lr: 0.002}")
    found = compose.load([], folder, ranks=2)
    assert (found.optimizer.lr, found.trainer.batch_size) == (0.03, 64)
    chosen = recipes.choose(["trainer.batch_size=8"], folder, 2)
    assert chosen.line() == (
        "recipe=digits_resnet8: Mine. It sets optimizer.lr=0.03. recipe=none turns it off."
    )
    demo = compose.load(["model=unet", "data.root=demo"], folder, ranks=2)
    assert (demo.optimizer.lr, demo.trainer.max_epochs) == (0.002, 100)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipe=imagnet_resnet"], "recipe=imagnet_resnet: no such recipe; did you mean imagen"),
        (["recipe=../experiment/cpu/resnet"], "no such recipe"),
        (["recipe=lgg_unet", "experiment=lgg/unet"], "does not fit experiment=lgg/unet, which"),
        ([*IMAGENET, "kfac.update_freq=x"], "kfac.update_freq=x: expected a whole number"),
        ([*IMAGENET, "trainer.batch_size=0"], "trainer.batch_size=0: must be at least 1"),
        (["recipe=loops"], "recipe=loops: the file loads itself"),
        (["recipe=orphan"], "recipe=orphan: the file loads mother: no such recipe"),
        (["recipe=list"], "expected options, such as optimizer"),
        (["recipe=broken"], "broken.yaml: "),
        (["recipe=typo"], "optimizer.rate"),
        (["recipe=scalar"], "scalar.yaml: kfac: expected options, not 1"),
        (["recipe=text"], "text.yaml: defaults: expected a list"),
        (["recipe=lgg_unet"], "recipe=lgg_unet: needs whole numbers for trainer.batch_size and"),
    ],
)
def test_bad_input(own, words, said):
    own("loops", "defaults: [loops]")
    own("orphan", "defaults: [mother]")
    own("list", "- 1")
    own("broken", "a: [")
    own("scalar", "kfac: 1")
    own("text", "defaults: lgg_unet")
    own("lgg_unet", "trainer: {batch_size: many}")
    folder = own("typo", "optimizer: {rate: 1}")
    with pytest.raises(UsageError) as caught:
        compose.load(words, folder, ranks=1)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_train_says_the_recipe_once_and_cfg_shows_the_result(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert train_command.train([*IMAGENET, "--cfg", "job"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("# recipe=imagenet_resnet: ResNet on ImageNet with K-FAC")
    assert "trainer.batch_size=512 (32 on each of 16 ranks), " in said.splitlines()[0]
    assert yaml.safe_load(said)["trainer"]["batch_size"] == 512
    monkeypatch.delenv("WORLD_SIZE")
    folder = f"runs_dir={tmp_path}"
    with pytest.raises(UsageError, match=r"^data=imagefolder is read from disk: set data\.root="):
        train_command.train([*IMAGENET, folder])
    assert capsys.readouterr().out.startswith("recipe=imagenet_resnet: ")
    assert train_command.train(["-m", "recipe=cifar10_resnet", "seed=1,2", folder]) == 2
    assert capsys.readouterr().out.count("recipe=cifar10_resnet: ") == 1


def test_plan_has_the_recipe_of_the_same_words(capsys):
    assert plan_command.plan([*CIFAR, "--world-size=4", "--out=null"]) == 0
    said = capsys.readouterr().out
    assert "batch 512 over 4 ranks" in said
    assert said.startswith("recipe=cifar10_resnet: ")


def test_help_and_completion_know_the_recipes():
    said = option_help.describe(["recipe"])
    for name in compose.options_of("recipe"):
        assert f"  recipe={name}\n" in said
    assert "ResNet on ImageNet with SGD, the baseline of TPDS 2022" in said
    candidates = setup_command.candidates("kfac-train recipe=", build_parser)
    assert {"recipe=none", "recipe=imagenet_resnet"} <= {*candidates}
    assert "recipe=" in setup_command.candidates("kfac-plan rec", build_parser)
