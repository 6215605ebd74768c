"""`kfac-bench scaling --launcher slurm` runs jobs, and writes the table after them."""

import re

from kfac_bench.benchmark.scaling import scaling_options
from kfac_bench.cli.bench_command import build_parser
from kfac_bench.output import say
from kfac_bench.record.events import RunStarted
from tests.support.runs import of_kind

WORDS = (
    "model=autoencoder",
    "model.hidden=[16,6]",
    "optimizer.lr=0.01",
    "kfac.update_freq=4",
    "kfac.factor_update_freq=2",
    "trainer.batch_size=64",
    "--world-size=2",
    "--strategy=layer_wise",
    "--rounds=1",
)


def parsed(words):
    return build_parser().parse_args(["scaling", *words])


def test_runs_on_two_ranks_are_jobs_and_the_last_job_writes_the_table(here, capsys):
    slurm = ("--launcher=slurm", "--sbatch=--exclusive --time=5", f"--runs-dir={here.folder / 's'}")
    assert scaling_options.scaling(parsed([*WORDS, *slurm]), [*WORDS, *slurm], say) == 0
    [first, last] = re.findall(r"jobs (\d+) to (\d+)", capsys.readouterr().out)[0]
    for job in range(int(first), int(last) + 1):
        here.finish(str(job))
    written = (here.folder / "s" / "scaling.md").read_text()
    assert "| sgd | 2 | 128 |" in written
    assert "| layer_wise | 2 | 128 |" in written
    assert "missing" not in written
    for path in (here.folder / "s").glob("*-2-0-*"):
        [started] = of_kind(path, RunStarted)
        assert started.environment["world_size"] == 2
        assert started.environment["slurm_job_id"]
    # All runs are measured, so a second call submits nothing.
    assert scaling_options.scaling(parsed([*WORDS, *slurm]), [*WORDS, *slurm], say) == 0
    assert here("squeue", "--noheader") == ""
