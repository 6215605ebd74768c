"""Training on a GPU. Without a GPU these tests are skipped; KFAC_TEST_DEVICE=cpu runs them."""

import math
import os
import subprocess
import sys

import pytest
import torch

from kfac_bench.distributed.backend import Backend
from kfac_bench.distributed.ranks import Ranks
from tests.support.runs import METHODS, RESNET, SMALL, before_step, end, kill, losses_of, train

DEVICE = os.environ.get("KFAC_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch sees no GPU"
)
STEPS = ("trainer.max_steps=12", "trainer.log_freq=1")


def on_device():
    return Backend(Ranks(torch.device(DEVICE)))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("method", METHODS)
def test_the_losses_are_those_of_the_cpu(tmp_path, method, precision):
    options = (*METHODS[method], *STEPS)
    _, want = train(tmp_path / "cpu", *options)
    here = (*options, f"trainer.precision={precision}")
    status, path = train(tmp_path / "here", *here, backend=on_device())
    assert status == "finished"
    if DEVICE == "cuda":
        is_tf32 = torch.get_float32_matmul_precision() == "high"
        assert is_tf32 == (precision != "fp32")
    if precision == "fp16":  # the scaler leaves out the first steps
        assert losses_of(path)[-1] < losses_of(path)[0]
        return
    tolerance = 2e-3 if precision == "fp32" else 0.05
    assert losses_of(path) == pytest.approx(losses_of(want), rel=tolerance)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_continues(tmp_path, method, precision):
    options = (*METHODS[method], *STEPS, f"trainer.precision={precision}", "run_id=r")
    _, straight = train(tmp_path / "straight", *options, backend=on_device())
    with before_step(8, kill), pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "killed", *options, backend=on_device())
    status, path = train(tmp_path / "killed", *options, backend=on_device())
    assert status == "finished"
    assert losses_of(path)[-4:] == pytest.approx(losses_of(straight)[-4:], rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        ("trainer.channels_last=true", "trainer.precision=bf16"),
        ("trainer.ema=0.9", "trainer.accumulate=2"),
        ("trainer.clip_grad_norm=1.0", "trainer.precision=fp16"),
        ("trainer.checkpoint_activations=true",),
        ("kfac.background=true",),
        ("kfac.fisher=type2",),
        ("kfac.fisher=mc", "kfac.method=eigen"),
        ("kfac.method=ekfac",),
        ("trainer.time_stages=true",),
        ("optimizer=muon", "kfac=none"),
        ("optimizer=soap", "kfac=none"),
    ],
    ids=" ".join,
)
def test_options_of_a_convolutional_network(tmp_path, options):
    status, path = train(
        tmp_path, *STEPS, "trainer.max_steps=6", *options, base=RESNET, backend=on_device()
    )
    assert status == "finished", end(path).message
    assert all(math.isfinite(loss) for loss in losses_of(path))


@pytest.mark.parametrize("options", [(), ("trainer.sync_batch_norm=true",), ("backend=fsdp2",)])
def test_one_rank_that_torchrun_starts(tmp_path, options):
    words = [*RESNET, *STEPS, f"trainer.device={DEVICE}", f"runs_dir={tmp_path}", *options]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "1", "-m", "kfac_bench", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # torch recommends it, and fp32 is asked for
def test_a_compiled_model(tmp_path):
    status, _ = train(tmp_path, *STEPS, "trainer.compile=true", base=SMALL, backend=on_device())
    assert status == "finished"
