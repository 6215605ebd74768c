"""Which passes count on several ranks: with DDP, FSDP2, and statistics sent during backward."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from kfac_bench.core.distributed.dtensor import full
from tests.core.test_strategies import SMALL, Branched, planned
from tests.support.distributed import run_ranks
from tests.support.layer_checks import assert_same, factors_of
from tests.support.training import batch, make_kfac, my_part, sgd, sha256, tiny_model, weights_of

pytestmark = pytest.mark.ranks


def fsdp2(model):
    for part in model:
        if list(part.parameters()):
            fully_shard(part)
    return fully_shard(model)


def loss_of(model, seed, size=32):
    x, y = my_part(*batch(seed, size))
    x.requires_grad_()
    return F.cross_entropy(model(x), y), x


def adversarial_example(model, optimizer):
    loss, x = loss_of(model, 70)
    torch.autograd.grad(loss, x)


def discarded(to_none):
    def run(model, optimizer):
        loss, _ = loss_of(model, 70)
        loss.backward()
        optimizer.zero_grad(set_to_none=to_none)

    return run


OTHER_PASSES = {
    "nothing": lambda *_: None,
    "adversarial example": adversarial_example,
    "discarded": discarded(to_none=True),
    "discarded to zeros": discarded(to_none=False),
}
WRAPPERS = {
    "DDP": (DistributedDataParallel, {}),
    "DDP with views": (partial(DistributedDataParallel, gradient_as_bucket_view=True), {}),
    "DDP with overlap": (DistributedDataParallel, {"overlap": True}),
    "FSDP2": (fsdp2, {"strategy": "mem_opt"}),
}


def train(name, other):
    """Return the factors and weights after three steps with ``other`` in each of them."""
    wrap, options = WRAPPERS[name]
    model = wrap(tiny_model())
    optimizer = sgd(model)
    kfac = make_kfac(model, optimizer, options)
    for step in range(3):
        optimizer.zero_grad()
        OTHER_PASSES[other](model, optimizer)
        loss_of(model, step)[0].backward()
        kfac.step()
        optimizer.step()
    weights = [full(p.detach()).clone() for p in model.parameters()]
    kfac.detach()
    return {"f": factors_of(kfac), "w": dict(enumerate(weights))}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
def test_another_pass_leaves_no_statistics(name):
    for other in list(OTHER_PASSES)[1:]:
        for got, want in zip(
            run_ranks(2, train, name, other), run_ranks(2, train, name, "nothing"), strict=True
        ):
            assert_same(got, want, 1e-5)


def accumulate(name, parts, synchronize):
    """Return the factors after a step with micro-batches, which only the last may synchronize."""
    wrap, options = WRAPPERS[name]
    model = wrap(tiny_model())
    kfac = make_kfac(model, sgd(model), options)
    x, y = my_part(*batch(0))
    for i, (some_x, some_y) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
        is_last = i == parts - 1
        if wrap is fsdp2:
            model.set_requires_gradient_sync(synchronize or is_last)
        elif not synchronize:
            model.require_backward_grad_sync = is_last  # as in no_sync()
        with nullcontext() if is_last else kfac.accumulate():
            (F.cross_entropy(model(some_x), some_y) / parts).backward()
    kfac.step()
    factors = factors_of(kfac)
    kfac.detach()
    return factors


@pytest.mark.parametrize("synchronize", [True, False])
@pytest.mark.parametrize("name", WRAPPERS)
def test_accumulation_keeps_the_statistics_of_each_micro_batch(name, synchronize):
    for got, want in zip(
        run_ranks(2, accumulate, name, 4, synchronize),
        run_ranks(2, accumulate, name, 1, True),
        strict=True,
    ):
        assert_same(got, want, 1e-5)


def train_with_a_layer_on_one_rank(overlap, has_discarded_pass):
    """Return hashes of weights; rank 1 does not use the branch, so it sends less in backward."""
    bare = Branched()
    model = DistributedDataParallel(bare, find_unused_parameters=True)
    optimizer = sgd(model)
    with planned(**SMALL):
        kfac = make_kfac(model, optimizer, {}, overlap=overlap)
    hashes = []
    for step in range(3):
        for seed in (70, step) if has_discarded_pass else (step,):
            optimizer.zero_grad()
            x, y = my_part(*batch(seed))
            uses_branch = dist.get_rank() == 0
            F.cross_entropy(model(x.flatten(1)[:, :5], uses_branch), y).backward()
        kfac.step()
        optimizer.step()
        hashes.append(sha256(weights_of(bare)))
    return hashes


def test_statistics_that_were_sent_before_their_gradients_were_discarded():
    """Ranks that have sent different numbers of messages send the rest, and then all again."""
    want = run_ranks(2, train_with_a_layer_on_one_rank, False, False)
    assert run_ranks(2, train_with_a_layer_on_one_rank, False, True) == want
    assert run_ranks(2, train_with_a_layer_on_one_rank, True, True) == want
    assert run_ranks(2, train_with_a_layer_on_one_rank, True, False) == want


def tensor_parallel(to_none):
    """Return the factors of a tensor-parallel model, with and without a discarded pass."""
    results = []
    for has_discarded_pass in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        kfac = make_kfac(model, sgd(model), {"strategy": "mem_opt", "kl_clip": None})
        x, y = torch.randn(8, 6), torch.arange(8) % 3
        if has_discarded_pass:
            (3 * F.cross_entropy(model(x[:6]), y[:6])).backward()
            model.zero_grad(set_to_none=to_none)
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        results.append(factors_of(kfac))
        kfac.detach()
    return results


@pytest.mark.parametrize("to_none", [True, False])
def test_a_discarded_pass_of_a_tensor_parallel_model(to_none):
    for want, got in run_ranks(2, tensor_parallel, to_none):
        assert_same(got, want, 1e-5)


def accumulate_without_the_wrapper():
    """Return whether K-FAC, which got the bare model, saw the flag of no_sync()."""
    bare = tiny_model()
    model, optimizer = DistributedDataParallel(bare), sgd(bare)
    kfac = make_kfac(bare, optimizer, {"overlap": True})
    x, y = my_part(*batch(0))
    with model.no_sync():
        F.cross_entropy(model(x), y).backward()
    F.cross_entropy(model(x), y).backward()
    kfac.step()
    kfac.detach()


def test_a_wrapper_that_kfac_did_not_get_says_when_more_backwards_follow():
    """Hugging Face's Trainer gives its callbacks the bare model."""
    run_ranks(2, accumulate_without_the_wrapper)
