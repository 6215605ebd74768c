"""conf/ and a folder of the user's own: what is said there is what the run gets."""

import functools

import pytest
import yaml

from kfac_bench.benchmark import grid, schema, suite
from kfac_bench.config import compose, option_help, options, problem_file
from kfac_bench.config.train import LOGGERS
from kfac_bench.errors import UsageError
from tests.support import ROOT
from tests.support.configs import DEFAULT, GROUPS, Own, quick_load, refused
from tests.support.language import gpt2_folder
from tests.support.quick import quick_if

EXPERIMENT_DIR = compose.CONF_DIR / "experiment"
EXPERIMENTS = sorted(
    str(p.relative_to(EXPERIMENT_DIR).with_suffix("")) for p in EXPERIMENT_DIR.rglob("*.yaml")
)


@functools.cache
def experiment(name):
    """Return the composed experiment; tests must not change it."""
    return compose.load([f"experiment={name}"])


def experiment_or_recipe(parent):
    """Return what an entry of the defaults list of an experiment composes to."""
    name = parent.removeprefix("/recipe/")
    return experiment(name.removeprefix("/experiment/")) if name == parent else recipe(name)


@functools.cache
def recipe(name):
    """Return the composed recipe; tests must not change it."""
    return compose.load([f"recipe={name}"])


def chosen(found, group):
    """The choice that a composed configuration shows of a group."""
    if group == "kfac" and found.kfac.method == "eigen_adam":
        return "eigen_adam"
    if group == "kfac":
        return found.kfac.strategy if found.kfac.enabled else "none"
    if group == "logger":
        return next((name for name in LOGGERS if getattr(found.logger, name)), "none")
    return getattr(found, group).name


