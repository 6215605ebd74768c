"""Foreign YAML files (benchmarks, hardware, lists of layers) are read or refused in one line."""

import pytest
import yaml
from hypothesis import given

from kfac_bench.benchmark import grid, schema
from kfac_bench.config import compose, conf_files
from kfac_bench.errors import UsageError
from kfac_bench.simulate import hardware, workload
from tests.support.fuzzing import damaged, fuzz, refused_or, spoilt

HARDWARE = sorted((compose.CONF_DIR / "hardware").glob("*.yaml"))[0].read_bytes()
BENCHMARK = (compose.CONF_DIR / "benchmark" / "demo.yaml").read_bytes()
LAYERS = {
    "parameters": 1000,
    "tensors": 4,
    "step_flops_per_example": 1e6,
    "family": "vision",
    "gradient_bytes": 2,
    "layers": [{"name": "fc", "a_dim": 4, "g_dim": 3, "rows": 1, "repeat": 2}],
}


@fuzz(60)
@given(tree=spoilt(yaml.safe_load(HARDWARE)))
def test_wrong_values_of_hardware(tree):
    refused_or(lambda: hardware.parse(tree, "x", "x.yaml"))


@fuzz(40)
@given(content=damaged(HARDWARE))
def test_damaged_bytes_of_hardware(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("h") / "x.yaml"
    path.write_bytes(content)
    refused_or(lambda: hardware.load(path))


@fuzz(80)
@given(tree=spoilt(LAYERS))
def test_wrong_values_of_a_list_of_layers(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("w") / "x.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8", errors="replace")
    refused_or(lambda: workload.of_file(path, 32))


@pytest.fixture(scope="module")
def conf(tmp_path_factory):
    """Return a folder of benchmarks."""
    folder = tmp_path_factory.mktemp("conf")
    (folder / "benchmark").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for module in (compose, conf_files):
            patch.setattr(module, "CONF_DIR", folder)
        yield folder


def loaded(conf, content):
    (conf / "benchmark" / "x.yaml").write_bytes(content)
    benchmark = refused_or(lambda: schema.load("x"))
    if benchmark is not None:
        refused_or(lambda: grid.cells(benchmark, "runs/x"))


@fuzz(40)
@given(tree=spoilt(yaml.safe_load(BENCHMARK)))
def test_wrong_values_of_benchmarks(conf, tree):
    loaded(conf, yaml.safe_dump(tree).encode("utf-8", "replace"))


@fuzz(30)
@given(content=damaged(BENCHMARK))
def test_damaged_bytes_of_benchmarks(conf, content):
    loaded(conf, content)


WRONG = [
    *({"gradient_bytes": x} for x in ("x", [], None, 0, 10**400)),
    *({"parameters": x} for x in (float("inf"), 10**400, -1)),
    *({"layers": [LAYERS["layers"][0] | {"repeat": x}]} for x in (10**9, 0, 1.5, "2")),
    {"layers": [LAYERS["layers"][0] | {"a_dim": 10**30}]},
]


@pytest.mark.parametrize("change", WRONG, ids=lambda change: str(change)[:40])
def test_missing_and_absurd_numbers_are_refused(tmp_path, change):
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(LAYERS | change))
    with pytest.raises(UsageError):
        workload.of_file(path, 32)


def test_a_benchmark_that_is_not_text_is_refused(conf):
    (conf / "benchmark" / "x.yaml").write_bytes(b"title: \xff\n")
    with pytest.raises(UsageError, match=r"x\.yaml"):
        schema.load("x")
