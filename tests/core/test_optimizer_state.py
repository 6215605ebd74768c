"""The state of an optimizer alone continues a run of EigenAdam, also with torch's own tools."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

from kfac_bench import KFAC, eigen_adam
from kfac_bench.core.build_eigen_adam import KFAC_DEFAULTS
from kfac_bench.core.distributed.dtensor import full, is_sharded
from kfac_bench.core.eigen_adam_optimizer import EigenAdam
from kfac_bench.core.stepper import WITH_STATISTICS, WITHOUT
from tests.core.test_eigen_adam import LR, Net, batch
from tests.support.distributed import run_ranks
from tests.support.quick import slow

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
OFTEN = {"update_freq": 2, "factor_update_freq": 1}
AMPLE = 1e9
"""A budget for any time."""


def parts(options):
    """Return the steps before a state is saved, and the steps after it."""
    begun = WITH_STATISTICS + WITHOUT if "max_overhead" in options else 0
    return range(begun + 3), range(begun + 3, begun + 6)


class Attentive(nn.Module):
    """Attention, whose three projections are layers that share one weight, and a grouped layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.grouped = nn.Conv1d(8, 4, 1, groups=2)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        x = x.reshape(len(x), 2, 8)
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.last(self.norm(self.grouped(x.mT).mean(-1)))


def train(model, optimizer, steps):
    """Train on this rank's part of each batch; return the losses."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    losses = []
    for i in steps:
        x, y = (part.chunk(ranks)[rank] for part in batch(i))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        for p in model.parameters():
            if ranks > 1 and p.grad is not None and not is_sharded(p):
                dist.all_reduce(p.grad)
                p.grad.div_(ranks)
        optimizer.step()
    return losses


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def weights(model):
    return [full(p.detach()).clone() for p in model.parameters()]


def assert_same(ours, theirs):
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one, two)


def with_sgd(model):
    optimizer = SGD(model.parameters(), 0.1)
    optimizer.preconditioner = KFAC(model, optimizer, **OFTEN).attach()
    return optimizer


def save(folder, model, optimizer, options=None):
    states = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(states, checkpoint_id=folder)


def load(folder, model, optimizer, options=None):
    states = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(states, checkpoint_id=folder)
    set_model_state_dict(model, states["model"])
    set_optimizer_state_dict(model, optimizer, states["optimizer"], options=options)


class Doubled(nn.Linear):
    """More than a linear map, so that K-FAC leaves the layer to the optimizer."""

    def forward(self, x):
        return super().forward(x) + F.linear(x.roll(1, 0), self.weight)


def doubled(*linear):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), linear[0](16, 6), nn.Tanh(), linear[1](6, 4))


@pytest.mark.parametrize("strategy", ["owner_reduce", "local_factors", "mem_opt"])
def test_one_rank_holds_the_whole_state_of_each_strategy(strategy):
    """A script for several ranks is tried on one rank first."""
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = eigen_adam(model, kfac={"strategy": strategy})
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict()
    optimizer.load_state_dict(optimizer.state_dict())
    copy.deepcopy(optimizer)


@pytest.mark.filterwarnings("ignore:K-FAC")
def test_layers_that_were_left_to_the_optimizer_stay_left():
    seldom = {"update_freq": 4, "factor_update_freq": 4}  # no check follows the resume
    model = doubled(Doubled, nn.Linear)
    optimizer = eigen_adam(model, kfac=seldom)
    train(model, optimizer, range(6))
    assert optimizer.preconditioner.state_dict()["left"] == ["1"]
    state = through_a_file(optimizer.state_dict())
    other = doubled(Doubled, nn.Linear)
    other.load_state_dict(model.state_dict())
    loaded = eigen_adam(other, kfac=seldom)
    loaded.load_state_dict(state)
    for each, its in ((model, optimizer), (other, loaded)):
        train(each, its, range(6, 8))
    assert_same(weights(other), weights(model))


@pytest.mark.filterwarnings("ignore:K-FAC")
def test_distributed_checkpoint_keeps_layers_that_were_left(tmp_path):
    model = doubled(Doubled, nn.Linear)
    optimizer = with_sgd(model)
    train(model, optimizer, range(6))
    kfac = optimizer.preconditioner
    assert kfac.state_dict()["left"] == ["1"]
    dcp.save({"kfac": kfac}, checkpoint_id=tmp_path)
    resumed = with_sgd(doubled(Doubled, nn.Linear)).preconditioner
    dcp.load({"kfac": resumed}, checkpoint_id=tmp_path)
    assert resumed.state_dict()["left"] == ["1"]


def test_a_copy_of_the_class_from_the_groups_keeps_the_options():
    """Horovod's DistributedOptimizer makes its optimizer so."""
    model = Net()
    ours = EigenAdam(model.parameters(), LR, scale=2.0, orthogonalize="none", update_clip=None)
    wrapped = type("EigenAdam", (EigenAdam,), {})(ours.param_groups)
    assert wrapped.rule == ours.rule
    wrapped.load_state_dict(EigenAdam(model.parameters()).state_dict())
    assert type("EigenAdam", (EigenAdam,), {})(wrapped.param_groups).rule == ours.rule
    assert "eigen_adam" not in EigenAdam(model.parameters()).param_groups[0]


