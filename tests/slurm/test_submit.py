"""Benchmark cells run as Slurm jobs, and the report job runs after them."""

import sys
from dataclasses import replace

import pytest

from kfac_bench.benchmark import slurm_jobs, suite
from kfac_bench.errors import UsageError
from kfac_bench.record.events import Resumed
from tests.support.runs import steps_of

TINY = (
    "model=autoencoder",
    "task=reconstruction",
    "model.hidden=[8]",
    "trainer.max_steps=6",
    "trainer.threads=1",
    "logger=none",
)
NODE = ("--exclusive", "--time=5")
TABLE = "100%j"
"""A folder whose name is a pattern of sbatch."""


def cell(seed):
    return [sys.executable, "-m", "kfac_bench", *TINY, f"seed={seed}", f"run_id=r{seed}"]


REPORT = (
    "import glob, sys; print(sys.argv[1:], *(open(f).read() for f in glob.glob('runs/*/state')))"
)


def test_the_report_waits_for_cells_that_were_requeued(here, monkeypatch):
    monkeypatch.setenv("KFAC_TEST_HOLD", "step:3")
    commands = {f"seed {i}; $(touch {i})": cell(i) for i in (0, 1)}
    report = [sys.executable, "-c", REPORT, "$HOME 'x", "a  b"]
    *cells, last = slurm_jobs.submit(commands, report, here.folder / TABLE, NODE)
    for job in cells:
        here.wait_until_held(job, "step", ranks=1)
    *again, again_last = slurm_jobs.submit(commands, report, here.folder / TABLE, NODE)
    for job in again:
        assert here.show(job, "Dependency") == ["singleton(unfulfilled)"]
    here("scancel", *again, again_last)
    for job in cells:
        here("scancel", "--signal=USR1", "--batch", job)
    for job in (*cells, last):
        here.finish(job)
    assert [here.show(job, "Restarts") for job in cells] == [["1"], ["1"]]
    for seed in (0, 1):
        assert steps_of(here.folder / "runs" / f"r{seed}", Resumed) == [4]
    (said,) = (here.folder / TABLE / "slurm").glob(f"report-{last}.out")
    assert "\"$HOME 'x\", 'a  b'" in said.read_text()
    assert said.read_text().count("finished 6") == 2
    assert {p.name for p in here.folder.iterdir()} == {"runs", TABLE}, "a label was executed"


def test_a_job_that_slurm_refuses_is_one_line_and_leaves_no_job(here):
    commands = {"good": cell(0), "bad": ["x" * 200_000]}
    with pytest.raises(UsageError, match=r"--launcher slurm: .+"):
        slurm_jobs.submit(commands, cell(0), here.folder, NODE)
    assert here("squeue", "--noheader") == ""
    with pytest.raises(UsageError, match="Invalid partition"):
        slurm_jobs.submit(commands, cell(0), here.folder, ["--partition=nowhere"])


def test_no_job_of_a_row_is_left_if_cells_with_more_ranks_are_refused(here):
    row = suite.row("kaisa_unet_lgg", "smoke", ("logger=none",), "runs/refused", [0])
    good = row.cells[0]
    bad = replace(good, ranks=2, label="bad", overrides=(*good.overrides, f"label={'x' * 200_000}"))
    line = r"sbatch cannot be started .*\. The jobs submitted before \(\d+ \d+\) are cancelled"
    with pytest.raises(UsageError, match=line):
        slurm_jobs.submit_wave(replace(row, cells=[good, bad]), (), 0, ["--hold", "--time=5"])
    assert here("squeue", "--noheader") == ""


def test_a_benchmark_runs_as_jobs_and_ends_with_its_table(here):
    run = ("run", "kaisa_unet_lgg", "--profile=smoke", "--launcher=slurm", "--seeds=0")
    options = ("trainer.max_steps=2", "trainer.eval_freq=2", "trainer.target=null", "logger=none")
    words = (*run, *options, "--runs-dir=runs/row", f"--sbatch={' '.join(NODE)}")
    said = here(sys.executable, "-c", "from kfac_bench.cli import bench; bench()", *words)
    *cells, last = said.splitlines()[-1].partition(": jobs ")[2].split()
    assert len(cells) == 2
    here.finish(last)
    folder = here.folder / "runs" / "row"
    assert len(list(folder.rglob("events.jsonl"))) == 2
    assert (folder / "smoke.html").exists(), here.said()
