"""`kfac-bench try --launcher slurm` is one job, which continues when it is requeued."""

import sys
import time

from kfac_bench.record.events import RunStarted
from tests.benchmark.own_problem.problem_text import written
from tests.support.runs import of_kind

BENCH = "from kfac_bench.cli import bench; bench()"
OPTIONS = ("--minutes=3", "--optimizers=adamw,eigen_adam", "trainer.threads=1")


def test_a_study_that_is_requeued_runs_no_trial_twice(here):
    file = written(here.folder)
    words = (file, *OPTIONS, "--launcher=slurm", "--runs-dir=runs/study", "--sbatch=--exclusive")
    # By itself the study tries settings until its minutes are over.
    said = here(sys.executable, "-c", BENCH, "try", *words, KFAC_TEST_TRIALS="3")
    job = said.split("job ")[1].split()[0]
    study = here.folder / "runs" / "study"
    until = time.monotonic() + 120
    while len(list(study.glob("tuning/*/events.jsonl"))) < 4:
        assert time.monotonic() < until, here.said()
        time.sleep(0.2)
    ended = {path.parent for path in study.glob("tuning/*/events.jsonl")}
    here("scontrol", "requeue", job)
    here.finish(job)
    assert len(list(study.glob("final/*/events.jsonl"))) == 4, "the study was not shortened"
    assert here.show(job, "Restarts") == ["1"]
    assert "mine: accuracy " in (study / "verdict.txt").read_text(), here.said()
    # The run in progress may have been killed and begun again; the others were finished.
    assert sum(len(of_kind(path, RunStarted)) == 1 for path in ended) >= len(ended) - 1
    runs = [*study.glob("tuning/*"), *study.glob("final/*")]
    started = [of_kind(path, RunStarted)[0].environment for path in runs]
    assert {each["slurm_job_id"] for each in started} == {job}