def test_a_state_waits_also_after_a_kfac_that_it_does_not_fit():
    again, resumed = loaded(*trained(scale=2.0, orthogonalize="none"))
    with pytest.raises(ValueError, match="use the same model, max_dim, block_size"):
        KFAC(again, resumed, **KFAC_DEFAULTS, max_dim=2)
    assert KFAC(again, resumed, **KFAC_DEFAULTS).steps == 3


@pytest.mark.filterwarnings("ignore:K-FAC")
def test_a_model_whose_layers_are_all_left_is_trained_by_adamw():
    model = doubled(Doubled, Doubled)
    optimizer = eigen_adam(model, kfac=OFTEN)
    train(model, optimizer, range(6))
    assert optimizer.preconditioner.state_dict()["left"] == ["1", "3"]
    optimizer.preconditioner.detach()
    with pytest.raises(RuntimeError, match="has no KFAC"):
        train(model, optimizer, range(1))


@pytest.mark.parametrize("make", [Net, Attentive])
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_distributed_checkpoint_continues_bit_by_bit(tmp_path, background, flatten, make):
    """In the background, decompositions have begun at step 3 that are not in use."""
    kfac = OFTEN | {"background": background}
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = make()
    optimizer = eigen_adam(model, LR, kfac=kfac)
    train(model, optimizer, range(3))
    save(tmp_path, model, optimizer, options)
    train(model, optimizer, range(3, 8))
    again = make()
    resumed = eigen_adam(again, LR, kfac=kfac)
    load(tmp_path, again, resumed, options)
    assert resumed.preconditioner.steps == 3
    train(again, resumed, range(3, 8))
    assert_same(weights(again), weights(model))


def test_distributed_checkpoint_loads_into_a_new_kfac(tmp_path):
    model = Net()
    optimizer = with_sgd(model)
    train(model, optimizer, range(3))
    saved = {"model": model.state_dict(), "kfac": optimizer.preconditioner}
    dcp.save(saved, checkpoint_id=tmp_path)
    train(model, optimizer, range(3, 6))
    again = Net()
    resumed = with_sgd(again)
    dcp.load({"model": again.state_dict(), "kfac": resumed.preconditioner}, checkpoint_id=tmp_path)
    train(again, resumed, range(3, 6))
    assert_same(weights(again), weights(model))


def check_making_the_state(make, at):
    losses = []
    for calls in (False, True):
        model = Net()
        model.norm.requires_grad_(False)  # AdamW's steps for a norm do count: that is torch's way
        optimizer = make(model)
        before = train(model, optimizer, range(at))
        optimizer.zero_grad()
        if calls:
            get_optimizer_state_dict(model, optimizer)
        assert optimizer.preconditioner.steps == at
        losses.append(before + train(model, optimizer, range(at, 8)))
        optimizer.preconditioner.detach()
    assert losses[0] == losses[1]


MADE = pytest.mark.parametrize(("make", "at"), [(with_sgd, 0), (eigen_adam, 0), (eigen_adam, 3)])


@MADE
def test_making_the_state_is_no_step(make, at):
    """torch steps the optimizer with gradients of zeros if the optimizer has no state."""
    check_making_the_state(make, at)


@pytest.mark.ranks
@MADE
def test_making_the_state_is_no_step_on_ranks(make, at):
    run_ranks(2, check_making_the_state, make, at)


def trained(steps=3, **options):
    model = Net()
    optimizer = eigen_adam(model, LR, **options)
    train(model, optimizer, range(steps))
    return model, optimizer


def loaded(model, optimizer):
    """Return what the Trainers of frameworks have before a callback builds KFAC."""
    states = through_a_file([model.state_dict(), optimizer.state_dict()])
    again = Net()
    again.load_state_dict(states[0])
    resumed = EigenAdam(again.parameters(), LR, scale=2.0, orthogonalize="none")
    resumed.load_state_dict(states[1])
    resumed.load_state_dict(resumed.state_dict())  # Accelerate does so
    return again, resumed


