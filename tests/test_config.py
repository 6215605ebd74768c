"""conf/ and the command line: what is said is what the run gets; bad input is one clear line."""

import dataclasses
import inspect
from dataclasses import asdict

import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import MISSING, OmegaConf

from kfac_bench import bench, build, compose, config, update
from kfac_bench.config import KFACConfig, TrainConfig
from kfac_bench.core import KFAC, coverage, factors, fisher, preconditioner
from kfac_bench.core.damping import LevenbergMarquardt
from kfac_bench.errors import UsageError

GROUPS = ("model", "optimizer", "schedule", "kfac", "data", "task", "backend", "logger")
FUZZ = settings(max_examples=25, deadline=None, derandomize=True)
DEFAULT = compose.load([])
EXPERIMENT_DIR = compose.CONF_DIR / "experiment"
EXPERIMENTS = sorted(
    str(p.relative_to(EXPERIMENT_DIR).with_suffix("")) for p in EXPERIMENT_DIR.rglob("*.yaml")
)


def refused(overrides, config_dir=None):
    """The one line with which the overrides are refused."""
    with pytest.raises(UsageError) as caught:
        compose.load(overrides, config_dir)
    text = str(caught.value)
    assert len(text.splitlines()) == 1, repr(text)
    assert text.isprintable(), repr(text)
    return text


def chosen(found, group):
    """The choice that a composed configuration shows of a group."""
    if group == "kfac":
        return found.kfac.strategy if found.kfac.enabled else "none"
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


@pytest.fixture
def own(tmp_path):
    """Write experiment files into a folder of the user's own; load with it."""

    class Own:
        path = tmp_path / "my_conf"

        def write(self, name, text):
            file = self.path / "experiment" / f"{name}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
            return file

        def load(self, *overrides):
            return compose.load(overrides, self.path)

        def refused(self, *overrides):
            return refused(overrides, self.path)

    return Own()


# ---- every file of conf/ ----


@pytest.mark.parametrize(
    ("group", "choice"), [(g, c) for g in GROUPS for c in compose.options_of(g)]
)
def test_every_choice_composes(group, choice):
    bert = "model=bert_tiny"
    goes_with = {
        "reconstruction": ["model=autoencoder"],
        **{key: ["model=unet"] for key in ("lgg", "segmentation")},
        **{key: ["model=maskrcnn_tiny"] for key in ("coco", "detection")},
        **{key: [bert] for key in ("text", "pretraining")},
        "pictures": ["model=unet", "task=denoising"],
        "denoising": ["model=unet", "data=pictures"],
        **{key: ["model=transformer"] for key in ("pydoc", "language_model")},
        "squad": [bert, "task=question_answering"],
        "question_answering": [bert, "data=squad"],
    }.get(choice, [])
    found = compose.load([*goes_with, f"{group}={choice}"])
    assert chosen(found, group) == choice
    models = {choice, *(x.removeprefix("model=") for x in goes_with)}
    sets_data = {"unet", "transformer", *config.DETECTORS, *config.BERTS} & models
    together = {"model", "data"} if sets_data else {"model"} if goes_with else set()
    for other in set(GROUPS) - {group, "task", *together}:
        assert chosen(found, other) == chosen(DEFAULT, other)


def test_defaults_need_no_data_on_disk():
    assert DEFAULT.data.name == "digits"
    assert DEFAULT.data.root is None
    assert DEFAULT.run_id is None
    assert not DEFAULT.dry_run
    assert chosen(DEFAULT, "kfac") == "comm_opt"


def test_no_file_of_conf_is_left_out():
    folders = {p.name for p in compose.CONF_DIR.iterdir() if p.is_dir()}
    assert folders == {*GROUPS, "experiment", "benchmark", "hardware", "simulation"}
    assert {f"conf/{g}" for g in GROUPS} == {f"conf/{g}" for g in config.VARIANTS}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_an_experiment_file_says_is_what_the_run_gets(name):
    tree = yaml.safe_load((EXPERIMENT_DIR / f"{name}.yaml").read_text())
    defaults = tree.pop("defaults", [])
    found = compose.load([f"experiment={name}"])
    said = dict(leaves(tree))
    assert said or [d for d in defaults if d != "_self_"], "the file says nothing"
    for key, value in said.items():
        assert get(found, key) == value, key
    for group, choice in groups_of(defaults).items():
        assert chosen(found, group) == choice
    for parent in (d for d in defaults if isinstance(d, str) and d != "_self_"):
        inherited = compose.load([f"experiment={parent.removeprefix('/experiment/')}"])
        for option, value, _ in config.options(inherited.trainer, "trainer."):
            if option not in said:
                assert get(found, option) == value, f"{option} of {parent}"


