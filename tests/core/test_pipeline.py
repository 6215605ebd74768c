"""Pipeline stages: each rank preconditions the layers it holds, and all is as in one process."""

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from kfac_bench.core.distributed.collective import (
    PlansDifferError,
    SingleProcess,
    TorchCollective,
)
from kfac_bench.core.planning.plan import STRATEGIES
from tests.support.distributed import run_ranks
from tests.support.examples import run_on_ranks
from tests.support.quick import quick_if
from tests.support.training import (
    after_step,
    assert_close,
    batch,
    make_kfac,
    my_part,
    one_process,
    optimizer_of,
    tiny_model,
    train_step,
)

pytestmark = pytest.mark.ranks

MICRO_BATCHES = 4


def train_stage(data_parallel, schedule, strategy, dtype=None, method="eigen", cut=5, ratio=None):
    """This rank's stage of two, beside one process; the clip factors."""
    mesh = init_device_mesh("cpu", (data_parallel, 2), mesh_dim_names=("dp", "pp"))
    rank, stages = mesh.get_local_rank("pp"), mesh.get_group("pp")
    layers = list(tiny_model())  # the second stage has the most work
    mine = nn.Sequential(*(layers[:cut], layers[cut:])[rank])
    collective, model = SingleProcess(), mine
    if data_parallel > 1:
        group = mesh.get_group("dp")
        collective, model = (
            TorchCollective(group),
            DistributedDataParallel(mine, process_group=group),
        )
    options = {"spread": False, "method": method, "trust_ratio": ratio}
    optimizer = optimizer_of(mine, options)
    kfac = make_kfac(
        mine,
        optimizer,
        options | {"strategy": strategy},
        collective=collective,
        model_parallel=TorchCollective(stages),
    )
    size = 32 // data_parallel // MICRO_BATCHES
    shapes = [torch.empty(size, 1, 6, 6)] + [
        torch.empty(size, n, dtype=dtype, requires_grad=True) for n in ({5: 12, 6: 4}[cut], 3)
    ]
    stage = PipelineStage(
        model,
        rank,
        2,
        torch.device("cpu"),
        input_args=shapes[rank],
        output_args=shapes[rank + 1],
        group=stages,
    )
    pipeline = schedule(stage, MICRO_BATCHES, loss_fn=F.cross_entropy)
    first = 0 if rank == 0 else len(list(nn.Sequential(*layers[:cut]).parameters()))
    own = slice(first, first + len(list(mine.parameters())))
    nus = []
    want = one_process(tiny_model, batch, tuple(options.items()))
    for step, (grads, weights, after) in enumerate(want):
        x, y = my_part(*batch(step), rank=mesh.get_local_rank("dp"), world=data_parallel)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            pipeline.step(*([x] if rank == 0 else []), **({"target": y} if rank == 1 else {}))
        kfac.step(loss_scale=MICRO_BATCHES)
        if dtype is not None:
            got = torch.cat([p.grad.flatten() for p in mine.parameters()])
            want = torch.cat([g.flatten() for g in grads[own]])
            assert F.cosine_similarity(got, want, 0) > (0.99 if step < 3 else 0.9)
            optimizer.step()
            continue
        assert_close([p.grad for p in mine.parameters()], grads[own])
        optimizer.step()
        assert_close([p.detach() for p in mine.parameters()], weights[own])
        assert after_step(kfac) == pytest.approx(after, rel=1e-3)
        nus.append(after_step(kfac)[0])
    return nus


@pytest.mark.supports("pipeline", "gradient accumulation")
@pytest.mark.parametrize(("schedule", "ratio"), [(ScheduleGPipe, None), (Schedule1F1B, 1e-3)])
def test_two_stages_equal_one_process(schedule, ratio):
    first, second = run_ranks(2, train_stage, 1, schedule, "comm_opt", None, "eigen", 5, ratio)
    assert first == second
    assert all(0 < nu < 0.9 for nu in first), "the clip is not at work"


def test_two_stages_of_eigen_adam_equal_one_process():
    """The last layer of the first stage is a hidden one, whose update is orthogonalized."""
    run_ranks(2, train_stage, 1, ScheduleGPipe, "comm_opt", None, "eigen_adam", 6)


@pytest.mark.supports("pipeline", "bf16 autocast")
def test_two_stages_in_autocast_follow_one_process_in_float32():
    run_ranks(2, train_stage, 1, ScheduleGPipe, "comm_opt", torch.bfloat16)


@pytest.mark.supports("pipeline", "{strategy}")
@pytest.mark.parametrize(
    "strategy",
    quick_if(("comm_opt", "mem_opt").__contains__, [s for s in STRATEGIES if s != "local_factors"]),
)
def test_two_stages_on_two_ranks_each_equal_one_process(strategy):
    nus = run_ranks(4, train_stage, 2, ScheduleGPipe, strategy)
    assert all(n == nus[0] for n in nus)


def attached_stage():
    model = tiny_model()
    with pytest.raises(RuntimeError, match="all stages must step together, so call step"):
        make_kfac(
            model,
            optimizer_of(model, {}),
            {},
            collective=SingleProcess(),
            model_parallel=TorchCollective(),
        ).attach()


