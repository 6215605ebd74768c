"""Ranks that srun starts with every backend, and the variables of a real Slurm."""

import pytest

from kfac_bench.distributed.slurm_rank import first_host
from kfac_bench.record.events import Evaluated
from tests.slurm.cluster import RUN, SMALL, TWO_NODES
from tests.support.runs import end, of_kind

APPLICATIONS = (
    "resnet32_cifar10",
    "maskrcnn_coco",
    "bert_phase1",
    "bert_phase2",
    "squad",
    "unet_lgg",
)


def test_every_application_trains(cluster):
    """Submit all jobs at once; as many run together as there are nodes."""
    node = ("--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--exclusive")
    words = (
        *SMALL,
        "trainer.max_steps=2",
        "trainer.accumulate=1",
        "trainer.eval_freq=2",
        "logger=none",
    )
    small = ("trainer.batch_size=2",)
    jobs = {
        name: cluster.submit(name, *words, *small, f"run_id={name}", options=node)
        for name in APPLICATIONS
    }
    # This script has no experiment, and so no smoke profile.
    on_digits = ("model=resnet8", "data.root=demo", "data.image_size=16", "data.workers=0")
    words = (*(word for word in words if word != "profile=smoke"), *on_digits)
    name = "resnet50_imagenet"
    jobs[name] = cluster.submit(name, *words, *small, f"run_id={name}", options=node)
    for name, job in jobs.items():
        cluster.finish(job)
        assert (end(cluster.runs / name).status, end(cluster.runs / name).step) == ("finished", 2)


@pytest.mark.parametrize(
    "words", [("backend=horovod", "kfac=hybrid_opt"), ("backend=fsdp2",), ("backend=deepspeed",)]
)
def test_other_backends_find_their_ranks_from_srun(cluster, straight, words):
    job = cluster.submit("resnet32_cifar10", *RUN, "run_id=r", *words, options=TWO_NODES)
    cluster.finish(job)
    losses = [
        [e.metrics["loss"] for e in of_kind(p, Evaluated)] for p in (cluster.runs / "r", straight)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_two_ranks_per_node_train(cluster):
    options = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1")
    words = (*RUN, "trainer.max_steps=2", "run_id=r")
    cluster.finish(cluster.submit("resnet32_cifar10", *words, options=options))
    assert end(cluster.runs / "r").step == 2


def test_bad_input_is_one_line_from_one_rank(cluster):
    job = cluster.submit("smoke", "experiment=nothing", options=TWO_NODES)
    assert cluster.wait(job) == {"FAILED"}
    said = [line for line in cluster.said().splitlines() if "kfac-train" in line]
    assert len(said) == 1
    assert "experiment=nothing: no such experiment" in said[0]
    assert cluster.show(job, "ExitCode") == ["2:0"]


def test_first_host_agrees_with_scontrol(cluster):
    for nodes in ("node[1-2]", "a1", "a[3,1]", "gpu[02-04,7],x", "r[1-2]n[05-16]", "b,a[1-2]"):
        assert first_host(nodes) == cluster("scontrol", "show", "hostnames", nodes).split()[0]


@pytest.mark.parametrize(
    ("options", "own"),
    [
        (("--gpus-per-task=1",), True),
        (("--gpus-per-node=2", "--gpu-bind=single:1"), True),
        (("--gpus-per-node=2",), False),
    ],
)
def test_has_its_own_gpus_agrees_with_slurm(cluster, options, own):
    code = (
        "import os; from kfac_bench.distributed import slurm_rank; "
        "n = len(os.environ['CUDA_VISIBLE_DEVICES'].split(',')); "
        "print(n, slurm_rank.has_its_own_gpus(n))"
    )
    said = cluster("srun", "--nodes=1", "--ntasks=2", *options, "python", "-c", code)
    assert said.splitlines() == [f"{1 if own else 2} {own}"] * 2