def other_value(name, value, metadata):
    if metadata["choices"]:
        return next(c for c in metadata["choices"] if c != value)
    if isinstance(value, bool):
        return not value
    if name == "schedule.milestones":  # they rise
        return [epoch + 1 for epoch in value]
    if isinstance(value, list):
        return [*value, *value]
    if isinstance(value, str):
        return f"{value}_of_mine"
    return {type(None): 3, int: 2 * (value or 0), float: (value or 0) / 2}[type(value)]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_command_line_wins_over_an_experiment(name):
    tree = yaml.safe_load((EXPERIMENT_DIR / f"{name}.yaml").read_text())
    tree.pop("defaults", None)
    metadata = {k: m for k, _, m in config.options(compose.load([f"experiment={name}"]))}
    told = {k: other_value(k, v, metadata[k]) for k, v in leaves(tree)}
    told |= {"seed": 41, "trainer.eval_batch_size": 77}
    said = [f"{k}={'null' if v is None else v}" for k, v in told.items()]
    found = compose.load([*said, f"experiment={name}"])
    for key, value in told.items():
        assert get(found, key) == value, key


def test_the_command_line_wins_over_a_group_chosen_by_an_experiment():
    found = compose.load(["experiment=digits_resnet", "model=resnet20", "kfac=none"])
    assert found.model.name == "resnet20"
    assert not found.kfac.enabled
    assert found.trainer.max_steps == 120


TO_TARGETS = [name for name in compose.options_of("benchmark") if not bench.load(name).profiles]
"""Benchmarks of time to target; the papers' are in tests/test_rows.py."""
CELLS = [
    pytest.param(cell, id=f"{name}: {cell.label}")
    for name in TO_TARGETS
    for cell in bench.cells(bench.load(name), "runs/test")
]


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_of_every_benchmark_composes(cell):
    found = cell.config()
    assert found.runs_dir == "runs/test"
    assert cell.label.endswith(f"seed {found.seed}")
    assert found.trainer.target is not None


def test_cells_of_the_demo_are_the_optimizers_they_are_called():
    for param in (p for p in CELLS if p.id.startswith("demo") and p.id.endswith("seed 0")):
        cell = param.values[0]
        task, optimizer = cell.label.split()[:2]
        found = cell.config()
        assert found.kfac.enabled == (optimizer == "kfac")
        assert found.optimizer.name == ("adam" if optimizer == "adam" else "sgd")
        assert found.model.name == {"digits_resnet": "resnet8"}.get(task, "autoencoder")


# ---- one schema, one set of defaults ----


def test_kfac_defaults_are_those_of_the_core():
    keywords = {
        name: p.default
        for name, p in inspect.signature(KFAC).parameters.items()
        if p.kind is p.KEYWORD_ONLY and name not in ("collective", "layer_types", "model_parallel")
    }
    ours = asdict(KFACConfig()) | {"skip": tuple(KFACConfig().skip)}
    assert ours.pop("enabled") is True
    assert ours.pop("adaptive_damping") is False
    assert ours.pop("damping_freq") == LevenbergMarquardt().interval
    ours["state_dtype"] = build.DTYPES[ours["state_dtype"]]
    assert ours == keywords
    assert asdict(DEFAULT.kfac) == asdict(KFACConfig()), "conf/kfac/comm_opt.yaml says otherwise"


def test_names_are_those_of_the_core():
    assert list(config.CONVENTIONS) == list(factors.CONVENTIONS)
    assert config.FISHERS == fisher.FISHERS
    assert config.WEIGHT_SHARING == preconditioner.WEIGHT_SHARING
    assert tuple(DEFAULT.kfac.skip) == coverage.DEFAULT_SKIP
    assert list(config.PRECISIONS) == list(update.DTYPES)
    assert list(config.PRECISIONS) == list(build.DTYPES)
    assert tuple(build.DTYPES.values()) == preconditioner.STATE_DTYPES


