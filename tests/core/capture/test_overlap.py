"""Statistics that are sent while backward runs: the same bits, whatever the model does."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from kfac_bench.core.distributed.collective import TorchCollective
from kfac_bench.core.planning.plan import ReduceFactors
from tests.core.test_strategies import SMALL, Branched, planned
from tests.support.distributed import RankFailed, run_ranks
from tests.support.training import batch, make_kfac, my_part, sgd, sha256, tiny_model, weights_of

pytestmark = pytest.mark.ranks
torch.set_num_threads(1)

STEPS = 3


class Noting(TorchCollective):
    """Of each message its name, and whether backward was running when it started."""

    def __init__(self):
        super().__init__()
        self.started = []

    def _note(self, name):
        self.started.append((name, torch._C._current_graph_task_id() != -1))

    def all_reduce(self, x, ranks, name):
        self._note(name)
        return super().all_reduce(x, ranks, name)

    def reduce(self, x, root, ranks, name):
        self._note(name)
        return super().reduce(x, root, ranks, name)


class Twice(nn.Module):
    """One layer is used twice, one for an output that nobody needs, one is recomputed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unneeded = nn.Linear(36, 6), nn.Linear(6, 4)
        self.recomputed, self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x.flatten(1)).tanh()
        self.unneeded(x)
        x = checkpoint(lambda y: self.recomputed(y).tanh(), x, use_reentrant=False)
        return self.last(self.again(self.again(x).tanh()))


def plain(model, kfac, x, y, scale):
    (scale * F.cross_entropy(model(x), y)).backward()


def fisher(model, kfac, x, y, scale):
    output = model(x)
    kfac.fisher_backward(output)
    (scale * F.cross_entropy(output, y)).backward()


def in_parts(no_sync, accumulate, part=plain):
    """In two backwards, the first within ``no_sync``, or ``accumulate``, or both."""

    def backward(model, kfac, x, y, scale):
        contexts = [model.no_sync()] * no_sync + [kfac.accumulate()] * accumulate
        half = len(x) // 2 + 1
        for context in contexts:
            context.__enter__()
        part(model, kfac, x[:half], y[:half], scale * half / len(x))
        for context in contexts:
            context.__exit__(None, None, None)
        part(model, kfac, x[half:], y[half:], scale * (1 - half / len(x)))

    return backward


def on_one_rank(model, kfac, x, y, scale):
    (scale * F.cross_entropy(model(x.flatten(1)[:, :5], dist.get_rank() == 0), y)).backward()


