"""Statistics and decompositions beside training: late by a fixed number of steps, never otherwise.

The reference for decompositions is dense algebra in float64 on factors of the steps in which slices
begin. The reference for statistics is K-FAC without the thread, bit by bit.
"""

import copy
import gc
import io
import os
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfac_bench import eigen_adam
from kfac_bench.core import KFAC
from kfac_bench.core.capture.moments import Moments
from kfac_bench.core.distributed.collective import SingleProcess, TorchCollective
from kfac_bench.core.execution.background import (
    MAX_WAITING,
    Background,
    BackgroundMoments,
    factors_of,
)
from kfac_bench.core.execution.decomposition import Eigen
from kfac_bench.core.kernels import linalg
from kfac_bench.core.layers.linear import LinearLayer
from kfac_bench.core.planning.plan import ShareDecompositions
from tests.core.test_strategies import SMALL, planned, train_on_ranks
from tests.support import forks, oracle
from tests.support.distributed import run_ranks
from tests.support.layer_checks import assert_close
from tests.support.quick import slow
from tests.support.training import (
    batch,
    loss_of,
    my_part,
    sgd,
    sha256,
    tiny_model,
    train_step,
)

OPTIONS = {
    "grafting": False,
    "damping": 0.03,
    "method": "eigen",
    "trust_ratio": None,
    "kl_clip": 1e-3,
    "update_freq": 12,
    "factor_update_freq": 4,
    "early_updates": False,
    "collective": SingleProcess(),
}
STEPS = 18
EARLY = {"early_updates": True}
BEGUN = {  # by slice: (step in which it begins, step in which it comes into use), by hand
    0: [(0, 1), (13, 16)],
    1: [(1, 2), (5, 8)],
    2: [(2, 3), (9, 12)],
}
BEGUN_EARLY = {  # with parts of the first interval that begin at steps 4 and 8
    0: [(0, 1), (5, 6), (9, 10), (13, 16)],
    1: [(1, 2), (6, 7), (10, 11), (17, 20)],
    2: [(2, 3), (7, 8), (11, 12)],
}
METHODS = ["eigen", "inverse", "ekfac"]


def kfac_of(model, **options):
    optimizer = sgd(model)
    with planned(spread=len(BEGUN)):
        kfac = KFAC(model, optimizer, **OPTIONS | {"background": True} | options)
    assert len(kfac.plan.slices) == len(BEGUN)
    return kfac


def train(steps, model=None, kfac=None, **options):
    """Return the preconditioned gradients of some steps, K-FAC and the model."""
    model = tiny_model() if model is None else model
    kfac = kfac_of(model, **options) if kfac is None else kfac
    return [train_step(model, kfac, kfac._optimizer, *batch(s)) for s in steps], kfac, model


def assert_equal(got, want):
    """Each step has the same gradients, bit by bit."""
    for step, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert all(map(torch.equal, mine, theirs)), f"step {step}"


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("kfac-background")]


# Results


def covered(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}


def sample_gradients(model, x, y):
    """By layer: the gradient of each sample's own loss, [N, groups, g_dim, a_dim]."""
    model, each = copy.deepcopy(model), []
    for one, target in zip(x, y, strict=True):
        model.zero_grad()
        loss_of(model, one[None], target[None])[1].backward()
        each.append({n: oracle.layer_gradient(m) for n, m in covered(model).items()})
    return {n: torch.stack([grads[n] for grads in each]) for n in each[0]}


