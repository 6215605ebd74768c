"""The contest's files compose, and the package refuses its options."""

import pytest

from benchmarks.contest.setup import CONF
from kfac_bench import cli
from kfac_bench.benchmark import grid, local_runs, schema
from kfac_bench.config import compose, conf_files
from kfac_bench.training.run_directory import run_id
from tests.support.quick import quick_if

WITH_STUDIES = ["pilot", "second"]
NAMES = sorted({path.stem for path in (CONF / "benchmark").glob("*.yaml")} - {*WITH_STUDIES})
EXPERIMENTS = sorted(
    str(path.relative_to(CONF / "experiment").with_suffix(""))
    for path in (CONF / "experiment").rglob("*.yaml")
    if path.parent.name != "heldout" or path.parent.parent.name == "contest"  # not a problem file
)


@pytest.mark.parametrize("name", NAMES)
def test_the_cells_of_a_benchmark_compose(name):
    cells = grid.cells(schema.load(name), "runs/test")
    for cell in [cells[0], cells[-1]]:
        assert cell.config().trainer.target is not None


@pytest.mark.parametrize("name", quick_if(EXPERIMENTS[::40].__contains__, EXPERIMENTS))
def test_an_experiment_composes(name):
    assert compose.load([f"experiment={name}"]).label


def test_a_forked_run_has_the_optimizers_of_the_contest(tmp_path):
    words = ["optimizer=kl_soap", "kfac=none", "trainer.max_steps=1", "logger=none"]
    assert local_runs.train_forked([*words, f"runs_dir={tmp_path}"])[0] == 0


@pytest.mark.parametrize("command", ["run", "tune"])
def test_the_package_refuses_results_and_names_the_contest(command, monkeypatch, capsys):
    monkeypatch.setattr(conf_files, "ADDED", [])
    folder = ["--out", "."] if command == "tune" else []
    with pytest.raises(SystemExit) as caught:
        cli.bench([command, "demo", *folder, "--results", "r"])
    said = capsys.readouterr().err.strip()
    assert (caught.value.code, len(said.splitlines())) == (2, 1)
    assert f"python -m benchmarks.contest {command} demo --results" in said


def test_run_ids_of_experiments_stay():
    found = compose.load(["experiment=contest/embedded/pydoc_transformer_kfac"])
    assert run_id(found, job="").rpartition("-")[2] == "44b41f76"


def test_a_benchmark_has_the_values_of_the_one_that_it_extends():
    pilot, second = schema.load("pilot"), schema.load("second")
    assert second.tuning.labels == pilot.tuning.labels | {"adam": "Adam at 0.001, not tuned"}
    assert (second.tuning.trials, pilot.tuning.trials) == (6, 12)
    assert second.axes["task"] != pilot.axes["task"]
