"""The LSTM language model: what it computes, and K-FAC on its layers against the dense oracle."""

import copy

import pytest
import torch
from torch.nn import functional

from kfac_bench.core.layers.coverage import find_layers
from kfac_bench.models.options import LSTMConfig
from kfac_bench.models.token_networks import LSTMLanguageModel
from kfac_bench.record.events import Evaluated
from kfac_bench.tasks.language_tasks import LanguageModel
from tests.models.test_models import check_resumable, parameters
from tests.support import oracle, recurrent_oracle
from tests.support.layer_checks import DAMPING, assert_close, factors_of, kfac_of
from tests.support.runs import of_kind, train

LAYERS = ("lstm.ih_l0", "lstm.hh_l0", "lstm.ih_l1", "lstm.hh_l1", "head")


def small():
    return LSTMLanguageModel(symbols=11, embedding=5, width=4, layers=2)


def by_steps(model, window):
    """Return the logits of one window by the single steps of the oracle, and these steps."""
    state = recurrent_oracle.zero_state(model.lstm)
    sample = recurrent_oracle.Sample(model.lstm, model.tokens(window), state)
    return model.head(sample.output), sample


@pytest.mark.usefixtures("double")
def test_logits_are_those_of_single_time_steps():
    model, x = small(), torch.randint(11, (3, 6))
    for window, logits in zip(x, model(x), strict=True):
        torch.testing.assert_close(logits, by_steps(model, window)[0])
    check_resumable(small, x)


def test_the_bias_of_the_forget_gates_alone_starts_at_one():
    model = small()
    for layer in range(2):
        first, second = (getattr(model.lstm, f"bias_{k}_l{layer}") for k in ("ih", "hh"))
        enter, forget, new, out = (first + second).chunk(4)
        assert torch.equal(forget, torch.ones(4))
        assert all(0 < gate.abs().max() <= 2 * 4**-0.5 for gate in (enter, new, out))


def test_sizes_and_trained_weights():
    with torch.device("meta"):
        model = LSTMConfig("lstm").build((32,), 96, "language_model")
        assert model(torch.zeros(2, 32, dtype=torch.int64)).shape == (2, 32, 96)
    assert parameters(model) == 96 * 64 + 4 * 128 * (64 + 128 + 2) + 128 * 96 + 96
    model = small()
    model(torch.randint(11, (2, 7))).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_kfac_on_every_layer_equals_the_oracle(method):
    model, batch = small(), torch.randint(11, (2, 3, 6))
    assert {s.kind for s in find_layers(model)[1]} == {"Embedding"}
    alone = copy.deepcopy(model)
    kfac = kfac_of(model, method=method, skip=["Embedding"])
    LanguageModel().forward(model, tuple(batch))[0].backward()
    kfac.step()

    head = oracle.Calls([alone.head])
    logits, samples = zip(*(by_steps(alone, window) for window in batch[0]), strict=True)
    functional.cross_entropy(torch.cat(logits), batch[1].flatten()).backward()
    # One call of the head per window: in the batch they are samples of one call.
    a, g = (torch.cat(part, 1) for part in zip(*map(rows_of(alone.head), head.calls[alone.head])))  # noqa: B905
    factors = factors_of(kfac)
    assert sorted(factors) == sorted(LAYERS)
    for name in LAYERS:
        if name == "head":
            wants = [f[0] for f in oracle.layer_factors([(a, g)])]
            raw, got = (oracle.layer_gradient(m.head)[0] for m in (alone, model))
        else:
            part = name.removeprefix("lstm.")
            wants = recurrent_oracle.factors(samples, part)
            raw, got = (recurrent_oracle.gradient(m.lstm, part) for m in (alone, model))
        for key, want in zip("AG", wants, strict=True):
            assert_close(factors[name][key][0], want)
        assert_close(got, oracle.precondition(raw, *wants, DAMPING, method))


def rows_of(module):
    """Return a function from a call (x [T, d], g [T, out]) to the rows of one sample."""
    return lambda call: oracle.layer_rows(module, *(t.unsqueeze(0) for t in call))


def test_a_few_steps_with_kfac(tmp_path):
    overrides = ("model.width=16", "model.embedding=8", "data.sequence_length=16")
    kfac = ("kfac.fisher=mc", "kfac.method=inverse", "kfac.damping=0.03", "optimizer.lr=0.05")
    short = ("logger=none", "trainer.max_steps=20", "trainer.eval_freq=20")
    base = ("model=lstm", "trainer.batch_size=64", *overrides, *kfac, *short)
    status, path = train(tmp_path, base=base)
    first, last = (e.metrics["loss"] for e in of_kind(path, Evaluated))
    assert status == "finished"
    assert last < first - 0.3