@pytest.mark.parametrize(
    ("said", "keyword", "value"),
    [
        ("method=ekfac", "method", "ekfac"),
        ("factored_damping=true", "factored_damping", True),
        ("spread=false", "spread", False),
        ("fisher=type2", "fisher", "type2"),
        ("weight_sharing=reduce", "weight_sharing", "reduce"),
        ("state_dtype=bf16", "state_dtype", torch.bfloat16),
        ("skip=[]", "skip", []),
        ("skip=[fc]", "skip", ["fc"]),
        ("max_dim=7", "max_dim", 7),
        ("damping=0.5", "damping", 0.5),
        ("strategy=owner_reduce", "strategy", "owner_reduce"),
        ("grad_worker_fraction=0.25", "grad_worker_fraction", 0.25),
        ("colocate_factors=true", "colocate_factors", True),
        ("balance=memory", "balance", "memory"),
        ("overlap=true", "overlap", True),
    ],
)
def test_what_is_said_of_kfac_is_what_the_core_gets(monkeypatch, said, keyword, value):
    given = {}
    monkeypatch.setattr(build, "KFAC", lambda model, optimizer, **keywords: given.update(keywords))
    build.build_kfac(compose.load([f"kfac.{said}"]).kfac, None, None)
    assert given[keyword] == value
    build.build_kfac(DEFAULT.kfac, None, None)
    assert given[keyword] != value


def test_an_adaptive_damping_starts_from_damping(monkeypatch):
    given = {}
    monkeypatch.setattr(build, "KFAC", lambda model, optimizer, **keywords: given.update(keywords))
    said = ["kfac.adaptive_damping=true", "kfac.damping=0.25", "kfac.damping_freq=7"]
    build.build_kfac(compose.load(said).kfac, None, None)
    damping = given["damping"]
    assert isinstance(damping, LevenbergMarquardt)
    assert (damping.initial, damping.value, damping.interval) == (0.25, 0.25, 7)
    assert {"adaptive_damping", "damping_freq", "enabled"}.isdisjoint(given)


SCHEMAS = [c for variants in config.VARIANTS.values() for c in variants.values()]


@pytest.mark.parametrize("schema", [*SCHEMAS, TrainConfig, config.TrainerConfig])
def test_every_option_has_a_meaning(schema):
    for f in dataclasses.fields(schema):
        if (f.default is MISSING and not f.metadata) or f.name in ("trainer", "logger"):
            continue  # a section
        assert len(f.metadata["help"]) > 3, f.name
        assert "\n" not in f.metadata["help"]
    assert schema.__doc__


def test_help_lists_every_option_and_choice():
    text = compose.describe_options()
    for name, _, meta in config.options(DEFAULT):
        assert f"  {name}=" in text
        assert meta["help"] in text
    for group in GROUPS:
        assert f"{group}={'|'.join(compose.options_of(group))}" in text
    assert "kfac.update_freq=100" in text
    assert "at least 1" in text


def round_trip(found):
    text = compose.to_yaml(found)
    assert OmegaConf.to_container(OmegaConf.create(text)) == asdict(found)
    assert yaml.safe_load(text).keys() == asdict(found).keys()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=autoencoder", "model.hidden=[3,2]", "kfac.kl_clip=null"],
        ["optimizer=adamw", "optimizer.eps=1e-12", "kfac=hybrid_opt", "kfac.skip=['fc','a: b']"],
        ["data=imagefolder", "data.root='/a b/ü: #x'", "run_id='007'", "trainer.target=-0.5"],
    ],
)
def test_to_yaml_says_everything_and_can_be_read_back(overrides):
    round_trip(compose.load(overrides))


@FUZZ
@given(st.text(st.characters(exclude_characters="\x85\u2028\u2029"), max_size=12))
@example("1e3")
@example("0x10")
@example("null")
@example("12:30:45")
@example("${seed}")
@example("???")
def test_to_yaml_keeps_text_as_it_is(text):
    data = dataclasses.replace(DEFAULT.data, root=text)
    read_back = yaml.safe_load(compose.to_yaml(dataclasses.replace(DEFAULT, data=data)))
    assert read_back["data"]["root"] == text


# ---- a folder of the user's own ----


