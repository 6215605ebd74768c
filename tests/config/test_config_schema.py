"""Options: one schema, one set of defaults; each has a meaning and can be read back."""

import dataclasses
import inspect
from dataclasses import asdict, fields

import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import MISSING, OmegaConf

from kfac_bench import config
from kfac_bench.config import (
    KFACConfig,
    TrainConfig,
    compose,
    option_help,
    option_table,
)
from kfac_bench.config.groups import TABLES
from kfac_bench.config.options import Role
from kfac_bench.core import KFAC
from kfac_bench.core.build_eigen_adam import KFAC_DEFAULTS
from kfac_bench.core.damping import LevenbergMarquardt
from kfac_bench.core.eigen_adam_optimizer import EigenAdam
from kfac_bench.core.kernels.gram import CONVENTIONS
from kfac_bench.core.kfac_options import OPTIONS, state_dtypes
from kfac_bench.errors import UsageError
from kfac_bench.training import build, update
from tests.support.configs import DEFAULT, GROUPS

OF_SCRIPTS = ("collective", "layer_types", "model_parallel", "preset")
"""Keywords of KFAC that are no options of kfac-train."""


def test_kfac_defaults_are_equal_to_those_of_the_core():
    keywords = {
        name: p.default
        for name, p in inspect.signature(KFAC).parameters.items()
        if p.kind is p.KEYWORD_ONLY and name not in OF_SCRIPTS
    }
    ours = asdict(KFACConfig()) | {"skip": tuple(KFACConfig().skip)}
    assert ours.pop("enabled") is True
    assert ours.pop("adaptive_damping") is False
    assert ours.pop("damping_freq") == LevenbergMarquardt().interval
    assert ours.pop("damping_decay_epochs") == []
    assert ours.pop("interval_growth_epochs") == []
    del ours["damping_decay"], ours["interval_growth"]
    ours["state_dtype"] = state_dtypes()[ours["state_dtype"]]
    assert ours == keywords
    assert asdict(DEFAULT.kfac) == asdict(KFACConfig()), "conf/kfac/comm_opt.yaml says otherwise"


def test_choices_are_equal_to_those_of_the_core():
    assert OPTIONS["factor_convention"].choices == tuple(CONVENTIONS)
    assert list(config.PRECISIONS) == list(update.AUTOCAST_DTYPES)
    assert list(config.PRECISIONS) == list(state_dtypes())


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
        ("block_size=7", "block_size", 7),
        ("damping=0.5", "damping", 0.5),
        ("strategy=owner_reduce", "strategy", "owner_reduce"),
        ("grad_worker_fraction=0.25", "grad_worker_fraction", 0.25),
        ("colocate_factors=true", "colocate_factors", True),
        ("balance=memory", "balance", "memory"),
        ("overlap=true", "overlap", True),
        ("background=true", "background", True),
        ("grafting=false", "grafting", False),
        ("factor_init=identity", "factor_init", "identity"),
    ],
)
def test_each_kfac_option_reaches_the_core(monkeypatch, said, keyword, value):
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


SCHEMAS = [choice for table in TABLES.values() for choice in table.values()]


def options_of(schema):
    """Fields of a schema that are options, not groups of options."""
    return [
        f
        for f in dataclasses.fields(schema)
        if f.name not in ("trainer", "logger") and (f.default is not MISSING or f.metadata)
    ]


@pytest.mark.parametrize("schema", [*SCHEMAS, TrainConfig, config.TrainerConfig])
def test_every_option_has_a_meaning(schema):
    for f in options_of(schema):
        assert len(f.metadata["help"]) > 3, f.name
        assert "\n" not in f.metadata["help"]
    assert schema.__doc__


@pytest.mark.parametrize("schema", [*SCHEMAS, TrainConfig, config.TrainerConfig])
def test_every_option_has_a_role(schema):
    for f in options_of(schema):
        assert f.metadata["role"] in Role, f.name
        assert not f.metadata["resumable"] or f.metadata["role"] is Role.RESULT, f.name


