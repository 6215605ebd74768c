"""Loading a state into a preconditioner that has already stepped."""

import copy
import math

import pytest
import torch
from torch import nn

from kfac_bench import eigen_adam
from tests.core.test_preconditioner import backward, batch, kfac_of, tiny_model
from tests.core.test_strategies import has_batches, planned

METHODS = ["eigen", "inverse", "ekfac"]


def tensors_of(state):
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state
    return [t for v in values if isinstance(v, dict | list | torch.Tensor) for t in tensors_of(v)]


def step(model, kfac, seed):
    """Return the preconditioned gradients of one step; weights do not change."""
    backward(model, *batch(seed=seed))
    kfac.step()
    return [p.grad.clone() for p in model.parameters()]


def test_loading_forgets_what_the_preconditioner_held():
    model = tiny_model()
    kfac = kfac_of(model)
    empty = copy.deepcopy(kfac.state_dict())
    first = step(model, kfac, seed=1)
    step(model, kfac, seed=2)
    kfac.load_state_dict(empty)
    assert not any(tensor.any() for tensor in tensors_of(kfac.state_dict()))
    for again, once in zip(step(model, kfac, seed=1), first, strict=True):
        assert torch.equal(again, once)


@pytest.mark.parametrize("factor_init", ["debiased", "identity"])
def test_a_loaded_state_continues_the_averages_bit_by_bit(factor_init):
    model = tiny_model()
    straight = kfac_of(model, factor_init=factor_init)
    step(model, straight, seed=1)
    saved = copy.deepcopy(straight.state_dict())
    want = step(model, straight, seed=2)
    straight.detach()
    loaded = kfac_of(model, factor_init=factor_init)
    loaded.load_state_dict(saved)
    for again, once in zip(step(model, loaded, seed=2), want, strict=True):
        assert torch.equal(again, once)


@pytest.mark.parametrize("method", METHODS)
def test_loading_copies_the_state_of_the_caller(method):
    model = tiny_model()
    kfac = kfac_of(model, method=method)
    step(model, kfac, seed=1)
    step(model, kfac, seed=2)
    state = copy.deepcopy(kfac.state_dict())
    saved = copy.deepcopy(state)
    kfac.load_state_dict(state)
    for tensor in tensors_of(state):
        tensor.fill_(math.nan)
    held = tensors_of(kfac.state_dict())
    assert held
    for tensor, want in zip(held, tensors_of(saved), strict=True):
        assert torch.equal(tensor, want)


@pytest.mark.parametrize("method", METHODS)
def test_loading_replaces_decompositions_that_were_stacked(method):
    """A step after loading uses the loaded decompositions where layers are one batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 5), nn.Linear(5, 5), nn.Linear(5, 5))
    with planned(batch_numel=1 << 20):
        kfac = kfac_of(model, method=method, update_freq=10, factor_update_freq=10)
    assert has_batches(kfac.plan)
    step(model, kfac, seed=1)
    state, want = copy.deepcopy(kfac.state_dict()), step(model, kfac, seed=3)
    kfac.load_state_dict({"steps": 0, "layers": {}})
    step(model, kfac, seed=2)  # other decompositions, stacked
    kfac.load_state_dict(state)
    for got, once in zip(step(model, kfac, seed=3), want, strict=True):
        assert torch.equal(got, once)


@pytest.mark.parametrize("options", [{"method": m} for m in METHODS] + [{"background": True}])
def test_a_state_of_another_precision_is_taken_over_in_that_of_the_model(options):
    """As torch does with the weights of a model."""
    model = tiny_model()
    kfac = kfac_of(model.double(), **options)
    inputs, targets = batch(seed=1)
    backward(model, inputs.double(), targets)
    kfac.step()
    state = copy.deepcopy(kfac.state_dict())
    kfac.detach()
    model.float().zero_grad()
    kfac = kfac_of(model, **options)
    kfac.load_state_dict(state)
    step(model, kfac, seed=2)
    assert {t.dtype for t in tensors_of(kfac.state_dict())} == {torch.float32}


def test_layers_that_steps_leave_out_keep_one_copy_of_their_decompositions():
    """As with layer drop. The layers that a step reaches are preconditioned as one batch."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 5), *(nn.Linear(5, 5) for _ in range(4)))
    with planned(batch_numel=1 << 20):
        kfac = kfac_of(model, update_freq=100, factor_update_freq=100)
    for left_out in (None, 2, 3, 4):
        model.zero_grad()
        h = batch(seed=1)[0]
        for i, layer in enumerate(model):
            h = layer(h) if i != left_out else h
        h.square().mean().backward()
        kfac.step()
    held = [name for names in kfac._executor.store._stacks for name in names]
    assert sorted(held) == ["1", "2", "3", "5"]