class Late:
    """What gradients become if decompositions come into use late, by dense algebra."""

    def __init__(self, slices, begun, method, factored):
        self.slices, self.times, self.method, self.factored = slices, begun, method, factored
        self.begun, self.used, self.moments, self.bases, self.weights = {}, {}, {}, {}, {}

    def gradients(self, step, raw, samples, layers):
        """Return the preconditioned gradients; ``samples`` are those of a factor update."""
        for name, moment in self.moments.items() if samples else ():
            qa, qg = (self.bases[name, f] for f in "AG")
            self.weights[name] = 0.95 * self.weights[name] + 1
            fresh = (qg.mT @ samples[name] @ qa).square().mean(0)
            moment.lerp_(fresh, 1 / self.weights[name])
        for i, times in self.times.items():
            for _ in filter(lambda time: time[1] == step, times):
                self.use(self.slices[i], layers)
        return {name: self.one(name, grad) for name, grad in raw.items()}

    def use(self, keys, layers):
        self.used |= {key: self.begun.pop(key) for key in keys}
        if self.method != "ekfac":
            return
        old = dict(self.bases)
        for name, factor in keys:
            # EKFAC depends on the basis of a null space, which only the code itself knows.
            values, basis = (x.clone() for x in layers[name][factor]["eigen"])
            assert_close(basis * values.unsqueeze(-2) @ basis.mT, self.used[name, factor], 1e-6)
            self.bases[name, factor] = basis
        for name in {name for name, _ in keys}:
            if not self.weights.get(name):
                a, g = (layers[name][f]["eigen"][0] for f in "AG")
                self.moments[name] = g.unsqueeze(-1) * a.unsqueeze(-2)
                self.weights[name] = 0.0
                continue
            a, g = (
                (old[name, f].mT @ self.bases[name, f]).square() if (name, f) in keys else None
                for f in "AG"
            )
            self.moments[name] = self.moments[name] if a is None else self.moments[name] @ a
            self.moments[name] = self.moments[name] if g is None else g.mT @ self.moments[name]

    def one(self, name, grad):
        if (name, "A") not in self.used or (name, "G") not in self.used:
            return grad
        a, g = (self.used[name, f] for f in "AG")
        if self.method == "ekfac":
            qa, qg = (self.bases[name, f] for f in "AG")
            return qg @ ((qg.mT @ grad @ qa) / (self.moments[name] + 0.03)) @ qa.mT
        if self.method == "inverse":
            return g @ grad @ a
        return oracle.solve(grad, a, g, 0.03, self.method, self.factored)

    def begin(self, step, layers):
        """Remember the factors, or their inverses, of the slices that begin after this step."""
        for i, times in self.times.items():
            for _ in filter(lambda time: time[0] == step, times):
                self.begun |= {(n, f): self.snapshot(layers[n], f) for n, f in self.slices[i]}

    def snapshot(self, layer, factor):
        matrix = layer[factor]["factor"].clone()
        if self.method != "inverse":
            return matrix
        means = {f: layer[f]["factor"].diagonal(dim1=1, dim2=2).mean() for f in "AG"}
        damping = 0.03
        if self.factored:
            pi = (means["A"] / means["G"]).sqrt()
            damping = 0.03**0.5 * (pi if factor == "A" else 1 / pi)
        return torch.linalg.inv(matrix + damping * torch.eye(matrix.shape[-1]))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("method", "factored", "early"),
    [("eigen", False, True), slow("eigen", True, False), slow("inverse", False, False),
     ("inverse", True, False), ("ekfac", False, False), slow("eigen", False, False)],
)  # fmt: skip
def test_gradients_are_those_of_late_decompositions(method, factored, early):
    model = tiny_model()
    options = {"method": method, "factored_damping": factored, "early_updates": early}
    kfac = kfac_of(model, kl_clip=None, **options)
    slices = [[(s.name, f) for op in ops for s, f in op.members] for ops in kfac.plan.slices]
    late = Late(slices, BEGUN_EARLY if early else BEGUN, method, factored)
    for step in range(STEPS):
        x, y = batch(step)
        x = x.double()
        samples = sample_gradients(model, x, y) if step % 4 == 0 else {}
        model.zero_grad()
        loss_of(model, x, y)[1].backward()
        raw = {n: oracle.layer_gradient(m) for n, m in covered(model).items()}
        kfac.step()
        layers = kfac.state_dict()["layers"]
        for name, want in late.gradients(step, raw, samples, layers).items():
            assert_close(oracle.layer_gradient(covered(model)[name]), want, 1e-6)
        late.begin(step, layers)
        kfac._optimizer.step()
    assert bool(late.begun) == early  # slice 1 is on its way
    assert kfac.failed_decompositions == kfac.dropped_statistics == 0


def test_a_slow_thread_or_a_slow_model_changes_no_bit():
    want, _, _ = train(range(STEPS))
    run, generator = Background._run, torch.Generator().manual_seed(0)

    def slow_run(self, job, ready):
        time.sleep(0.02 * torch.rand((), generator=generator).item())
        return run(self, job, ready)

    with mock.patch.object(Background, "_run", slow_run):
        assert_equal(train(range(STEPS))[0], want)
    model = tiny_model()
    model.register_forward_hook(lambda *args: time.sleep(0.01))
    assert_equal(train(range(STEPS), model)[0], want)


def statistics(background, *, fisher="empirical", parts=1, scale=1.0, **options):
    """Return the factors of one step of several micro-batches, and what was dropped."""
    torch.manual_seed(0)
    model = tiny_model()
    kfac = kfac_of(model, background=background, fisher=fisher, **options)
    x, y = batch(0)
    for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
        output, loss = loss_of(model, *part)
        kfac.fisher_backward(output)
        (loss * scale / parts).backward()
    for p in model.parameters():
        p.grad /= scale
    kfac.step(loss_scale=lambda: scale)
    layers = kfac.state_dict()["layers"]
    return [layers[n][f]["factor"] for n in layers for f in "AG"], kfac.dropped_statistics