def test_the_original_value_is_that_of_the_choice():
    for optimizer, beta2 in (("adam", 0.999), ("muon", 0.95), ("adam of later", MISSING)):
        given = {"optimizer.name": optimizer}
        assert option_table.declared("optimizer.beta2", given).original == beta2
        assert dict(option_table.original_results(given)).get("optimizer.beta2", MISSING) == beta2
        assert option_table.declared("data.root", given).role is Role.PLACE
    defaults = dict(option_table.original_results({"kfac.damping": 1, "trainer.target": 2}))
    assert defaults["kfac.skip"] == ["Norm", "Embedding"]
    assert "trainer.predictions" not in defaults


def test_an_unknown_option_is_part_of_the_result():
    for name in ("kfac", "kfac.damping.x", "trainer.predictions_2", "backend.names", ""):
        assert option_table.declared(name, {}) == option_table.DeclaredOption(
            Role.RESULT, False, MISSING
        )


def test_an_unknown_option_of_the_loggers_is_a_record():
    """Runs of older versions have logger.name, and still continue and share a row of a table."""
    assert option_table.declared("logger.name", {}).role is Role.RECORD


def test_help_lists_every_option_and_choice():
    text = option_help.describe([])
    unbroken = " ".join(text.split())
    for name, _, meta in config.options(DEFAULT):
        assert f"  {name}=" in text
        assert meta["help"].replace("|", "| ") in unbroken.replace("|", "| ")
    unwrapped = "".join(line.strip() for line in text.splitlines())
    for group in GROUPS:
        assert f"{group}={'|'.join(compose.options_of(group))}" in unwrapped
    assert "kfac.update_freq=100" in text
    assert "at least 1" in text
    assert max(map(len, text.splitlines())) <= 80


def test_help_of_one_option_says_default_type_and_range():
    text = option_help.describe(["kfac.damping"])
    meaning = next(f for f in fields(KFACConfig) if f.name == "damping").metadata["help"]
    assert meaning in " ".join(text.split())
    for line in ("default: null", "type:    number or null", "allowed: above 0"):
        assert f"  {line}" in text.splitlines()


def test_help_of_an_option_says_the_defaults_of_each_choice():
    lines = option_help.describe(["optimizer.beta2"]).splitlines()
    assert not [line for line in lines if "sgd" in line]
    for choice in ("adam", "soap"):
        value = option_table.of_choice("optimizer", choice)
        (beta2,) = (o.default for o in value if o.name == "optimizer.beta2")
        assert any(str(beta2) in line and choice in line for line in lines), choice


def test_help_tells_meanings_of_one_name_apart():
    """Nesterov's variant is something else with Adam; a text has no image size."""
    text = option_help.describe(["optimizer.nesterov"])
    sgd, adam = text.split("\n\n  default: ")[:2]
    assert "NAdam" not in sgd
    assert adam.startswith("false with optimizer=sgd|lars\n")
    assert "NAdam" in adam
    every = " ".join(option_help.describe([]).split())
    assert "characters of an example (at least 1) only with data=pydoc" in every
    assert "tokens of an example (at least 8) only with data=text" in every
    assert "text has no images" not in every
    assert "image_size" not in option_help.describe(["data=text"])


def test_help_of_a_group_and_of_a_choice():
    group = option_help.describe(["optimizer"])
    assert group.startswith("  optimizer=adam|adamw|")
    assert "optimizer.beta2=" in group
    assert "kfac." not in group
    assert option_help.describe(["from"]).startswith("from=FILE: the options of an earlier run")
    choice = option_help.describe(["optimizer=sgd"])
    assert choice.startswith("optimizer=sgd: ")
    assert "optimizer.beta2" not in choice
    assert "lgg/unet" in option_help.describe(["experiment"])
    assert "model.hidden=" in option_help.describe(["model=autoencoder"])
    two = option_help.describe(["trainer", "seed"])
    assert "trainer.batch_size=256" in two
    assert "seed\n" in two


