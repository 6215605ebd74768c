"""The Apex backend on real ranks, with a stand-in for Apex. Real Apex needs GPUs."""

import contextlib
import importlib.util
import sys
import textwrap

import pytest
import torch

from kfac_bench import distributed
from kfac_bench.config import compose
from kfac_bench.core import KFAC
from kfac_bench.core.distributed.collective import TorchCollective
from kfac_bench.core.layers.coverage import unwrap
from kfac_bench.core.planning.plan import STRATEGIES
from kfac_bench.distributed.backends import apex
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import UsageError
from kfac_bench.record.events import Resumed, Trained
from kfac_bench.training import run
from kfac_bench.training.build import build_optimizer
from tests.support.distributed import run_ranks
from tests.support.quick import slow
from tests.support.runs import CPU, SMALL, config_of, of_kind, steps_of, train
from tests.support.training import (
    OPTIONS,
    assert_close,
    batch,
    expected,
    loss_of,
    make_kfac,
    my_part,
    sgd,
    sha256,
    tiny_model,
    update,
    weights_of,
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


@contextlib.contextmanager
def apex_here(folder):
    """Return this rank's backend."""
    with imports_from(folder):
        yield apex.Apex(Ranks(CPU, TorchCollective()))


# ---- data parallel ----


def equal_on_rank(folder, strategy, options, parts):
    """Compare with one process; return the hash of all bits and the messages of each update."""
    with apex_here(folder) as backend:
        model, bits, sent = tiny_model(), [], []
        optimizer = sgd(model)
        kfac = make_kfac(
            model, optimizer, options, strategy=strategy, collective=backend.collective()
        )
        model, optimizer = backend.wrap(model, optimizer)
        assert [*backend.bare(model).state_dict()] == [*tiny_model().state_dict()]
        wanted = expected(tiny_model, batch, strategy, options)
        for step, (want_grads, want_weights, _) in enumerate(wanted):
            before = model.messages
            grads = update(backend, model, optimizer, kfac, *my_part(*batch(step)), parts=parts)
            assert_close(grads, want_grads)
            assert_close(weights_of(model), want_weights)
            bits.append(sha256(grads) + sha256(weights_of(model)))
            sent.append(model.messages - before)
        return bits, sent


def check_equal(world, *args):
    results = run_ranks(world, equal_on_rank, *args)
    parameters = len([*tiny_model().parameters()])
    assert all(bits == results[0][0] for bits, _ in results), "ranks differ"
    assert all({*sent} == {parameters} for _, sent in results), "not averaged once an update"


@pytest.mark.ranks
@pytest.mark.supports("apex", "{strategy}")
@pytest.mark.parametrize("method", ["eigen", slow("inverse")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_equals_one_process(stand_in, strategy, method):
    options = {"method": method, "spread": False}
    check_equal(4 if strategy == "hybrid_opt" else 2, stand_in, strategy, options, 1)


@pytest.mark.ranks
@pytest.mark.supports("apex", "gradient accumulation")
def test_a_batch_in_parts_equals_one_process(stand_in):
    check_equal(2, stand_in, "comm_opt", {"spread": False}, 4)
    check_equal(2, stand_in, "mem_opt", {"spread": False, "fisher": "type2"}, 2)


def run_here(folder, runs_dir, options):
    with apex_here(folder) as backend:
        return run.train(config_of(runs_dir, *options, base=TRAINED), backend)[0]


TRAINED = (
    *SMALL,
    "optimizer.lr=0.02",
    "kfac.damping=0.1",
    "kfac.update_freq=4",
    "kfac.factor_update_freq=2",
    "kfac.spread=false",
    "trainer.log_freq=1",
)
"""Options with which small differences stay small."""


@pytest.mark.ranks
@pytest.mark.supports("apex", "bf16 autocast")
@pytest.mark.supports("apex", "fp16 with GradScaler")
def test_a_run_trains_in_half_precision(stand_in, tmp_path):
    for precision in ("bf16", "fp16"):
        options = (f"trainer.precision={precision}", "trainer.accumulate=2", "trainer.max_steps=6")
        run_ranks(2, run_here, stand_in, tmp_path, (*options, f"run_id={precision}"))
        _, alone = train(tmp_path, *options, f"run_id=alone_{precision}", base=TRAINED)
        ours, theirs = (
            [e.loss for e in of_kind(p, Trained)] for p in (tmp_path / precision, alone)
        )
        assert ours == pytest.approx(theirs, rel=5e-3)
        assert ours[-1] < ours[0]


@pytest.mark.ranks
@pytest.mark.supports("apex", "resume on another world size")
@pytest.mark.parametrize("optimizer", [slow("sgd"), "fused_lamb"])
def test_a_run_continues_with_another_backend_and_back(stand_in, tmp_path, optimizer):
    options = (f"optimizer={optimizer}", f"optimizer.lr={ {'sgd': 0.02}.get(optimizer, 0.002) }")
    run_ranks(2, run_here, stand_in, tmp_path, (*options, "run_id=r", "trainer.max_steps=5"))
    train(tmp_path, *options, "run_id=r", "trainer.max_steps=10", base=TRAINED)
    run_ranks(2, run_here, stand_in, tmp_path, (*options, "run_id=r", "trainer.max_steps=15"))
    _, alone = train(tmp_path, *options, "run_id=alone", "trainer.max_steps=15", base=TRAINED)
    assert steps_of(tmp_path / "r", Resumed) == [5, 10]
    ours, theirs = ([e.loss for e in of_kind(p, Trained)] for p in (tmp_path / "r", alone))
    assert ours == pytest.approx(theirs, rel=1e-3)


def names_on_rank(folder):
    with apex_here(folder) as backend:
        model = tiny_model()
        wrapped, optimizer = backend.wrap(model, sgd(model))
        kfac = KFAC(wrapped, optimizer, **OPTIONS)
        return unwrap(wrapped) is wrapped.module, [*kfac.state_dict()["layers"]]


@pytest.mark.ranks
def test_k_fac_names_layers_without_the_wrapper(stand_in):
    assert run_ranks(2, names_on_rank, stand_in) == [(True, ["0", "2", "5", "7", "9"])] * 2


# ---- which Apex there is ----


def test_apex_refuses_cpus(stand_in):
    config = compose.load(["backend=apex"]).backend
    with (
        pytest.raises(UsageError, match="on GPUs only; use backend=ddp"),
        distributed.join(config, "cpu"),
    ):
        pass


WRONG = {"apex/__init__.py": "raise RuntimeError('a web framework')"}
NEW = {k: v for k, v in STAND_IN.items() if k != "apex/parallel/__init__.py"}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, r"NVIDIA Apex is not installed: git clone -b 25\.05"),
        (WRONG, r"another project, which the package index has.*pip uninstall apex"),
        (NEW, r"no apex\.parallel\.DistributedDataParallel .* or use backend=ddp"),
    ],
    ids=["none", "wrong", "new"],
)
def test_a_missing_or_foreign_apex_is_reported(install, files, said):
    install(files)
    with (
        pytest.raises(UsageError, match=said),
        distributed.join(compose.load(["backend=apex"]).backend),
    ):
        pass
    if files is not NEW:
        config = compose.load(["optimizer=fused_lamb"]).optimizer
        with pytest.raises(UsageError, match=said):
            build_optimizer(config, tiny_model())


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