def test_attach_is_refused():
    """A stage without gradients would leave out a step alone, and the others would wait for it."""
    run_ranks(2, attached_stage)


def four_of_five():
    group = dist.new_group([0, 1, 2, 3])  # all five ranks make it
    if dist.get_rank() == 4:
        return None
    kfac = make_kfac(
        (model := tiny_model()),
        optimizer_of(model, {}),
        {"strategy": "hybrid_opt"},
        collective=TorchCollective(group),
    )
    workers = [placement.grad_workers for placement in kfac.plan.placements]
    kfac.detach()
    return workers


@pytest.mark.slow
def test_rows_and_columns_of_a_part_of_the_ranks():
    *members, other = run_ranks(5, four_of_five)
    assert other is None
    assert {(0, 2), (1, 3)} >= set(members[0])
    assert all(each == members[0] for each in members)


def other_limits_on_rank():
    """Only the second stage has a KL clip: it would wait for the sums of the first one."""
    model, options = tiny_model(), {"kl_clip": (None, 1e-3)[dist.get_rank()]}
    with pytest.raises(PlansDifferError, match=r"stages \[1\] .* have another kl_clip"):
        make_kfac(
            model,
            optimizer_of(model, options),
            options,
            collective=SingleProcess(),
            model_parallel=TorchCollective(),
        )


def test_stages_with_different_limits_are_refused():
    run_ranks(2, other_limits_on_rank)


def groups_on_rank():
    """Ranks of a group count from 0: messages of the group {1, 3} of four ranks."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    collective = TorchCollective(groups[dist.get_rank() % 2])
    me, world = collective.rank, (0, 1)
    collective.prepare([world])
    x = torch.full((2,), float(dist.get_rank()))
    collective.broadcast(x, 1, world, "b").wait()
    summed = torch.full((2,), float(dist.get_rank()))
    collective.reduce(summed, 1, world, "r").wait()
    return me, x[0].item(), summed[0].item() if me == 1 else None


def test_a_collective_over_a_group_counts_its_own_ranks():
    assert run_ranks(4, groups_on_rank) == [(0, 2, None), (0, 3, None), (1, 2, 2), (1, 3, 4)]


def outside_on_rank():
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="rank 1 is not in the process group of K-FAC: build"):
            TorchCollective(group)


def test_a_rank_outside_of_the_group_is_refused():
    run_ranks(2, outside_on_rank)


def new_groups_on_rank(overlap):
    """Return the timeouts in seconds of the groups that two KFACs make, one after the other."""
    parent = dist.new_group(timeout=timedelta(seconds=77), backend="cpu:gloo")
    model, made = tiny_model(), []
    for _ in range(2):
        collective = TorchCollective(parent)
        with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new:
            kfac = make_kfac(
                model,
                optimizer_of(model, {}),
                {"strategy": "hybrid_opt", "overlap": overlap},
                collective=collective,
            )
        made.append([call.kwargs["timeout"].total_seconds() for call in new.call_args_list])
        own = [group for ranks, group in collective._groups.items() if collective.rank in ranks]
        # The backend of the default group is plain gloo.
        assert {dist.get_backend(group) for group in own} == {"cpu:gloo"}
        kfac.detach()
    return made


def test_a_second_kfac_uses_the_groups_of_the_first_one():
    first, second = run_ranks(4, new_groups_on_rank, False)[0]
    assert first == [77] * 4  # two columns and two rows of ranks
    assert second == []


def test_groups_for_overlap_are_not_shared():
    first, second = run_ranks(4, new_groups_on_rank, True)[0]
    assert first == second == [77] * 5


def two_models_on_rank():
    """Ranks 0 and 1 train a model, ranks 2 and 3 another one; DDP knows the groups."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank, number = dist.get_rank() % 2, dist.get_rank() // 2
    model = DistributedDataParallel(tiny_model(), process_group=groups[number])
    alone, optimizers = tiny_model(), []
    for each, collective in ((model, None), (alone, SingleProcess())):
        optimizer = optimizer_of(each, {})
        kfac = make_kfac(each, optimizer, {"strategy": "mem_opt"}, collective=collective)
        optimizers.append((optimizer, kfac))
    for step in range(2):
        x, y = batch(10 * number + step)
        train_step(alone, *reversed(optimizers[1]), x, y)
        train_step(model, *reversed(optimizers[0]), *my_part(x, y, rank=rank, world=2))
        assert_close(list(model.parameters()), list(alone.parameters()))


def test_the_group_of_ddp_is_that_of_kfac():
    run_ranks(4, two_models_on_rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "tensor_parallel", marks=pytest.mark.supports("tensor parallel", "documented command")
        ),
        pytest.param("pipeline", marks=pytest.mark.supports("pipeline", "documented command")),
    ],
)
def test_an_example_learns(name):
    first, last = (float(line.split()[-1]) for line in run_on_ranks(f"{name}.py").splitlines())
    assert last < 0.8 * first
