"""A module has at most one KFAC; a KFAC that is gone leaves nothing behind."""

import gc
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_bench import KFAC
from kfac_bench.core import attachment


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(*models):
    return torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)


def stance():
    return torch._dynamo.eval_frame._stance.stance


def hooks_on(model):
    return [h for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]


def train(model, optimizer, kfac):
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(8, 6)), torch.arange(8) % 3).backward()
    kfac.step()
    optimizer.step()


@pytest.fixture(autouse=True)
def _nothing_stays():
    gc.collect()
    yield
    gc.collect()
    assert stance() == "default"


def test_a_second_kfac_on_a_parameter_of_another_module_is_refused():
    """Both would precondition the same gradient."""
    for name in ("weight", "bias"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        setattr(model[1], name, getattr(model[0], name))
        first = KFAC(model[0], sgd(model))
        with pytest.raises(RuntimeError, match="has another KFAC already"):
            KFAC(model[1], sgd(model))
        first.detach()
        KFAC(model[1], sgd(model)).detach()


def test_a_second_kfac_on_a_model_is_refused():
    model = network()
    first = KFAC(model, sgd(model))
    with pytest.raises(RuntimeError, match=r"layer '0' has another KFAC already: call detach\(\)"):
        KFAC(model, sgd(model))
    with pytest.raises(RuntimeError, match="layer '0' has another"):
        KFAC(nn.DataParallel(model), sgd(model))
    first.detach()
    second = KFAC(model, sgd(model))
    first.detach()  # does not touch the second
    train(model, sgd(model), second)
    second.detach()
    assert not hooks_on(model)
    assert stance() == "default"


@pytest.mark.parametrize("times", [False, True])
def test_a_kfac_that_nobody_holds_is_gone(times):
    model = network()
    optimizer = sgd(model)
    kfac = KFAC(model, optimizer)
    kfac.time_stages = times
    train(model, optimizer, kfac)
    assert hooks_on(model)
    del kfac
    assert not hooks_on(model)
    assert stance() == "default"
    KFAC(model, optimizer)


@pytest.mark.parametrize(
    "make", [lambda: nn.LSTM(4, 4), lambda: nn.TransformerEncoderLayer(4, 2, 8)]
)
def test_the_factors_of_a_detached_kfac_need_no_garbage_collection(make):
    model = make()
    kfac = KFAC(model, sgd(model))
    output = model(torch.randn(5, 3, 4))
    (output[0] if isinstance(output, tuple) else output).square().mean().backward()
    kfac.step()
    factors = ref(kfac._executor.store)
    del output
    gc.disable()
    try:
        kfac.detach()
        del kfac
        assert factors() is None
    finally:
        gc.enable()


def test_an_attached_kfac_is_gone_with_its_optimizer():
    """A notebook cell that makes the optimizer and attaches K-FAC, run twice."""
    model = network()
    for _ in range(2):
        optimizer = sgd(model)
        KFAC(model, optimizer).attach()
    assert len(hooks_on(model)) == len(hooks_on_one())
    with pytest.raises(RuntimeError, match=r"call KFAC.detach_all\(model\)"):
        KFAC(model, optimizer)
    KFAC.detach_all(model)
    assert not hooks_on(model)
    assert not optimizer._optimizer_step_pre_hooks
    KFAC(model, optimizer).attach()


def hooks_on_one():
    model = network()
    kfac = KFAC(model, sgd(model))
    hooks = hooks_on(model)
    kfac.detach()
    return hooks


def test_disjoint_models_have_a_kfac_each():
    """As a GAN needs them; here they are also parts of one model."""
    both = nn.ModuleList([network(), network()])
    first, second = (KFAC(model, sgd(model)) for model in both)
    for model, kfac in zip(both, (first, second), strict=True):
        train(model, sgd(model), kfac)
    with pytest.raises(RuntimeError, match="has another KFAC"):
        KFAC(both, sgd(*both))
    first.detach()
    assert not hooks_on(both[0])
    assert hooks_on(both[1])


def test_a_failed_construction_leaves_nothing():
    model = network()
    model.append(nn.LayerNorm(3))

    def breaks(hook, **options):
        raise OSError("no hooks here")

    model[2].register_forward_hook = breaks
    with pytest.raises(OSError, match="no hooks here") as raised:
        KFAC(model, sgd(model))
    assert not hooks_on(model)
    assert stance() == "default"
    del model[2].register_forward_hook
    KFAC(model, sgd(model))
    assert raised  # its traceback holds the failed object, as in a notebook


def test_a_failed_attach_leaves_nothing():
    model = network()

    class Engine:
        param_groups = sgd(model).param_groups

    with pytest.raises(TypeError, match=r"needs a torch\.optim\.Optimizer") as raised:
        KFAC(model, Engine()).attach()
    assert not hooks_on(model)
    KFAC(model, sgd(model)).attach()
    assert raised


def test_the_registry_keeps_no_model_alive():
    before = len(attachment._owner_of)
    model = network()
    kfac = KFAC(model, sgd(model))
    assert len(attachment._owner_of) == before + 2
    del model, kfac
    gc.collect()
    assert len(attachment._owner_of) == before
