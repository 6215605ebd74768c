"""The rows of profile=cpu: their files are complete, and their cells and trials are valid runs."""

from pathlib import Path

import pytest

from benchmarks.contest.result_store import ResultStore
from benchmarks.contest.sitting import ALL
from kfac_bench.benchmark import grid, schema, suite, trials, write_reports
from kfac_bench.benchmark.result import axes_of
from kfac_bench.config import compose
from kfac_bench.config.options import options
from tests.support import ROOT
from tests.support.quick import quick_if

VERDICTS = (ROOT / "docs" / "reference" / "benchmarks.md").read_text()


@pytest.mark.parametrize("name", suite.CLAIMS)
def test_claims_name_quantities_and_points_of_their_table(name):
    row = schema.load(name)
    assert list(row.profiles) == ["cpu"]
    assert row.claims
    axes = axes_of(row)
    suite.check(row, name)
    for quantity in row.quantities.values():
        assert bool(quantity.measure) != bool(quantity.of)
    for claim in row.claims:
        assert bool(claim.checks) != bool(claim.not_testable)
        for check in claim.checks:
            assert (check.at_most is None) != (check.at_least is None)
    assert row.labels.keys() <= {value for values in axes.values() for value in values}
    assert all(f"| {claim.text} |" in VERDICTS for claim in row.claims), (
        "report all --profile cpu --verdicts-into docs/reference/benchmarks.md"
    )


@pytest.mark.parametrize("name", quick_if("classic_autoencoder".__eq__, suite.CLAIMS))
def test_each_number_of_a_page_follows_from_the_kept_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = suite.row(name, "cpu", runs_dir="runs")
    ResultStore(ROOT / "benchmarks" / "results", name, "table", [ALL]).unpack(row.folder)
    assert all(cell.run()[0] for cell in row.computed)
    for place in ("papers.md", f"results/cpu/{name}.md"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text((ROOT / "docs" / "lab" / place).read_text())
    written = write_reports.write(row)
    write_reports.into(tmp_path / "papers.md", [written], "cpu")
    page = Path(f"results/cpu/{name}.md")
    assert (tmp_path / page).read_text() == (ROOT / "docs" / "lab" / page).read_text()
    # The page has the verdicts of all rows in two tables.
    for table in written.verdicts:
        for line in table.markdown().splitlines():
            assert line in VERDICTS


@pytest.mark.parametrize("name", quick_if("classic_autoencoder".__eq__, suite.CLAIMS))
def test_cells_of_claims_are_valid_runs_on_two_cores(name):
    row = schema.load(name)
    for cell in grid.cells(row, "runs/x", [0], "cpu"):
        config = cell.config()
        assert config.data.name == "fashion_mnist"
        assert cell.ranks * config.trainer.threads <= 2
        assert not config.logger.wandb
    assert row.seeds == [*range(len(row.seeds))]
    assert len(row.seeds) >= 9
    assert row.tuning is None or not {*row.tuning.seeds} & {*row.seeds}


@pytest.mark.parametrize(
    "name", ["classic_autoencoder", pytest.param("claim1_epochs", marks=pytest.mark.slow)]
)
def test_the_tuning_gives_each_optimizer_the_same_trials(name):
    row = schema.load(name)
    tuning = row.tuning
    assert tuning.space.keys() == tuning.labels.keys() == {*row.axes["optimizer"]}
    for point in schema.points(row):
        settings = trials.trial_settings(tuning, point["optimizer"])
        assert len(settings) == tuning.trials
        base = [schema.fill_in(text, point) for text in tuning.overrides]
        trial = compose.load([*base, *trials.overrides_of(settings[0])])
        assert trial.trainer.target is not None
        # The file of the winner, or the guess before the tuning, has all values that are fixed.
        name = schema.fill_in(tuning.experiment, point)
        found = {k: v for k, v, _ in options(compose.load([f"experiment={name}"]))}
        fixed = {k: v for k, v in tuning.space[point["optimizer"]].items() if "." in k}
        assert {k: found[k] for k, v in fixed.items() if not isinstance(v, dict)} == {
            k: v for k, v in fixed.items() if not isinstance(v, dict)
        }
