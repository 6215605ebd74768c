"""NVIDIA Apex with K-FAC: a stand-in for its wrapper and its LAMB. Real Apex needs GPUs."""

import contextlib
import importlib.util
import sys
import textwrap

import pytest
import torch

from kfac_bench.config import compose
from kfac_bench.core import KFAC
from kfac_bench.core.layers.coverage import unwrap
from kfac_bench.errors import UsageError
from kfac_bench.record.events import Resumed, Trained
from kfac_bench.training.build import build_optimizer
from tests.support.distributed import run_ranks
from tests.support.runs import SMALL, of_kind, steps_of, train
from tests.support.training import (
    OPTIONS,
    batch,
    loss_of,
    my_part,
    sgd,
    tiny_model,
)

STAND_IN = {
    "apex/__init__.py": "",
    "apex/multi_tensor_apply/__init__.py": "",
    "apex/parallel/__init__.py": '''
        """Apex's interface: gradients averaged at the end of backward, unless it is disabled."""
        import warnings

        import torch
        import torch.distributed as dist


        class DistributedDataParallel(torch.nn.Module):
            def __init__(self, module):
                super().__init__()
                warnings.warn("apex.parallel.DistributedDataParallel is deprecated", FutureWarning)
                self.module, self._disable_allreduce, self.messages = module, False, 0
                self.queued = False
                for p in module.parameters():
                    dist.broadcast(p.data, 0)
                    p.register_post_accumulate_grad_hook(self._hook)

            def enable_allreduce(self):
                self._disable_allreduce = False

            def disable_allreduce(self):
                self._disable_allreduce = True

            def forward(self, *args, **kwargs):
                if not self._disable_allreduce:
                    self.queued = False  # like Apex: a disabled part prepares nothing
                return self.module(*args, **kwargs)

            def _hook(self, _):
                if not self._disable_allreduce and not self.queued:
                    self.queued = True
                    torch.autograd.Variable._execution_engine.queue_callback(self._average)

            def _average(self):
                for p in self.module.parameters():
                    if p.grad is not None:
                        self.messages += 1
                        dist.all_reduce(p.grad)
                        p.grad /= dist.get_world_size()
    ''',
    "apex/optimizers/__init__.py": '''
        """Its FusedLAMB takes no argument in zero_grad, and counts steps in its groups."""
        import torch


        class FusedLAMB(torch.optim.Optimizer):
            def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
                super().__init__(params, dict(lr=lr, betas=betas))

            def zero_grad(self):
                for group in self.param_groups:
                    for p in group["params"]:
                        p.grad = None

            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    group["step"] = group.get("step", 0) + 1
                    for p in group["params"]:
                        state = self.state[p]
                        if not state:
                            state["exp_avg"] = torch.zeros_like(p)
                        state["exp_avg"].mul_(group["betas"][0]).add_(p.grad)
                        p.sub_(state["exp_avg"], alpha=group["lr"] / group["step"])
    ''',
}


@pytest.fixture
def install(tmp_path):
    """Return a function that writes packages for this process and returns their folder."""
    if importlib.util.find_spec("apex") is not None:
        pytest.skip("the real Apex is installed")
    folder = tmp_path / "path"

    def write(files):
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(textwrap.dedent(text))
        return folder

    with imports_from(folder):
        yield write


@pytest.fixture
def stand_in(install):
    return install(STAND_IN)


@contextlib.contextmanager
def imports_from(folder):
    """Import from `folder` inside the block, also in the process of a rank of a shared pool."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [n for n in sys.modules if n.partition(".")[0] == "apex"]:
            del sys.modules[name]


# ---- a script with the wrapper of an old release ----


def parts_on_rank(folder):
    """Return names of layers, and the gradients of a batch in two parts after K-FAC's step."""
    with imports_from(folder):
        from apex.parallel import DistributedDataParallel

        with pytest.warns(FutureWarning):
            model = DistributedDataParallel(tiny_model())
        kfac = KFAC(model, sgd(model), **OPTIONS)
        model.disable_allreduce()
        for x, y in zip(*(whole.chunk(2) for whole in my_part(*batch(0))), strict=True):
            (loss_of(model, x, y)[1] / 2).backward()
            model.enable_allreduce()  # the second part is the last
        kfac.step()
        grads = [p.grad.clone() for p in model.parameters()]
        return unwrap(model) is model.module, [*kfac.state_dict()["layers"]], grads


@pytest.mark.ranks
def test_k_fac_sees_through_the_wrapper(stand_in):
    model = tiny_model()
    kfac = KFAC(model, sgd(model), **OPTIONS)
    loss_of(model, *batch(0))[1].backward()
    kfac.step()
    for is_seen, names, grads in run_ranks(2, parts_on_rank, stand_in):
        assert (is_seen, names) == (True, ["0", "2", "5", "7", "9"])
        for ours, alone in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(ours, alone.grad, rtol=1e-4, atol=1e-6)


# ---- fused LAMB ----


def test_a_run_with_fused_lamb_continues(stand_in, tmp_path):
    options = (*SMALL, "optimizer=fused_lamb", "optimizer.lr=0.002", "trainer.log_freq=1")
    for name, steps in (("r", 5), ("r", 10), ("alone", 10)):
        train(tmp_path, f"run_id={name}", f"trainer.max_steps={steps}", base=options)
    assert steps_of(tmp_path / "r", Resumed) == [5]
    ours, alone = ([e.loss for e in of_kind(tmp_path / n, Trained)] for n in ("r", "alone"))
    assert ours == alone


WRONG = {"apex/__init__.py": "raise RuntimeError('a web framework')"}
OLD = {**STAND_IN, "apex/optimizers/__init__.py": ""}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, r"NVIDIA Apex is not installed: git clone"),
        (WRONG, r"another project, which the package index has.*pip uninstall apex"),
        (OLD, r"this NVIDIA Apex has no FusedLAMB"),
    ],
    ids=["none", "wrong", "old"],
)
def test_a_missing_or_foreign_apex_is_reported(install, files, said):
    install(files)
    with pytest.raises(UsageError, match=said):
        build_optimizer(compose.load(["optimizer=fused_lamb"]).optimizer, tiny_model())


# ---- the real one ----


def has_apex():
    spec = importlib.util.find_spec("apex")
    return spec is not None and importlib.util.find_spec("apex.multi_tensor_apply") is not None


@pytest.mark.skipif(
    not (torch.cuda.is_available() and has_apex()), reason="needs a GPU and NVIDIA Apex"
)
class TestReal:
    def test_fused_lamb_under_k_fac(self):
        torch.manual_seed(0)
        model = tiny_model().cuda()
        config = compose.load(["optimizer=fused_lamb", "optimizer.lr=0.01"]).optimizer
        optimizer = build_optimizer(config, model)
        kfac = KFAC(model, optimizer, **OPTIONS)
        x, y = (t.cuda() for t in batch(0))
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            _, loss = loss_of(model, x, y)
            loss.backward()
            kfac.step()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.9 * losses[0]
