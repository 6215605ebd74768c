"""Batch scripts that a real Slurm interrupts lose no step and end with the same weights."""

from kfac_bench.record.events import Checkpointed, Evaluated, Resumed, RunStarted, Trained
from tests.slurm.cluster import RUN, TWO_NODES, weights_of
from tests.support.runs import end, of_kind, steps_of

SCRIPT = "resnet32_cifar10"


def notice(cluster, job):
    """Send USR1 to the shell of the batch script, as Slurm does with --signal=B:USR1@120."""
    cluster("scancel", "--signal=USR1", "--batch", job)


def same_run(path, straight):
    assert weights_of(path) == weights_of(straight)
    assert [e.metrics for e in of_kind(path, Evaluated)] == [
        e.metrics for e in of_kind(straight, Evaluated)
    ]
    assert [e.loss for e in of_kind(path, Trained)] == [e.loss for e in of_kind(straight, Trained)]


def test_a_run_survives_a_notice_in_an_evaluation_and_in_a_decomposition(cluster, straight):
    words = ("logger=wandb", "logger.mode=offline")
    job = cluster.submit(
        SCRIPT,
        *RUN,
        *words,
        options=TWO_NODES,
        KFAC_TEST_HOLD="evaluation:8,decomposition:12",
    )
    cluster.wait_until_held(job, "evaluation", start=0)
    (path,) = cluster.runs.iterdir()  # named after the job, because run_id is not set
    assert (path / "state").read_text().split()[0] == "running"
    notice(cluster, job)
    cluster.wait_until_held(job, "decomposition", start=1)
    assert steps_of(path, Resumed) == [8]
    assert steps_of(path, Evaluated) == [0, 8], "the interrupted evaluation was not repeated"
    notice(cluster, job)
    cluster.finish(job)
    assert cluster.show(job, "Restarts") == ["2"]
    assert steps_of(path, Resumed) == [8, 13]  # the run finished this update and began no other
    same_run(path, straight)
    assert list(cluster.runs.iterdir()) == [path]
    assert (path / "state").read_text() == f"finished 16 {path}\n"
    assert not list(cluster.folder.glob("*.state"))
    ids = {p.name.rsplit("-", 1)[1] for p in (path / "wandb").glob("offline-run-*")}
    parts = {p.name for p in (path / "wandb").glob("offline-run-*")}
    assert len(parts) == 3
    assert {path.name.endswith(i) for i in ids} == {True}
    assert len(ids) == 1
    said = cluster.said()
    assert said.count("the job goes back into the queue") == 2
    assert "Traceback" not in said


STOPPED = 7
"""Ranks held in step 6 send the signal with it, and all of them read it in step 7."""


def test_torchrun_forwards_the_notice(cluster, straight):
    job = cluster.submit(
        "torchrun",
        "experiment=table2_fig4_cifar_correctness",
        *RUN,
        "schedule.warmup_start=0.5",  # 1 / ranks, as the script of the straight run
        "run_id=r",
        options=(*TWO_NODES, "--cpus-per-task=2"),
        KFAC_TEST_HOLD="step:5",
    )
    cluster.wait_until_held(job, "step")
    notice(cluster, job)
    cluster.finish(job)
    path = cluster.runs / "r"
    assert steps_of(path, Resumed) == [STOPPED]
    same_run(path, straight)


def test_a_preempted_job_comes_back(cluster, straight):
    job = cluster.submit(SCRIPT, *RUN, "run_id=r", options=TWO_NODES, KFAC_TEST_HOLD="step:5")
    cluster.wait_until_held(job, "step")
    urgent = cluster(
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--time=1",
        "--wrap=sleep 1",
    )
    cluster.finish(job)
    assert cluster.show(urgent, "JobState") == ["COMPLETED"]
    assert steps_of(cluster.runs / "r", Resumed) == [STOPPED]
    same_run(cluster.runs / "r", straight)


def test_a_run_survives_the_time_limit(cluster, straight):
    options = (
        *TWO_NODES,
        "--time=1",
        "--signal=B:USR1@5",
    )  # the notice comes after 25 to 55 s, because Slurm is not exact
    job = cluster.submit(SCRIPT, *RUN, "run_id=r", options=options, KFAC_TEST_HOLD="step:5")
    cluster.finish(job)
    assert cluster.show(job, "Restarts") != ["0"]
    assert steps_of(cluster.runs / "r", Resumed)[0] == STOPPED
    same_run(cluster.runs / "r", straight)


def test_a_lost_node_loses_only_steps_since_the_last_checkpoint(cluster, straight):
    job = cluster.submit(
        SCRIPT,
        *RUN,
        "run_id=r",
        "trainer.checkpoint_freq=6",
        options=TWO_NODES,
        KFAC_TEST_HOLD="step:10",
    )
    cluster.wait_until_held(job, "step")
    cluster.lose("node2")
    cluster.finish(job)
    path = cluster.runs / "r"
    assert steps_of(path, Resumed) == [6]
    assert steps_of(path, Checkpointed) == [6, 12, 16]
    same_run(path, straight)


def test_a_cancelled_job_saves_and_does_not_return(cluster):
    job = cluster.submit(SCRIPT, *RUN, "run_id=r", options=TWO_NODES, KFAC_TEST_HOLD="step:5")
    cluster.wait_until_held(job, "step")
    cluster("scancel", "--signal=USR1", job)  # the ranks stand still until this signal
    cluster("scancel", job)
    assert cluster.wait(job) == {"CANCELLED"}
    cluster.wait(job, lambda: cluster("squeue", "--noheader", "--jobs", job, check=False) == "")
    assert cluster.show(job, "Restarts") == ["0"]
    path = cluster.runs / "r"
    assert (end(path).status, end(path).step) == ("interrupted", STOPPED)
    assert (path / "checkpoints" / f"step-{STOPPED:08}").is_dir()


def test_a_notice_requeues_one_task_of_an_array_only(cluster):
    """The last task has the array's own number, which can also mean the whole array."""
    options = ("--array=0-1%1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=1")
    job = cluster.submit(
        "unet_lgg",
        *RUN,
        "kfac.factor_update_freq=4",
        "trainer.max_steps=4",
        options=options,
        KFAC_TEST_HOLD="step:2",
        KFAC_TEST_HOLD_TASK="1",
    )
    cluster.wait_until_held(job, "step", ranks=1)
    assert cluster.show(f"{job}_1", "JobId") == [job]
    notice(cluster, f"{job}_1")
    cluster.finish(job)
    assert sorted(cluster.show(job, "Restarts")) == ["0", "1"]
    runs = {of_kind(p, RunStarted)[0].config["seed"]: p for p in cluster.runs.iterdir()}
    assert sorted(runs) == [0, 1]
    assert [steps_of(runs[seed], Resumed) for seed in (0, 1)] == [[], [3]]
    assert weights_of(runs[0]) != weights_of(runs[1])