def test_own_experiments_compose_and_build_on_ours(own):
    own.write(
        "mine",
        "# @package _global_\ndefaults:\n  - digits_resnet\n  - override /optimizer: adam\n"
        "  - _self_\noptimizer:\n  lr: 0.002\ntrainer:\n  max_steps: 7\n",
    )
    found = own.load("experiment=mine", "trainer.log_freq=3")
    assert (found.optimizer.name, found.optimizer.lr) == ("adam", 0.002)
    assert (found.trainer.max_steps, found.trainer.log_freq) == (7, 3)
    assert found.trainer.batch_size == own.load("experiment=digits_resnet").trainer.batch_size
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
    assert "mine" in own.refused("experiment=none_such")
    assert "kfac=comm_opt" in compose.describe_options(own.path)
    assert "strong" in compose.describe_options(own.path)


def test_a_run_does_not_remember_the_folder_of_the_one_before(own):
    own.write("mine", "# @package _global_\nseed: 3\n")
    assert own.load("experiment=mine").seed == 3
    assert "mine" not in refused(["experiment=mine"]).partition("choose")[2]


# ---- bad input ----

BAD = [
    # unknown names
    ("kfac.dampign=1", "kfac.dampign: no such option; did you mean damping?"),
    ("trainer.max_step=1", "trainer.max_step: no such option; did you mean max_steps?"),
    ("trainr.max_steps=1", "trainr: no such option; did you mean trainer?"),
    ("expriment=x", "expriment: no such option; did you mean experiment?"),
    ("optimizer.beta1=0.5", "optimizer.beta1: no such option"),
    ("seed.x=1", "seed"),
    ("model=resnet51", "model=resnet51: no such model; did you mean resnet"),
    ("model=foo", "bert_tiny, maskrcnn_resnet50_fpn, maskrcnn_tiny, resnet101, resnet110"),
    ("optimizer=sdg", "choose one of adam, adamw"),
    ("kfac=kaisa", "choose one of comm_opt, hybrid_opt, layer_wise, local_factors, mem_opt"),
    ("data=cifar", "did you mean cifar10?"),
    ("task=classify", "choose one of classification, denoising, detection, language_model"),
    ("logger=wand", "choose one of none, tensorboard, wandb"),
    ("experiment=digits_resnett", "did you mean digits_resnet"),
    ("experiment=maskrcnn", "did you mean fig5bc_maskrcnn_convergence, table6_fig9a_maskrcnn_"),
    ("experiment=zzz", "experiment=zzz: no such experiment; kfac-train --help lists all "),
    ("+extra=1", "extra: no such option"),
    ("++kfac.extra=1", "kfac.extra: no such option"),
    ("+kfac.dampign=1", "kfac.dampign: no such option; did you mean damping?"),
    ("+trainer.extra.deep=1", "trainer.extra: no such option"),
    ("~model", "model"),
    ("~kfac.damping", "damping"),
    # wrong type
    ("trainer.max_steps=abc", "trainer.max_steps=abc: expected a whole number"),
    ("seed=1.5", "seed=1.5: expected a whole number"),
    ("kfac.damping=yes", "kfac.damping=yes: expected a number"),
    ("seed=null", "seed"),
    ("dry_run=maybe", "dry_run=maybe: expected true or false"),
    ("kfac.skip=abc", "kfac.skip"),
    ("trainer=3", "trainer"),
    ("trainer=null", "trainer"),
    ("model.name=???", "name"),
    # out of range
    ("kfac.update_freq=-3", "kfac.update_freq=-3: must be at least 1"),
    ("kfac.update_freq=0", "kfac.update_freq=0: must be at least 1"),
    ("kfac.damping=0", "kfac.damping=0.0: must be above 0"),
    ("kfac.damping=-1e-3", "kfac.damping=-0.001: must be above 0"),
    ("kfac.damping=nan", "kfac.damping=nan: must be above 0"),
    ("kfac.damping=inf", "kfac.damping=inf: must be above 0"),
    ("kfac.damping=1e-400", "kfac.damping=0.0: must be above 0"),
    ("kfac.kl_clip=0", "kfac.kl_clip=0.0: must be above 0"),
    ("kfac.factor_decay=1", "kfac.factor_decay=1.0: must be at least 0 and below 1"),
    ("kfac.grad_worker_fraction=1.5", "above 0 and at most 1"),
    ("optimizer.lr=nan", "optimizer.lr=nan: must be above 0"),
    ("optimizer.momentum=1", "optimizer.momentum=1.0: must be at least 0 and below 1"),
    ("seed=-1", "seed=-1: must be at least 0"),
    ("seed=4294967296", "seed=4294967296: must be at least 0 and below"),
    ("trainer.batch_size=0", "trainer.batch_size=0: must be at least 1"),
    ("trainer.target=nan", "trainer.target=nan"),
    ("kfac.method=qr", "kfac.method=qr: choose one of eigen, inverse"),
    ("kfac.factor_convention=x", "choose one of kfc, sc20, kaisa"),
    ("kfac.fisher=exact", "kfac.fisher=exact: choose one of empirical, mc, type2"),
    ("kfac.weight_sharing=x", "choose one of expand, reduce"),
    ("kfac.state_dtype=fp8", "kfac.state_dtype=fp8: choose one of fp32, bf16, fp16"),
    ("kfac.max_dim=0", "kfac.max_dim=0: must be at least 1"),
    ("kfac.damping_freq=0", "kfac.damping_freq=0: must be at least 1"),
    ("kfac.spread=some", "kfac.spread=some: expected true or false"),
    ("trainer.precision=fp8", "trainer.precision=fp8: choose one of fp32, bf16, fp16"),
    ("trainer.accumulate=0", "trainer.accumulate=0: must be at least 1"),
    ("kfac.strategy=x", "choose one of comm_opt"),
    ("model.name=resnet51", "model.name=resnet51: choose one of resnet18"),
    ("trainer.device=tpu", "choose one of auto, cpu, cuda"),
    ("model.name='a\nb'", "model.name="),
    ("kfac.skip=['(']", "kfac.skip"),
    # options that clash
    ("task=reconstruction", "model=resnet8 does not fit task=reconstruction"),
    ("kfac.update_freq=7", "must be a multiple of kfac.factor_update_freq=10"),
    ("trainer.accumulate=257", "trainer.accumulate=257 is more than trainer.batch_size=256"),
    # what is not an override
    ("seed=1,2", "'seed=1,2': give one value, or add --multirun"),
    ("kfac=comm_opt,layer_wise", "add --multirun"),
    ("seed=range(3)", "--multirun"),
    ("foo", "'foo' is not an override: write option=value"),
    ("", "'' is not an override: write option=value"),
    ("a b", "'a b' is not an override"),
    ("kfac.damping", "'kfac.damping' is not an override"),
    ("kfac.damping=[1", "'kfac.damping=[1' is not an override"),
    ("=3", "=3"),
    ("model=", "model="),
    ("model=[[]]", "model=[[]]"),
    ("kfac.damping=${nope}", "nope"),
    ("run_id=${oc.env:KFAC_BENCH_NO_SUCH}", "KFAC_BENCH_NO_SUCH"),
    ("data.root=a\x1b[31mb", "data.root"),
]