def leaves(tree, prefix=""):
    """(dotted name, value) of every value of a YAML tree."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def get(found, name):
    for part in name.split("."):
        found = getattr(found, part)
    return found


def groups_of(defaults):
    """{group: choice} of the ``override /group: choice`` entries of a defaults list."""
    entries = [item for entry in defaults if isinstance(entry, dict) for item in entry.items()]
    return {k.removeprefix("override /"): v for k, v in entries if k.startswith("override /")}


# ---- every file of conf/ ----


@pytest.mark.parametrize(
    ("group", "choice"), [(g, c) for g in GROUPS for c in compose.options_of(g)]
)
def test_every_choice_composes(group, choice, tmp_path):
    bert = "model=bert_tiny"
    goes_with = {
        "reconstruction": ["model=autoencoder"],
        **{key: ["model=unet"] for key in ("lgg", "segmentation")},
        **{key: ["model=maskrcnn_tiny"] for key in ("coco", "detection")},
        **{key: [bert] for key in ("text", "text_parquet", "pretraining")},
        "pictures": ["model=unet", "task=denoising"],
        "denoising": ["model=unet", "data=pictures"],
        **{key: ["model=transformer"] for key in ("pydoc", "language_model")},
        "squad": [bert, "task=question_answering"],
        "question_answering": [bert, "data=squad"],
        "eigen_adam": ["optimizer=eigen_adam"],
        "problem": [f"problem={ROOT / 'examples/problems/digits.py'}"],
        **{key: ["model.architecture=resnet18"] for key in ("torchvision", "timm")},
    }.get(choice, [])
    if choice == "huggingface":
        goes_with = [f"model.path={gpt2_folder(tmp_path)}"]
    problem_file.run_named(goes_with)
    found = compose.load([*goes_with, f"{group}={choice}"])
    assert chosen(found, group) == choice
    models = {choice, *(x.removeprefix("model=") for x in goes_with)}
    with_data = ("unet", "transformer", "lstm", "maskrcnn", "bert", "huggingface")
    sets_data = any(m.startswith(with_data) for m in models)
    together = {"model", "data"} if sets_data else {"model"} if goes_with else set()
    together |= {"data", "model"} if choice == "problem" else set()
    together = {"optimizer", "kfac"} if choice == "eigen_adam" else together
    for other in set(GROUPS) - {group, "task", *together}:
        assert chosen(found, other) == chosen(DEFAULT, other)


def test_defaults_need_no_data_on_disk():
    assert DEFAULT.data.name == "digits"
    assert DEFAULT.data.root is None
    assert DEFAULT.run_id is None
    assert not DEFAULT.dry_run
    assert chosen(DEFAULT, "kfac") == "comm_opt"


def test_each_folder_of_conf_is_a_known_group():
    folders = {p.name for p in compose.CONF_DIR.iterdir() if p.is_dir()}
    others = {"experiment", "recipe", "benchmark", "hardware", "pinned", "simulation"}
    assert folders == {*GROUPS, *others}
    assert set(GROUPS) == set(compose.GROUPS)


@pytest.mark.parametrize("name", quick_if(EXPERIMENTS[::6].__contains__, EXPERIMENTS))
def test_a_run_gets_every_option_of_its_experiment_file(name):
    tree = yaml.safe_load((EXPERIMENT_DIR / f"{name}.yaml").read_text())
    defaults = tree.pop("defaults", [])
    found = experiment(name)
    said = dict(leaves(tree))
    assert said or [d for d in defaults if d != "_self_"], "the file says nothing"
    for key, value in said.items():
        assert get(found, key) == value, key
    for group, choice in groups_of(defaults).items():
        assert chosen(found, group) == choice
    for parent in (
        d for d in defaults if isinstance(d, str) and d not in ("_self_", "/pinned/kfac")
    ):
        inherited = experiment_or_recipe(parent)
        for option, value, _ in options(inherited.trainer, "trainer."):
            if option not in said:
                assert get(found, option) == value, f"{option} of {parent}"


def other_value(name, value, metadata):
    if metadata["choices"]:
        return next(c for c in metadata["choices"] if c != value)
    if isinstance(value, bool):
        return not value
    if name == "schedule.milestones" or (name.endswith("_epochs") and isinstance(value, list)):
        # Epochs rise.
        return [epoch + 1 for epoch in value]
    if isinstance(value, list):
        return [*value, *value]
    if isinstance(value, str):
        return f"{value}_of_mine"
    return {type(None): 3, int: 2 * (value or 0), float: (value or 0) / 2}[type(value)]


@pytest.mark.parametrize(
    "name",
    # A label with a comma, a regular expression with a backslash, and neither.
    [
        "cpu/resnet_128_eigen_identity",
        "table4a_bert_kfac_phase2/paper",
        "digits/autoencoder_adam",
    ],
)
def test_the_command_line_wins_over_an_experiment(name):
    tree = yaml.safe_load((EXPERIMENT_DIR / f"{name}.yaml").read_text())
    tree.pop("defaults", None)
    metadata = {k: m for k, _, m in options(experiment(name))}
    told = {k: other_value(k, v, metadata[k]) for k, v in leaves(tree)}
    told |= {"seed": 41, "trainer.eval_batch_size": 77}
    told |= {"trainer.target": 0.5} if "trainer.target" in told else {}  # at most 1
    # Python doubles the backslash of a regular expression, which Hydra would not undo.
    values = {k: "null" if v is None else str(v).replace("\\\\", "\\") for k, v in told.items()}
    if "label" in values:  # it may contain a comma
        values["label"] = f"'{values['label']}'"
    said = [f"{k}={v}" for k, v in values.items()]
    found = compose.load([*said, f"experiment={name}"])
    for key, value in told.items():
        assert get(found, key) == value, key


def test_the_command_line_wins_over_a_group_chosen_by_an_experiment():
    found = compose.load(["experiment=digits/resnet", "model=resnet20", "kfac=none"])
    assert found.model.name == "resnet20"
    assert not found.kfac.enabled
    assert found.trainer.max_steps == 120


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.hidden=[16,6]", "model=autoencoder", "kfac.skip=['fc','a: b']"],
        ["optimizer=adam", "optimizer.lr=1e-3", "kfac=none", "trainer.target=null", "seed=7"],
        ["experiment=kaisa_unet_lgg", "profile=smoke", "trainer.max_steps=3", "dry_run=true"],
        ["experiment=digits/resnet", "trainer.max_steps=1", "trainer.max_steps=2", "run_id='007'"],
    ],
)
def test_the_quick_composition_of_the_other_tests_is_the_composition(overrides):
    assert quick_load(overrides) == compose.load(overrides)
    quick_load(overrides).trainer.log_freq = 99
    assert quick_load(overrides) == compose.load(overrides), "a caller changed another's"


def test_the_quick_composition_has_recipes_and_variables(monkeypatch):
    words = ["model=resnet32", "data=cifar10", "data.root=x", "trainer.threads=1"]
    assert quick_load(words, None, 2) == compose.load(words, None, 2) != quick_load(words)
    quick_load([])
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for words in ([], ["logger=none", "logger.wandb=true"]):
        assert quick_load(words) == compose.load(words)
        assert quick_load(words).logger.project == "mine"


def test_the_quick_composition_refuses_what_the_composition_refuses():
    for bad in (["kfac.dampign=1"], ["kfac.damping=0"], ["model=foo"], ["+extra=1"], ["~model"]):
        with pytest.raises(UsageError) as caught:
            quick_load(bad)
        assert str(caught.value) == refused(bad)


TO_TARGETS = sorted({*compose.options_of("benchmark")} - {*suite.ORDER, *suite.CLAIMS})
"""Benchmarks of time to target; those with profiles are in tests/benchmark/test_rows.py."""


@functools.cache
def cells_of(name):
    """Return the cells of the first seed."""
    cells = grid.cells(schema.load(name), "runs/test")
    return [cell for cell in cells if cell.seed == cells[0].seed]


@pytest.mark.parametrize("name", TO_TARGETS)
def test_every_cell_of_every_benchmark_composes(name):
    assert cells_of(name) or name == "try", "`try` gets its cells from the command line"
    for cell in cells_of(name):
        found = cell.config()
        assert found.runs_dir == "runs/test"
        assert cell.label.endswith(f"seed {found.seed}")
        # Two benchmarks compare final accuracies.
        assert found.trainer.target is not None or name in ("resnet50_digits", "damping_of_claim1")


def test_cells_of_the_demo_have_the_optimizers_of_their_labels():
    for cell in cells_of("demo"):
        task, optimizer = cell.label.split()[:2]
        found = cell.config()
        assert found.kfac.enabled == (optimizer == "kfac")
        assert found.optimizer.name == ("adam" if optimizer == "adam" else "sgd")
        assert found.model.name == {"resnet": "resnet8"}.get(task, "autoencoder")


# ---- a folder of the user's own ----


@pytest.fixture
def own(tmp_path):
    return Own(tmp_path / "my cönf (1)")


def test_own_experiments_compose_and_build_on_ours(own):
    own.write(
        "mine",
        "# @package _global_\ndefaults:\n  - digits/resnet\n  - override /optimizer: adam\n"
        "  - _self_\noptimizer:\n  lr: 0.002\ntrainer:\n  max_steps: 7\n",
    )
    found = own.load("experiment=mine", "trainer.log_freq=3")
    assert (found.optimizer.name, found.optimizer.lr) == ("adam", 0.002)
    assert (found.trainer.max_steps, found.trainer.log_freq) == (7, 3)
    assert found.trainer.batch_size == own.load("experiment=digits/resnet").trainer.batch_size
    assert found.model.name == "resnet8"


def test_own_choices_of_a_group_are_found_and_listed(own):
    own.write("mine", "# @package _global_\nseed: 3\n")
    folder = own.path / "kfac"
    folder.mkdir()
    (folder / "strong.yaml").write_text(
        "defaults: [/schema/kfac/base@_here_, _self_]\ndamping: 0.5\n"
    )
    assert own.load("kfac=strong").kfac.damping == 0.5
    assert "strong" in own.refused("kfac=weak")
    assert "mine" in own.refused("experiment=mines")
    assert "kfac=comm_opt" in option_help.describe([], own.path)
    assert "strong" in option_help.describe([], own.path)


def test_a_run_does_not_remember_the_folder_of_the_one_before(own):
    own.write("mine", "# @package _global_\nseed: 3\n")
    assert own.load("experiment=mine").seed == 3
    assert "did you mean mine" not in refused(["experiment=mines"])
