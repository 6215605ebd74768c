"""The calls of a step of this package, counted, and how calls enter a simulated step."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kfac_bench.core import KFAC, layer_plan
from kfac_bench.core.execution.write_back import WriteBack
from kfac_bench.core.planning.plan import Stage
from kfac_bench.core.planning.planner import BATCH_NUMEL
from kfac_bench.simulate.conduct import LW_CODE, OURS, SC20_CODE, Conduct
from kfac_bench.simulate.hardware import PredictionErrors
from kfac_bench.simulate.step import step_time
from kfac_bench.simulate.sweep import Intervals, Variant, plan_of, released_plan, sweep
from tests.support.made_up_machine import BETA, MACHINE, RATES, work_of


class CallCounter(TorchDispatchMode):
    """Counts the calls that launch a kernel: all but views and new empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        launches = not func.is_view and not any(w in name for w in ("detach", "empty", "unbind"))
        self.calls += launches
        return func(*args, **(kwargs or {}))


def calls_of_steps(
    depth: int, method: str, batch_numel: int, monkeypatch: pytest.MonkeyPatch
) -> dict[str, int]:
    """Return the calls of K-FAC's stages, and of writing gradients, with `depth` equal layers."""
    torch.manual_seed(0)
    # No unit of a tanh is dead: a factor with rows of zeros is decomposed in another way.
    pairs = [(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Tanh()) for _ in range(depth)]
    layers = [module for pair in pairs for module in pair]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(layer_plan, "_batch_numel", lambda *_: batch_numel)
    kfac = KFAC(model, optimizer, method=method, update_freq=4, factor_update_freq=2)
    write, written = WriteBack.write, []

    def counted(*args, **kwargs):
        with CallCounter() as counter:
            write(*args, **kwargs)
        written.append(counter.calls)

    monkeypatch.setattr(WriteBack, "write", counted)
    kfac._capture.identity.due.clear()  # the first steps also compare statistics and gradients
    passes, steps = [], []
    for _ in range(8):
        with CallCounter() as counter:
            model(torch.randn(64, 8, 4, 4)).square().sum().backward()
        passes.append(counter.calls)
        with CallCounter() as counter:
            kfac.step()
        steps.append(counter.calls)
        model.zero_grad()
    monkeypatch.undo()
    # Step 1 only preconditions. Even steps update factors, in part during backward. Of the
    # interval of steps 4 to 7, odd steps decompose.
    factors = steps[2] - steps[1]
    return {
        "precondition": steps[1],
        "factors": factors + passes[2] - passes[1],
        "decompositions": sum(steps[4:8]) - 4 * steps[1] - 2 * factors,
        "write": written[1],
    }


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_the_calls_of_this_package_are_those_of_a_step(method, monkeypatch):
    ours = OURS[method]
    simulated = {
        "precondition": ours.precondition_calls + ours.write_calls,
        "factors": 2 * ours.factor_calls,
        "decompositions": 2 * ours.decomposition_calls,
        "write": ours.write_calls,
    }
    for batch_numel in (0, BATCH_NUMEL):
        few, many = (calls_of_steps(depth, method, batch_numel, monkeypatch) for depth in (2, 6))
        each = {kind: (many[kind] - few[kind]) / 4 for kind in few}
        if batch_numel:  # a batch precedes its layers, so one more layer is a write alone
            assert each.pop("decompositions") < 0.5 * simulated.pop("decompositions")
            simulated["precondition"] = ours.write_calls
        # A call more or less does not make the simulation wrong.
        assert each == pytest.approx(simulated, rel=0.25)