@pytest.mark.parametrize(("override", "fragment"), BAD, ids=[b[0] for b in BAD])
def test_bad_input_is_one_clear_line(override, fragment):
    assert fragment in refused([override])


def test_model_and_task_must_fit():
    text = refused(["model=autoencoder", "task=classification"])
    assert "model=autoencoder does not fit task=classification" in text
    assert compose.load(["model=autoencoder"]).task.name == "reconstruction"


def test_ekfac_and_a_damping_of_the_factors_clash():
    said = ["kfac.method=ekfac", "kfac.factored_damping=true"]
    assert "kfac.factored_damping=true does not fit kfac.method=ekfac" in refused(said)
    compose.load([*said, "kfac=none"])  # of no matter
    compose.load(["kfac.method=inverse", "kfac.factored_damping=true"])


def test_a_misspelt_option_names_the_one_of_the_group_in_use():
    text = refused(["optimizer=adam", "optimizer.beta_1=0.5"])
    assert "did you mean beta1?" in text


HEAD = "# @package _global_\n"
BAD_FILES = {
    "syntax": (HEAD + "trainer:\n  max_steps: 5\n bad: [1\n", 4, "not valid YAML"),
    "tab": (HEAD + "trainer:\n\tmax_steps: 5\n", 3, "not valid YAML"),
    "unclosed": (HEAD + "kfac: {damping: 1\n", 3, "not valid YAML"),
    "twice": (HEAD + "trainer:\n  max_steps: 5\n  max_steps: 6\n", 4, "duplicate key max_steps"),
    "misspelt": (
        HEAD + "trainer:\n  max_steps: 5\n  max_stpes: 7\n",
        4,
        "trainer.max_stpes: no such option; did you mean max_steps?",
    ),
    "section": (HEAD + "seed: 1\ntriner:\n  max_steps: 5\n", 3, "triner: no such option"),
    "after_defaults": (
        HEAD + "defaults:\n  - override /kfac: none\n  - _self_\nkfac:\n  dampng: 7\n",
        6,
        "kfac.dampng: no such option; did you mean damping?",
    ),
    "type": (
        HEAD + "trainer:\n  max_steps: 5\n  batch_size: many\n",
        4,
        "trainer.batch_size=many: expected a whole number",
    ),
    "flow": (HEAD + "seed: 1\ntrainer: {max_steps: 5, target: high}\n", 3, "expected a number"),
    "group": (HEAD + "defaults:\n  - override /optimzer: sgd\n", 3, "did you mean optimizer?"),
    "choice": (HEAD + "defaults:\n  - override /optimizer: sdg\n", None, "did you mean sgd?"),
    "parent": (HEAD + "defaults:\n  - digits_resnett\n", None, "digits_resnett"),
    "range": (HEAD + "trainer:\n  batch_size: 0\n", None, "trainer.batch_size=0: must be"),
    "null_section": (HEAD + "seed: 1\ntrainer: null\n", 3, "trainer"),
    "list_section": (HEAD + "trainer: [1, 2]\n", None, "TrainerConfig"),
    "interpolation": (HEAD + "trainer:\n  max_steps: ${nope}\n", None, "nope"),
    "bytes": (b"# @package _global_\n# caf\xe9\nseed: 1\n", None, "bytes.yaml"),
    "nul": (HEAD + "seed: \x00\n", None, "nul.yaml"),
    "no_mapping": ("false\n", None, "experiment=no_mapping"),
    "no_package": ("trainer:\n  max_steps: 5\n", None, "# @package _global_"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_experiment_files_name_file_and_line(own, name):
    text, line, fragment = BAD_FILES[name]
    file = own.write(name, text)
    said = own.refused(f"experiment={name}")
    assert fragment in said
    if line is not None:
        assert said.startswith(f"{file}:{line}: ")


# ---- anything at all ----

NAMES = [name for name, _, _ in config.options(DEFAULT)]
KEYS = st.sampled_from(
    [*NAMES, *GROUPS, "experiment", "trainer", "model.hidden", "optimizer.beta1", "hydra.job.name"]
)
VALUES = st.one_of(
    st.text(max_size=8),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        [
            *("?", "~", "*", "&", "!", "%", "@", "`", "|", ">", "/", "null", "???", "nan", "-inf"),
            *("1e999", "true", "[]", "{}", "[[1]]", "''", "{a: 1}", "[null]", "1,2", "range(2)"),
            *("${seed}", "${nope}", "${trainer}", "${oc.env:X}", '"\n"', "'a\nb'", "é"),
            *("none", "sgd", "resnet8", "../x", "0x1f", "1_000"),
        ]
    ),
)
SIGNS = st.sampled_from(["", "", "", "", "+", "++", "~"])
OVERRIDES = st.builds(lambda sign, key, value: f"{sign}{key}={value}", SIGNS, KEYS, VALUES)


def composes_or_is_refused(overrides, config_dir=None):
    said = None
    try:
        found = compose.load(overrides, config_dir)
    except UsageError as error:
        said = str(error)
    if said is None:
        assert isinstance(found, TrainConfig)
        compose.to_yaml(found)
    else:
        assert len(said.splitlines()) == 1, repr(said)


@FUZZ
@given(st.lists(st.text(max_size=20), min_size=1, max_size=2))
def test_arbitrary_text_composes_or_is_refused(overrides):
    composes_or_is_refused(overrides)


@FUZZ
@given(st.lists(OVERRIDES, min_size=1, max_size=3))
@example(["kfac={}", "seed=${trainer}"])
@example(["model.name='\n'"])
@example(["trainer=${trainer}"])
def test_arbitrary_values_of_real_options_compose_or_are_refused(overrides):
    composes_or_is_refused(overrides)


TREES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(
            st.sampled_from(["trainer", "max_steps", "kfac", "seed", "defaults", "x", "", "hydra"]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)


@settings(FUZZ, max_examples=15)
@given(TREES)
def test_arbitrary_experiment_files_compose_or_are_refused(tmp_path_factory, tree):
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    (folder / "experiment").mkdir(parents=True, exist_ok=True)
    (folder / "experiment" / "any.yaml").write_text(HEAD + yaml.safe_dump(tree))
    composes_or_is_refused(["experiment=any"], folder)