@pytest.mark.parametrize(
    "duplicate",
    [loaded, lambda *pair: copy.deepcopy(pair), lambda *pair: pickle.loads(pickle.dumps(pair))],
    ids=["loaded", "copied", "pickled"],
)
def test_a_state_waits_for_the_kfac(duplicate):
    model, optimizer = trained(scale=2.0, orthogonalize="none")
    again, resumed = duplicate(model, optimizer)
    with pytest.raises(RuntimeError, match="has no KFAC"):
        resumed.step()
    KFAC(again, resumed, **KFAC_DEFAULTS).attach()
    train(model, optimizer, range(3, 6))
    train(again, resumed, range(3, 6))
    assert_same(weights(again), weights(model))


@pytest.mark.parametrize("built", [0, 1], ids=["before_both", "between"])
def test_a_state_waits_for_the_kfacs_of_two_models(built):
    """As of an actor and a critic, which one optimizer trains."""

    def pair():
        models = nn.ModuleList([Net(), Net()])
        return models, EigenAdam(models.parameters(), LR)

    def build(models, optimizer):
        return [KFAC(model, optimizer, **KFAC_DEFAULTS).attach() for model in models]

    models, optimizer = pair()
    build(models, optimizer)
    for i in range(3):
        optimizer.zero_grad()
        x, y = batch(i)
        F.cross_entropy(models[0](x) + models[1](x), y).backward()
        optimizer.step()
    saved = through_a_file(optimizer.state_dict())
    again, resumed = pair()
    kfacs = build(again[:built], resumed)
    resumed.load_state_dict(saved)
    kfacs += build(again[built:], resumed)
    assert [kfac.steps for kfac in kfacs] == [3, 3]
    for key, entry in saved["state"].items():
        torch.testing.assert_close(resumed.state_dict()["state"][key], entry, rtol=0, atol=0)


def test_a_state_from_before_loads_with_that_of_the_kfac():
    """It has no entry of K-FAC, so alone it would go on with empty moments."""
    model, optimizer = trained()
    kfac = through_a_file(optimizer.preconditioner.state_dict())
    optimizer.preconditioner.in_optimizer_state = False
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    assert sorted(saved[1]["state"]) == [2, 3]  # the norm
    train(model, optimizer, range(3, 6))
    again = Net()
    again.load_state_dict(saved[0])
    resumed = eigen_adam(again, LR)
    resumed.load_state_dict(copy.deepcopy(saved[1]))
    with pytest.warns(UserWarning, match="lacks the moments and factors") as given:
        train(again, resumed, range(3, 5))
    assert len(given) == 1
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    resumed.preconditioner.load_state_dict(kfac)
    train(again, resumed, range(3, 6))
    assert_same(weights(again), weights(model))


def test_a_damaged_state_is_refused():
    _, optimizer = trained(2)
    for damage in (
        lambda entry: entry.pop("0"),
        lambda entry: entry.update({"0": 3}),
        lambda entry: entry["0"]["A"].pop("weight"),
        lambda entry: entry["0"]["adam"].update(first=torch.zeros(2)),
        lambda entry: entry["0"]["adam"].update(steps="many"),
        lambda entry: entry["0"]["G"].update(eigen=[]),
        lambda entry: entry.update(steps=-1),
    ):
        saved = through_a_file(optimizer.state_dict())
        damage(saved["state"][4]["kfac"])
        saved["param_groups"][0]["lr"] = 9.0
        saved["state"][2]["step"] += 5
        with pytest.raises(ValueError, match="state") as error:
            optimizer.load_state_dict(saved)
        assert "\n" not in str(error.value)
        assert optimizer.param_groups[0]["lr"] == LR
        assert optimizer.state_dict()["state"][2]["step"] == 2


def test_a_copy_is_refused():
    model = Net()
    optimizer = with_sgd(model)
    with pytest.raises(TypeError, match="build a KFAC for the copies"):
        copy.deepcopy((model, optimizer, optimizer.preconditioner))


@pytest.mark.parametrize("make", [with_sgd, eigen_adam])
def test_another_dtype_after_the_first_step_is_refused(make):
    model = Net()
    optimizer = make(model)
    train(model, optimizer, range(1))
    model.double()
    F.cross_entropy(model(batch(1)[0].double()), batch(1)[1]).backward()
    with pytest.raises(RuntimeError, match=r"conv was torch\.float32 .* torch\.float64 now"):
        optimizer.step()