def damaged(path, value):
    """Return a function that replaces an entry of a state, or removes it if there is no value."""

    def damage(state):
        *parents, last = path
        for key in parents:
            state = state[key]
        if value is None:
            del state[last]
        else:
            state[last] = value

    return damage


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["layers"], [1]),
        (["layers", "7"], [1]),
        (["layers", 8], {"A": {}}),
        (["layers", "7", "A"], 3),
        (["layers", "7", "A", "weight"], None),
        (["layers", "7", "A", "factor"], None),
        (["layers", "7", "A", "pending"], 3),
        (["layers", "7", "adam"], {"first": 3}),
        (["layers", "7", "adam"], 3),
        (["left"], 3),
        (["left"], ["8"]),
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_damaged_state_is_refused_and_changes_nothing(path, value, steps):
    model = tiny_model()
    kfac = kfac_of(model)
    step(model, kfac, seed=1)
    saved = copy.deepcopy(kfac.state_dict()) | {"steps": steps}
    before = copy.deepcopy(tensors_of(kfac.state_dict()))
    damaged(path, value)(saved)
    with pytest.raises(ValueError, match="K-FAC state"):
        kfac.load_state_dict(saved)
    assert kfac.steps == 1
    after = tensors_of(kfac.state_dict())
    assert all(map(torch.equal, after, before))
    assert len(after) == len(before)


def test_a_list_is_no_state():
    with pytest.raises(ValueError, match="the argument is a list, expected a dict"):
        kfac_of(tiny_model()).load_state_dict([])


@pytest.mark.parametrize("steps", [-1, 2**62, 1.5])
def test_a_number_of_steps_that_no_run_has_is_refused(steps):
    kfac = kfac_of(tiny_model())
    with pytest.raises(ValueError, match=r"steps is .*, expected a whole number"):
        kfac.load_state_dict({"steps": steps, "layers": {}})


def test_shards_of_two_checkpoints_are_refused():
    model = tiny_model()
    kfac = kfac_of(model)
    step(model, kfac, seed=1)
    early = copy.deepcopy(kfac.state_dict())
    step(model, kfac, seed=2)
    with pytest.raises(ValueError, match=r"shards of different steps \(1 and 2\)"):
        kfac.load_state_dict(early, kfac.state_dict())


def eigen_adam_state(shard):
    """Return the optimizer and the state after a step; layers of one shape share stacks."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    optimizer = eigen_adam(model, kfac={"update_freq": 1, "factor_update_freq": 1})
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    return optimizer.preconditioner, optimizer.preconditioner.state_dict(shard=shard)


def test_a_shard_keeps_no_memory_of_other_layers():
    _, saved = eigen_adam_state(shard=True)
    for tensor in tensors_of(saved):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_missing_moments_of_adam_are_said():
    kfac, saved = eigen_adam_state(shard=False)
    state = copy.deepcopy(saved)
    del state["layers"]["1"]["adam"]
    with pytest.warns(UserWarning, match="lacks Adam's moments of 1 layers, such as 1, which"):
        kfac.load_state_dict(state)
    kfac.load_state_dict(saved)


def test_a_layer_that_had_no_gradient_lacks_no_moments():
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizer = eigen_adam(model)
    model[0](torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    for each in (optimizer, optimizer.preconditioner):
        each.load_state_dict(each.state_dict())  # a warning is an error