@pytest.mark.parametrize(
    "options",
    [
        {"parts": 4},
        {"parts": 2, "weight_sharing": "reduce"},
        {"fisher": "mc"},
        {"fisher": "type2", "parts": 2},
        {"scale": 1024.0},
        {"scale": float("inf")},
        {"state_dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_statistics_have_the_bits_of_the_foreground(options):
    (got, dropped), (want, also_dropped) = (statistics(b, **options) for b in (True, False))
    assert_equal([got], [want])
    assert dropped == also_dropped
    assert (dropped > 0) == (options.get("scale") == float("inf"))


# Ranks


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        ("comm_opt", "eigen"),
        slow("comm_opt", "ekfac"),
        slow("mem_opt", "eigen"),
        ("mem_opt", "inverse"),
        slow("layer_wise", "inverse"),
        slow("owner_reduce", "eigen"),
        slow("local_factors", "inverse"),
    ],
)
def test_two_ranks_equal_one_process(strategy, method):
    """And messages with decompositions are sent when these come into use."""
    options = {"method": method, "background": True, "spread": None}
    with planned(spread=2):
        first, _ = train_on_ranks(2, tiny_model, batch, SMALL | {"spread": 2}, strategy, options)
    slices = first.plan.slices  # every 2 steps: slices begin in steps 0 and 1, then 2 and 3, then 4
    for ops, used in zip(slices, ([1, 3], [2, 4]), strict=True):
        sent = [op.name for op in ops if isinstance(op, ShareDecompositions)]
        assert sent or strategy in ("mem_opt", "layer_wise", "owner_reduce", "local_factors")
        assert all(first.steps[name] == used for name in sent)


def continue_on_rank(strategy, method):
    """Continue a run of two ranks with the shards of both, and with the state of rank 0 alone."""
    options = {"method": method, "strategy": strategy, "collective": TorchCollective()}

    def steps(some, model, kfac):
        grads = []
        for step in some:
            grads.append(train_step(model, kfac, kfac._optimizer, *my_part(*batch(step))))
        return grads

    model = DistributedDataParallel(tiny_model())
    kfac = kfac_of(model, **options)
    steps(range(6), model, kfac)
    shards, whole = [None, None], [copy.deepcopy(kfac.state_dict())]
    dist.all_gather_object(shards, kfac.state_dict(shard=True))
    dist.broadcast_object_list(whole)
    assert any("pending" in str(shard) for shard in shards)
    weights = copy.deepcopy(model.state_dict())
    want = steps(range(6, STEPS), model, kfac)
    kfac.detach()
    for states in shards, whole:
        model.load_state_dict(weights)
        kfac = kfac_of(model, **options)
        kfac.load_state_dict(*states)
        got = steps(range(6, STEPS), model, kfac)
        if states is shards:
            assert_equal(got, want)
        same = [None, None]
        dist.all_gather_object(same, sha256([grad for grads in got for grad in grads]))
        assert same[0] == same[1]
        kfac.detach()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "method"),
    [("comm_opt", "inverse"), slow("comm_opt", "ekfac"), slow("mem_opt", "eigen")],
)
def test_two_ranks_continue_bit_by_bit(strategy, method):
    run_ranks(2, continue_on_rank, strategy, method)


# State


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"method": "inverse"}, {"method": "ekfac"}, EARLY, {"method": "eigen"}],
    ids=str,
)
def test_a_run_continues_bit_by_bit_from_any_step(options):
    """Also while slices have begun, and before the first ones have."""
    model, kfac, saved = tiny_model(), None, {}
    want, kfac, model = train(range(0), **options)
    for step in range(STEPS):
        saved[step] = io.BytesIO()
        torch.save((kfac.state_dict(), model.state_dict()), saved[step])
        want += train([step], model, kfac)[0]
    kfac.detach()
    for step, file in saved.items():
        file.seek(0)
        state, weights = torch.load(file)
        again = tiny_model()
        again.load_state_dict(weights)
        other = kfac_of(again, **options)
        other.load_state_dict(state)
        assert_equal(train(range(step, STEPS), again, other)[0], want[step:])


