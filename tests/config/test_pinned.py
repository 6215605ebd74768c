"""Experiments do not depend on the defaults of K-FAC: they load conf/pinned/kfac.yaml."""

import dataclasses

import pytest
import yaml
from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import MISSING, OmegaConf

from kfac_bench.config import KFACConfig, compose
from kfac_bench.config.options import options
from kfac_bench.training.run_directory import run_id
from tests.support.configs import quick_load, refused
from tests.support.quick import quick_if

EXPERIMENT_DIR = compose.CONF_DIR / "experiment"
EXPERIMENTS = sorted(
    str(p.relative_to(EXPERIMENT_DIR).with_suffix("")) for p in EXPERIMENT_DIR.rglob("*.yaml")
)
OF_2026 = {
    "grad_worker_fraction": None,
    "colocate_factors": None,
    "balance": "compute",
    "overlap": False,
    "method": "eigen",
    "update_freq": 100,
    "factor_update_freq": 10,
    "spread": None,
    "damping": 0.001,
    "factored_damping": False,
    "adaptive_damping": False,
    "damping_freq": 5,
    "kl_clip": 0.001,
    "factor_decay": 0.95,
    "factor_convention": "kfc",
    "fisher": "empirical",
    "weight_sharing": "expand",
    "state_dtype": "fp32",
    "skip": ["Norm", "Embedding"],
    "max_dim": 8192,
}
"""The defaults with which the tables of EXPERIMENTS.md were made."""
BY_CHOICE = ("enabled", "strategy")
"""Options that each choice of the group ``kfac`` sets."""


def pinned():
    return yaml.safe_load((compose.CONF_DIR / "pinned" / "kfac.yaml").read_text())


def test_every_option_of_kfac_is_pinned_to_what_it_was():
    names = {field.name for field in dataclasses.fields(KFACConfig)} - {*BY_CHOICE}
    assert pinned().keys() == names, "a new option: pin what earlier versions did"
    assert {name: pinned()[name] for name in OF_2026} == OF_2026


def test_pinned_values_are_the_original_values_so_that_run_ids_stay():
    originals = {name: meta["original"] for name, _, meta in options(KFACConfig())}
    assert pinned() == {name: originals[name] for name in pinned()}


@pytest.fixture
def no_defaults(monkeypatch):
    """Take the default from each option of K-FAC that is not in BY_CHOICE."""
    base = OmegaConf.structured(KFACConfig)
    for field in dataclasses.fields(KFACConfig):
        if field.name not in BY_CHOICE:
            base[field.name] = MISSING
            # OmegaConf reads the fields again when it merges.
            monkeypatch.setattr(field, "default", MISSING)
            monkeypatch.setattr(field, "default_factory", dataclasses.MISSING)
    node = ConfigNode("base.yaml", base, "schema/kfac", None, None)
    monkeypatch.setitem(ConfigStore.instance().repo["schema"]["kfac"], "base.yaml", node)


# A file that names another experiment has the pins of that one.
FIRST = [
    name
    for name in EXPERIMENTS
    if "/experiment/" not in (EXPERIMENT_DIR / f"{name}.yaml").read_text()
]


@pytest.mark.parametrize("name", quick_if(FIRST[::4].__contains__, FIRST))
def test_an_experiment_needs_no_default_of_kfac(name, no_defaults):
    compose.load([f"experiment={name}"])


def test_a_run_without_an_experiment_needs_the_defaults(no_defaults):
    """Otherwise the test above could not fail."""
    assert "kfac." in refused([])


@pytest.mark.parametrize(
    ("experiment", "id_of_2026"),
    [
        ("digits/autoencoder_kfac", "c463005b"),
        ("lgg/unet_kfac", "b0493273"),
        ("fig8_resnet_scaling/paper", "d1b97c13"),
        ("table4a_bert_kfac_phase2/paper", "95157377"),
    ],
)
def test_experiments_keep_their_run_ids(experiment, id_of_2026):
    config = compose.load([f"experiment={experiment}"])
    assert run_id(config, job="").rpartition("-")[2] == id_of_2026


def test_mask_rcnn_pins_the_layers_that_its_model_skips():
    """The pinned ``skip`` would win over the model's, so the experiment repeats the model's."""
    model = compose.load(["model=maskrcnn_resnet50_fpn"]).kfac.skip
    experiment = compose.load(["experiment=fig5bc_maskrcnn_convergence"]).kfac
    assert experiment.skip == [*model, r"^roi_heads\.box_head\."], "as the released code"


SC20_ROWS = ("table1", "table2", "table5", "fig5a", "fig7", "fig8")
"""Rows of the paper that SC20 published, or that have the recipe of such a row."""


@pytest.mark.parametrize(
    "name", [e for e in EXPERIMENTS if e.startswith(SC20_ROWS) and e.endswith("/smoke")]
)
def test_the_rows_of_sc20_have_the_settings_of_its_released_code(name):
    """0.95 weighs the old factor: ``alpha * current + (1 - alpha) * new``."""
    kfac = quick_load([f"experiment={name}"]).kfac
    assert (kfac.factor_decay, kfac.factor_convention) == (0.95, "sc20")