class Heads(nn.Module):
    """Each head gets a forward of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(36, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x, head):
        return self.heads[head](self.trunk(x.flatten(1)).tanh())


def two_forwards(model, kfac, x, y, scale):
    losses = [F.cross_entropy(model.module(x + i, i), y) for i in range(2)]
    (scale * sum(losses) / 2).backward()
    for p in model.parameters():  # DistributedDataParallel sees one forward for each backward
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


CASES = {  # model, backward, loss scale, options, whether DDP's wrapper is what KFAC gets
    "plain": (tiny_model, plain, 1.0, {}, True),
    "inverse": (tiny_model, plain, 1.0, {"method": "inverse"}, True),
    "owners": (tiny_model, plain, 1.0, {"strategy": "owner_reduce"}, True),
    "local": (tiny_model, plain, 1.0, {"strategy": "local_factors"}, True),
    "ekfac": (tiny_model, plain, 1.0, {"method": "ekfac", "update_freq": 3}, True),
    "reduce": (tiny_model, plain, 1.0, {"weight_sharing": "reduce"}, True),
    "half": (tiny_model, plain, 1.0, {"state_dtype": torch.bfloat16}, True),
    "loss scale": (tiny_model, plain, 777.7, {}, True),
    "mc": (tiny_model, fisher, 1.0, {"fisher": "mc"}, True),
    "type2": (tiny_model, fisher, 3.3, {"fisher": "type2"}, True),
    "no_sync": (tiny_model, in_parts(True, False), 1.0, {}, True),
    "accumulate": (tiny_model, in_parts(False, True), 1.0, {}, True),
    "accumulate and no_sync": (tiny_model, in_parts(True, True), 1.0, {}, False),
    "type2 in parts": (tiny_model, in_parts(True, False, fisher), 1.0, {"fisher": "type2"}, True),
    "twice": (Twice, plain, 1.0, {}, True),
    "one rank": (Branched, on_one_rank, 1.0, {}, True),
    "two forwards": (Heads, two_forwards, 1.0, {}, True),
}


def train(case, overlap):
    """Hashes of gradients and weights; which messages started while backward ran, or before."""
    make_model, backward, scale, options, wrapped = CASES[case]
    torch.manual_seed(dist.get_rank())
    bare = make_model()
    model = DistributedDataParallel(bare, find_unused_parameters=make_model is not tiny_model)
    torch.manual_seed(dist.get_rank())
    optimizer, collective, hashes = sgd(model), Noting(), []
    with planned(**SMALL):
        kfac = make_kfac(
            model if wrapped else bare, optimizer, options, collective=collective, overlap=overlap
        )
    early = []
    for step in range(STEPS):
        optimizer.zero_grad()
        collective.started.clear()
        backward(model, kfac, *my_part(*batch(step)), scale)
        sent = [name for name, _ in collective.started]
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= scale
        kfac.step(loss_scale=scale)
        optimizer.step()
        early.append([n for n in sent if n.startswith("Reduce")])
        hashes.append(sha256([*weights_of(bare)]))
        assert not torch.isnan(torch.cat([w.flatten() for w in weights_of(bare)])).any()
    return hashes, early, [op.name for op in kfac.plan.factors if isinstance(op, ReduceFactors)]


def train_both_ways(case):
    return train(case, False), train(case, True)


@pytest.mark.parametrize("case", CASES)
def test_the_results_are_the_same_bits(case):
    results = run_ranks(2, train_both_ways, case)
    for rank, ((hashes, early, _), (overlapped, started, messages)) in enumerate(results):
        assert overlapped == hashes == results[0][0][0]
        assert early == [[]] * STEPS
        assert len(messages) == {"local": 0, "one rank": 2, "two forwards": 3}.get(case, 5)
        want = {
            "half": [[]],  # they wait for the scales
            "twice": [messages[:3]],  # a layer without a gradient does not count
            "one rank": [messages if rank == 0 else []],  # where a layer was not used
        }.get(case, [messages])
        assert started == want * STEPS


def gradient_after_the_statistics_were_sent():
    model = DistributedDataParallel(tiny_model())
    kfac = make_kfac(model, sgd(model), {}, overlap=True)
    x, y = my_part(*batch(0))
    plain(model, kfac, x, y, 1.0)
    plain(model, kfac, x, y, 1.0)


def test_a_second_backward_is_an_error_that_says_what_to_do():
    with pytest.raises(RankFailed, match=r"got a gradient after its statistics .* accumulate\(\)"):
        run_ranks(2, gradient_after_the_statistics_were_sent)


def load_between_backward_and_step():
    """What was sent is forgotten: the step is that of a run that did not do it."""
    hashes = []
    for loads in (False, True):
        bare = tiny_model()
        model = DistributedDataParallel(bare)
        optimizer = sgd(model)
        kfac = make_kfac(model, optimizer, {}, overlap=True)
        state = kfac.state_dict()
        if loads:
            plain(model, kfac, *my_part(*batch(1)), 1.0)
            kfac.load_state_dict(state)
            optimizer.zero_grad()
        plain(model, kfac, *my_part(*batch(0)), 1.0)
        kfac.step()
        optimizer.step()
        hashes.append(sha256(weights_of(bare)))
    return hashes


def test_a_state_loaded_between_backward_and_step_forgets_what_was_sent():
    for plain_hash, loaded_hash in run_ranks(2, load_between_backward_and_step):
        assert plain_hash == loaded_hash