def on_rank(options, saved=None):
    """Train on ranks; return the state in between and the weights."""
    steps, more = parts(options)
    model = Net()
    optimizer = eigen_adam(model, 0.001, kfac=OFTEN | options)
    if saved is not None:
        saved = copy.deepcopy(saved)  # ranks of a test share memory
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    elif not optimizer.preconditioner.holds_whole_state:
        train(model, optimizer, steps)
        with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(\) on all ranks"):
            optimizer.state_dict()
    else:
        train(model, optimizer, steps)
    optimizer.consolidate_state_dict()
    state = through_a_file([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, more)
    result = state, weights(model)
    optimizer.preconditioner.detach()
    return result


@pytest.mark.ranks
@pytest.mark.parametrize(
    "options",
    [
        slow({"strategy": "mem_opt", "max_overhead": AMPLE}),
        {"strategy": "owner_reduce"},
        {"strategy": "comm_opt", "background": True},
    ],
    ids=str,
)
def test_ranks_continue_bit_by_bit(options):
    """All ranks get the same whole state, which continues on one process, too."""
    (saved, want), (other, _) = run_ranks(2, on_rank, options)
    assert repr(saved) == repr(other)
    assert_same(run_ranks(2, on_rank, options, saved)[1][1], want)
    if "background" in options:
        return
    _, alone = on_rank(options | {"strategy": "comm_opt", "spread": False}, saved)
    for ours, theirs in zip(alone, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def fsdp_on_rank(folder, options, resumes):
    steps, more = parts(options)
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = eigen_adam(model, LR, kfac=OFTEN | options)
    if resumes:
        load(folder, model, optimizer)
    else:
        train(model, optimizer, steps)
        optimizer.consolidate_state_dict()
        save(folder, model, optimizer)
    train(model, optimizer, more)
    optimizer.preconditioner.detach()
    return weights(model)


FULL = {"full_state_dict": True, "broadcast_from_rank0": True}


def fsdp_from_rank_0(strategy):
    states, trained = {}, []
    for resumes in (False, True):
        model = Attentive()
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = eigen_adam(model, LR, kfac=OFTEN | {"strategy": strategy})
        options = StateDictOptions(**FULL, cpu_offload=not resumes)
        if resumes:
            set_model_state_dict(model, states["model"], options=options)
            set_optimizer_state_dict(model, optimizer, states["optimizer"], options=options)
        else:
            train(model, optimizer, range(3))
            optimizer.consolidate_state_dict()
            states["model"] = get_model_state_dict(model, options=options)
            states["optimizer"] = get_optimizer_state_dict(model, optimizer, options=options)
            states = copy.deepcopy(states)  # it has the tensors that training changes
            assert bool(states["optimizer"]) == (dist.get_rank() == 0)
        train(model, optimizer, range(3, 6))
        trained.append(weights(model))
        optimizer.preconditioner.detach()
    return trained


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["comm_opt", slow("mem_opt")])
def test_fsdp2_continues_from_a_state_of_rank_0_alone(strategy):
    for want, got in run_ranks(2, fsdp_from_rank_0, strategy):
        assert_same(got, want)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "options",
    [slow({"strategy": "comm_opt", "max_overhead": AMPLE}), {"strategy": "mem_opt"}],
    ids=str,
)
def test_fsdp2_with_distributed_checkpoint_continues_bit_by_bit(tmp_path, options):
    want = run_ranks(2, fsdp_on_rank, tmp_path, options, False)
    got = run_ranks(2, fsdp_on_rank, tmp_path, options, True)
    assert_same(got[0], want[0])


def kfac_on_rank(folder, strategy):
    models = []
    for resumes in (False, True):
        models.append(Net())
        optimizer = SGD(models[-1].parameters(), 0.1)
        kfac = KFAC(models[-1], optimizer, strategy=strategy, **OFTEN).attach()
        states = {"model": models[-1].state_dict(), "kfac": kfac}
        if resumes:
            dcp.load(states, checkpoint_id=folder)
        else:
            train(models[-1], optimizer, range(3))
            dcp.save(states, checkpoint_id=folder)
        train(models[-1], optimizer, range(3, 6))
    return [weights(model) for model in models]


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["mem_opt", "owner_reduce"])
def test_ranks_load_parts_of_a_kfac_with_distributed_checkpoint(tmp_path, strategy):
    for first, resumed in run_ranks(2, kfac_on_rank, tmp_path, strategy):
        assert_same(resumed, first)