def test_loading_into_a_preconditioner_at_work_forgets_its_own_slices():
    _, kfac, model = train(range(6))
    state, weights = copy.deepcopy((kfac.state_dict(), model.state_dict()))
    assert any("pending" in entry for entries in state["layers"].values()
               for entry in entries.values())  # fmt: skip
    after, kfac, model = train(range(6, STEPS), model, kfac)
    kfac.load_state_dict(state)
    model.load_state_dict(weights)
    assert_equal(train(range(6, STEPS), model, kfac)[0], after)


def test_the_thread_has_ended_its_sums_before_another_state_is_loaded():
    """EKFAC's sums read the eigenvectors, which the state replaces."""
    _, kfac, model = train(range(1), method="ekfac", factor_update_freq=1)
    state = copy.deepcopy(kfac.state_dict())
    may_go_on = threading.Event()
    kfac._executor.background.submit(may_go_on.wait)
    loss_of(model, *batch(1))[1].backward()
    store, was_set = kfac._executor.store, []
    timer = threading.Timer(0.2, may_go_on.set)
    timer.start()
    with mock.patch.object(store, "clear", side_effect=lambda: was_set.append(may_go_on.is_set())):
        kfac.load_state_dict(state)
    timer.join()
    assert was_set == [True]


def test_the_thread_notes_the_eigenvectors_that_it_reads():
    """On a GPU their memory could otherwise be used again while a QR step reads them."""
    model = tiny_model()
    optimizer = eigen_adam(model, kfac={"background": True})
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, *batch(step))[1].backward()
        optimizer.step()
    run = optimizer.preconditioner._executor
    run.background_slices.clear()
    with mock.patch.object(run.background, "submit") as submit:
        run.background_slices.begin({0: 99}, None)
    reads = {id(x) for call in submit.call_args_list for x in call.args[1]}
    made = [run.store.decompositions[key] for key in factors_of(run.plan.slices[0])]
    assert {id(x.vectors) for x in made if isinstance(x, Eigen)} & reads


@pytest.mark.parametrize("background", [True, False])
def test_what_is_missing_in_a_state_is_decomposed_in_the_next_step(background):
    """A state of another kind of run has no decompositions that come into use later."""
    _, kfac, model = train(range(4), background=not background)
    state = copy.deepcopy(kfac.state_dict())
    kfac.detach()
    for entries in state["layers"].values():
        for entry in entries.values():
            entry.pop("pending", None)
            entry.pop("eigen")
    other = kfac_of(model, background=background)
    other.load_state_dict(state)
    train([4], model, other)
    layers = other.state_dict()["layers"].values()
    assert all("eigen" in entry for entries in layers for entry in entries.values())


def test_a_slice_of_another_method_is_decomposed_again():
    def kfac_with_one_slice(method):
        with planned(spread=1):
            return KFAC(model, sgd(model), **OPTIONS | {"background": True, "method": method})

    model = tiny_model()
    kfac = kfac_with_one_slice("eigen")
    train([0], model, kfac)
    state = copy.deepcopy(kfac.state_dict())
    assert all("pending" in entry for entries in state["layers"].values()
               for entry in entries.values())  # fmt: skip
    kfac.detach()
    other = kfac_with_one_slice("inverse")
    other.load_state_dict(state)
    train([1], model, other)
    assert other.failed_decompositions == 0
    assert all("inverse" in entry for entries in other.state_dict()["layers"].values()
               for entry in entries.values())  # fmt: skip


# Errors


def test_an_error_of_the_thread_is_raised_by_the_next_step():
    _, kfac, model = train(range(4))
    with mock.patch.object(LinearLayer, "moment_a", side_effect=MemoryError("no memory for A")):
        loss_of(model, *batch(4))[1].backward()
        with pytest.raises(MemoryError, match="no memory for A"):
            kfac.step()
    loss_of(model, *batch(4))[1].backward()
    kfac.step()  # as after an error in backward, the caller may go on
    assert kfac.steps == 5


def test_an_error_in_a_decomposition_is_raised_by_the_step_that_needs_it():
    with mock.patch.object(linalg, "eigendecompose", side_effect=MemoryError("no memory for Q")):
        _, kfac, model = train(range(1))
        with pytest.raises(MemoryError, match="no memory for Q"):
            train([1], model, kfac)


def test_an_input_that_changes_too_early_is_an_error():
    """The thread is held until the input has changed."""
    model = tiny_model()
    kfac = kfac_of(model)
    x, y = batch(0)
    loss_of(model, x, y)[1].backward()
    kfac.step()
    changed, run = threading.Event(), Background._run
    for _ in range(3):
        loss_of(model, x, y)[1].backward()
        kfac.step()

    def held(self, job, ready):
        changed.wait()
        return run(self, job, ready)

    with mock.patch.object(Background, "_run", held):
        loss_of(model, x, y)[1].backward()
        x.add_(1)
        changed.set()
        with pytest.raises(RuntimeError, match=r"the input of 0, or .* was changed in place"):
            kfac.step()