def test_help_of_hardware_lists_the_machines_with_what_their_files_say():
    text = option_help.describe(["hardware"])
    lines = text.splitlines()
    machines = [line.strip() for line in lines if line.startswith("  --hardware ")]
    assert machines == [f"--hardware {name}" for name in compose.options_of("hardware")]
    place = lines.index("  --hardware theta_a100") + 1
    said = " ".join(line.strip() for line in lines[place : lines.index("  --hardware two_cores")])
    assert said.startswith("Argonne ThetaGPU: DGX A100,")
    assert said.endswith("mixed precision, DDP."), "the second sentence is left out"
    for command in ("kfac-plan simulate", "kfac-bench scaling"):
        assert command in " ".join(text.split())
    assert max(map(len, lines)) <= 80
    assert option_help.describe(["hardware=two_cores"]) == text


def test_help_of_hardware_reads_the_folder_of_the_user(tmp_path):
    own = tmp_path / "hardware"
    own.mkdir()
    (own / "bare.yaml").write_text("network: {}\n# Not about the machine.\n")
    (own / "two_cores.yaml").write_text("# My laptop. It is slow.\nnetwork: {}\n")
    text = option_help.describe(["hardware"], tmp_path)
    assert "  --hardware bare\n  --hardware h100_ndr\n      A cluster of DGX H100" in text
    assert text.endswith("  --hardware two_cores\n      My laptop.")


def test_default_values_in_the_help_are_those_of_a_run():
    shown = {name: found[0][1].default for name, found in option_table.every_option().items()}
    run = {name: value for name, value, _ in config.options(DEFAULT)}
    # Each run with W&B has a project; see test_variables_of_wandb_fill_options.
    assert {name: shown[name] for name in run} == run | {"logger.project": None}


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("kfac.dampin", "kfac.damping"),
        ("optimiser", "optimizer"),
        ("model=unets", "unet"),
        ("hardwar", "hardware"),
    ],
)
def test_help_of_an_unknown_word_is_one_line(word, meant):
    with pytest.raises(UsageError, match=rf"^--help {word}: no such .*did you mean {meant}\?$"):
        option_help.describe([word])


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


@pytest.mark.parametrize(
    "text", [["model=transformer"], ["model=bert_tiny"], ["experiment=squad_bert", "profile=smoke"]]
)
def test_cfg_job_hides_the_image_size_of_text(text):
    found = compose.load(text)
    assert found.data.name in ("pydoc", "text", "squad")
    assert "image_size: 0\n" in compose.to_yaml(found), "run ids and old runs' files have it"
    read_back = yaml.safe_load(compose.shown(found))
    assert {k for k, v in asdict(found).items() if read_back[k] != v} == {"data"}
    assert asdict(found)["data"] == {**read_back["data"], "image_size": 0}
    assert "image_size" not in read_back["data"]
    images = compose.load(["model=unet"])
    assert yaml.safe_load(compose.shown(images)) == asdict(images)


@settings(max_examples=25, deadline=None, derandomize=True)
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


def test_the_harness_and_eigen_adam_have_the_same_options():
    """``optimizer=eigen_adam`` and ``kfac_bench.eigen_adam(model)`` train in the same way."""
    chosen = compose.load(["optimizer=eigen_adam"])
    assert {name: getattr(chosen.kfac, name) for name in KFAC_DEFAULTS} == KFAC_DEFAULTS
    built = EigenAdam([torch.nn.Parameter(torch.zeros(2, 2))])
    harness = chosen.optimizer.build([{"params": [torch.nn.Parameter(torch.zeros(2, 2))]}], None)
    assert built.rule == harness.rule
    assert built.defaults["lr"] == harness.defaults["lr"]