def test_calls_add_to_the_work_only_where_the_host_waits():
    work = work_of(1)
    machine = replace(MACHINE, rates=replace(RATES, op_s=1e-3))
    plan = plan_of(work, Variant("comm_opt"), 1, "eigen")
    bare = step_time(work, 1, MACHINE, plan)
    for waits in (True, False):
        conduct = Conduct(waits=waits, precondition_calls=4, write_calls=1, tensor_calls=2)
        time = step_time(work, 1, machine, plan, conduct)
        assert time.forward_backward_s == pytest.approx(bare.forward_backward_s + 2 * 3 * 1e-3)
        work_s = bare.stages_s[Stage.PRECONDITION] if waits else 0.0
        assert time.stages_s[Stage.PRECONDITION] == pytest.approx(work_s + 2 * 5 * 1e-3)
    assert OURS["eigen"].tensor_calls == 0


def test_a_step_without_a_conduct_has_the_calls_of_its_method():
    work, machine = work_of(1), replace(MACHINE, rates=replace(RATES, op_s=1e-1))
    for method, calls in (("eigen", 13 + 5), ("inverse", 4 + 5)):
        (cell,) = sweep(work, machine, [Variant("comm_opt")], [1], Intervals(1, 1), method)
        assert cell.time.stages_s[Stage.PRECONDITION] == pytest.approx(2 * calls * 0.1)


def test_a_gpu_works_on_all_layers_of_one_shape_at_once():
    """Four equal layers take the calls of one batch, and those of four writes."""
    machine = replace(MACHINE, rates=replace(RATES, op_s=1e-1))
    for each, batches in ((machine, 1), (replace(machine, crowding={2: 1.0}), 4)):
        (cell,) = sweep(work_of(4), each, [Variant("comm_opt")], [1], Intervals(1, 1), "inverse")
        calls = 4 * (batches + 1) + 5 * 5  # the wide layer is a batch of its own
        assert cell.time.stages_s[Stage.PRECONDITION] == pytest.approx(calls * 0.1)


def test_a_published_machine_is_simulated_as_it_was_validated():
    """What the released code cannot do has its calls in a plan of this package, unvalidated."""
    work, every = work_of(3), Intervals(10, 100)
    machine = replace(MACHINE, rates=replace(RATES, op_s=1e-4), conduct="sc20")
    machine = replace(machine, errors=PredictionErrors(time=0.1, ratio=0.1))
    for name, conduct in (("sgd", SC20_CODE), ("comm_opt", SC20_CODE), ("layer_wise", LW_CODE)):
        (mine,) = sweep(work, machine, [Variant(name)], [4], every)
        (theirs,) = sweep(work, machine, [Variant(name)], [4], every, conduct=conduct)
        assert mine == theirs
        assert mine.is_validated
    blocks = replace(work, layers=[spec.divided(100) for spec in work.layers])
    for each, name, method in (
        (work, "hybrid_opt", "eigen"),
        (work, "comm_opt", "inverse"),
        (blocks, "comm_opt", "eigen"),
    ):
        (mine,) = sweep(each, machine, [Variant(name)], [4], every, method)
        (ours,) = sweep(each, replace(machine, conduct="ours"), [Variant(name)], [4], every, method)
        assert not mine.is_validated
        assert mine.step_s > ours.step_s


def test_layer_wise_code_exchanges_gradients_in_its_own_step():
    """Each rank clips and writes the gradients of all layers, and none is sent in backward."""
    work = work_of(3)
    machine = replace(MACHINE, rates=replace(RATES, op_s=1e-3))
    plan = released_plan(work.layers, 4, "layer_wise")
    time = step_time(work, 4, machine, plan, LW_CODE)
    assert step_time(work, 4, machine, None, LW_CODE).gradients_s == 0
    sent = 2 * 3 / 4 * 4 * work.parameters / BETA
    assert time.gradients_s == pytest.approx(sent, abs=1e-5)
    # Four layers on four ranks: a rank preconditions one layer and receives three.
    calls = LW_CODE.precondition_calls + 4 * LW_CODE.share_calls + 4 * LW_CODE.write_calls
    assert time.stages_s[Stage.PRECONDITION] == pytest.approx(calls * 1e-3, rel=0.05)
    assert time.kinds_s["ShareGradients"] == pytest.approx(4 * LW_CODE.share_calls * 1e-3, rel=0.2)
    assert SC20_CODE.sends_in_backward