@pytest.mark.parametrize("method", METHODS)
def test_a_failed_decomposition_leaves_the_last_good_one(method):
    """And the first one leaves the identity, as without the thread."""
    name = "damped_inverse" if method == "inverse" else "eigendecompose"
    solve = getattr(linalg, name)

    def fail(matrix, *args):
        if matrix.shape[-1] == 13:  # the A of the first linear layer, of slice FAILS
            raise linalg.DecompositionError("too bad")
        return solve(matrix, *args)

    _, good, _ = train(range(STEPS), method=method)
    with mock.patch.object(linalg, name, fail):
        _, kfac, _ = train(range(STEPS), method=method)
    fails = next(i for i, ops in enumerate(kfac.plan.slices) for op in ops
                 if any((s.name, f) == ("5", "A") for s, f in op.members))  # fmt: skip
    assert kfac.failed_decompositions == len([use for _, use in BEGUN[fails] if use < STEPS])
    assert good.failed_decompositions == 0
    kind = "inverse" if method == "inverse" else "eigen"
    kept = kfac.state_dict()["layers"]["5"]["A"][kind][-1]
    assert torch.equal(kept, torch.eye(13)[None])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"overlap": True}, "overlap=True .* background=True .* choose one"),
        ({"spread": False}, "spread=False .* leave spread unset"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        kfac_of(tiny_model(), **options)


# The thread


def test_the_thread_uses_one_core_and_leaves_the_others_to_training():
    torch.set_num_threads(2)
    try:
        beside = Background(torch.device("cpu"))
        assert beside.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 2
        started = []
        thread = threading.Thread(target=lambda: started.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert started == [2]  # threads that start later, too
        beside.stop()
    finally:
        torch.set_num_threads(1)


def test_the_thread_sums_with_all_methods_of_moments():
    """A method that is not overridden would work on sums of its own."""
    public = {name for name in vars(Moments) if not name.startswith("_")}
    assert public <= vars(BackgroundMoments).keys()


def test_few_inputs_and_gradients_wait_for_the_thread():
    waiting, most, run = [0], [0], Background._run
    submit = Background.submit

    def count(self, job, reads=()):
        waiting[0] += 1
        most[0] = max(most[0], waiting[0])
        return submit(self, job, reads)

    def slow_run(self, job, ready):
        time.sleep(0.005)
        waiting[0] -= 1
        return run(self, job, ready)

    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3 * MAX_WAITING)))
    kfac = KFAC(model, sgd(model), background=True, spread=True)
    with (
        mock.patch.object(Background, "submit", count),
        mock.patch.object(Background, "_run", slow_run),
    ):
        model(torch.randn(4, 3)).sum().backward()
        assert most[0] == MAX_WAITING
        kfac.step()


@pytest.mark.filterwarnings("ignore:K-FAC. preconditioning takes about")  # layers must be large
def test_the_state_is_complete_after_detach():
    """A framework saves its last checkpoint after it has removed the callback."""
    model = nn.Sequential(*(nn.Linear(500, 500) for _ in range(3)))
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), background=True)
    model(torch.randn(8, 500)).square().mean().backward()
    kfac.step()
    begun = len(kfac._executor.background_slices._results)
    kfac.detach()
    entries = [e for layer in kfac.state_dict()["layers"].values() for e in layer.values()]
    assert sum("pending" in entry for entry in entries) == begun > 1


def test_detach_and_garbage_collection_end_the_thread():
    before = set(threads())
    _, kfac, model = train(range(2))
    (thread,) = set(threads()) - before
    kfac.detach()
    assert not thread.is_alive()
    before = set(threads())
    _, kfac, model = train(range(2))
    (thread,) = set(threads()) - before
    del kfac, model
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def continue_in_a_fork():
    """Return what the process and its fork make of the same steps, and the fork's exit code."""
    _, kfac, model = train(range(6))  # a slice has begun
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        with os.fdopen(theirs, "wb") as file:
            torch.save(train(range(6, STEPS), model, kfac)[0], file)
        os._exit(0)
    os.close(theirs)
    grads = train(range(6, STEPS), model, kfac)[0]
    with os.fdopen(ours, "rb") as file:
        forked = torch.load(io.BytesIO(file.read()))
    assert_equal(forked, grads)
    return os.waitpid(pid, 0)[1]


def test_a_fork_continues_with_a_thread_of_its_own():
    assert forks.call(continue_in_a_fork) == 0
