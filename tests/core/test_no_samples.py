"""A layer that a step brings no samples, as a mask head without boxes: as if it was not used."""

import pytest
import torch
from torch import nn

from kfac_bench.core import KFAC
from tests.support.distributed import run_ranks


class TwoHeads(nn.Module):
    """The second head sees only the marked samples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.linear, self.conv = nn.Linear(6, 6), nn.Linear(6, 3), nn.Conv2d(6, 2, 1)

    def forward(self, x, marked):
        x = self.body(x).tanh()
        some = x[marked]
        loss = x.square().sum() / len(x)
        for y in (self.linear(some), self.conv(some.view(-1, 6, 1, 1))):
            loss = loss + y.square().sum() / max(1, len(some))
        return loss


def steps(marks, samples=4, rank=0, **options):
    """Factors and their weights after a step per mark, and what was dropped."""
    model = TwoHeads()
    kfac = KFAC(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        update_freq=2,
        factor_update_freq=1,
        trust_ratio=None,
        damping=0.1,
        spread=False,
        **options,
    )
    generator = torch.Generator().manual_seed(1)
    for marked in marks:
        x = torch.randn(2, samples, 6, generator=generator)[rank]
        model.zero_grad()
        model(x, torch.full((samples,), marked)).backward()
        kfac.step()
    store = kfac._executor.store
    factors = {key: store.factor(key).clone() for key in sorted(store.factors)}
    weights = {key: float(store.weights[key]) for key in factors}
    dropped = kfac.dropped_statistics
    kfac.detach()
    return factors, weights, dropped


OPTIONS = [{}, {"method": "ekfac"}, {"weight_sharing": "reduce"}, {"method": "inverse"}]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_without_samples_leaves_the_statistics_alone(options):
    with_none, weights, dropped = steps([True, False], **options)
    before, weights_before, _ = steps([True], **options)
    assert dropped == 0
    for key, factor in with_none.items():
        if key[0] == "body":
            assert weights[key] > weights_before[key] == 1
            assert not torch.equal(factor, before[key])
        else:
            assert weights[key] == weights_before[key] == 1
            assert torch.equal(factor, before[key])


def test_a_first_step_without_samples_does_not_count():
    factors, weights, _ = steps([False, True, True])
    assert weights["body", "A"] == pytest.approx(0.95 * 1.95 + 1)
    assert weights["conv", "A"] == weights["linear", "G"] == pytest.approx(1.95)
    assert all(torch.isfinite(f).all() for f in factors.values())


def on_a_rank(alone, overlap):
    """In the first step rank 0 has samples for the heads, alone or not; in the second none has."""
    rank = torch.distributed.get_rank()
    return steps([rank == 0 or not alone, False], rank=rank, overlap=overlap)


@pytest.mark.ranks
@pytest.mark.parametrize("alone", [True, False])
def test_a_rank_without_samples_has_no_weight(alone):
    late, early = (run_ranks(2, on_a_rank, alone, overlap) for overlap in (False, True))
    one_process = steps([True, False], rank=0)[0]
    for factors, weights, dropped in (*late, *early):
        assert (weights["conv", "G"], weights["body", "G"]) == (1, pytest.approx(1.95))
        assert dropped == 0
        for key, factor in factors.items():
            assert torch.equal(factor, late[0][0][key])
            of_rank_0 = torch.allclose(factor, one_process[key])
            assert of_rank_0 == (alone and key[0] != "body"), key
