"""``block_size`` against the dense formula of block-diagonal factors, also on several ranks."""

import hashlib

import pytest
import torch
from torch import nn

from kfac_bench import eigen_adam
from kfac_bench.core import KFAC
from kfac_bench.core.layers.convolution import ConvLayer
from kfac_bench.core.layers.linear import LinearLayer
from kfac_bench.core.planning.layer_spec import FACTORS, LayerSpec
from kfac_bench.core.planning.plan import Decompose
from kfac_bench.core.planning.planner import make_plan
from tests.core.test_strategies import (
    LARGE,
    SMALL,
    go_on,
    loads,
    state_options,
    train_and_compare_with_the_plan,
    train_and_save,
    train_on_ranks,
)
from tests.support import layer_checks, oracle
from tests.support.distributed import run_ranks
from tests.support.layer_checks import DAMPING, assert_close
from tests.support.quick import slow
from tests.support.training import adaptive, batch, make_kfac, raw_bytes, sgd, tiny_model

N = 6


def block_diagonal(dense, sizes):
    """[groups, n, n] with zeros outside of the blocks; all of it without sizes."""
    if not sizes:
        return dense
    blocks = [torch.ones(n, n, dtype=torch.bool) for n in sizes]
    return dense * torch.block_diag(*blocks)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.table(x).tanh())


def convnet():
    return nn.Sequential(
        nn.Conv2d(5, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 6, 2, bias=False),
        nn.Tanh(),
        nn.Conv2d(6, 10, 2, groups=2),
        nn.Tanh(),
        nn.ConvTranspose2d(10, 3, 2),
    )


def images():
    return torch.randn(N, 5, 5, 5)


# By layer, the rows of the blocks of A and of G; () if the factor is whole.
CASES = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)),
        lambda: torch.randn(N, 4, 7),
        3,
        {"0": ((3, 3, 2), (3, 2)), "2": ((3, 2), ())},
    ),
    "channels": (
        convnet,
        images,
        19,
        {
            "0": ((18, 18, 10), ()),  # 2, 2 and 1 channels of 9 taps, and the bias
            "2": ((), ()),
            "4": ((), ()),
            "6": ((16, 12, 13), ()),  # 4 taps, and the bias
        },
    ),
    "no whole channel": (
        convnet,
        images,
        5,
        {
            "0": ((5, 5, 5, 5, 5, 5, 4, 4, 4, 4), ()),  # 46 rows
            "2": ((4, 4, 4, 4), (3, 3)),
            "4": ((4, 4, 5), ()),
            "6": ((4, 4, 4, 4, 4, 4, 4, 4, 4, 5), ()),
        },
    ),
    "bias alone": (
        lambda: nn.Sequential(nn.Conv2d(6, 3, 1)),
        lambda: torch.randn(N, 6, 2, 2),
        2,
        {"0": ((2, 2, 2, 1), (2, 1))},
    ),
    "embedding": (
        Tokens,
        lambda: torch.randint(7, (N, 4)),
        3,
        {"table": ((), (3, 2)), "head": ((3, 3), ())},
    ),
}


def preconditioned_by_hand(grad, a, g, method, damping, factored):
    """What a step writes, [groups, g_dim, a_dim], from the definitions."""
    each = []
    for one in zip(grad, a, g, strict=True):
        mean_a, mean_g = (x.trace() / len(x) for x in one[1:])
        if damping is not None:
            each.append(oracle.precondition(*one, damping, method, factored))
        elif method == "eigen":
            each.append(oracle.precondition(*one, mean_a * mean_g, method, factored))
        else:
            damped = [
                x + m * torch.eye(len(x)) for x, m in zip(one[1:], (mean_a, mean_g), strict=True)
            ]
            each.append(torch.linalg.solve(damped[1], one[0]) @ damped[0].inverse())
    return torch.stack(each)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])
@pytest.mark.parametrize(
    ("damping", "factored"), [(DAMPING, False), (DAMPING, True), (None, False)]
)
@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_dense_solution_with_block_diagonal_factors(
    case, method, damping, factored, weight_sharing
):
    make, make_input, block_size, sizes = CASES[case]
    model, x = make(), make_input()
    modules = {n: model.get_submodule(n) for n in sizes}
    recorder = oracle.Calls(modules.values())
    options = {"method": method, "damping": damping, "factored_damping": factored}
    kfac = layer_checks.kfac_of(
        model, block_size=block_size, weight_sharing=weight_sharing, **options
    )
    layer_checks.loss_of(model(x), N).backward()
    raw = {n: oracle.layer_gradient(m) for n, m in modules.items()}
    kfac.step()
    for name, module in modules.items():
        rows = [oracle.layer_rows(module, *call) for call in recorder.calls[module]]
        dense = oracle.layer_factors(rows, weight_sharing == "reduce")
        a, g = (block_diagonal(x, n) for x, n in zip(dense, sizes[name], strict=True))
        if isinstance(module, nn.Embedding):
            a = torch.diag_embed(a.diagonal(dim1=1, dim2=2))
        entries = kfac.state_dict()["layers"][name]
        for side, whole, blocks in zip(FACTORS, (a, g), sizes[name], strict=True):
            kept = [e["factor"] for f, e in entries.items() if f[0] == side]
            assert [x.shape[1] for x in kept] == [*(blocks or whole.shape[1:2])]
            if kept[0].ndim == 3:
                of_groups = zip(*kept, strict=True)
                assert_close(torch.stack([torch.block_diag(*each) for each in of_groups]), whole)
        want = preconditioned_by_hand(raw[name], a, g, method, damping, factored)
        assert_close(oracle.layer_gradient(module), want)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("case", ["linear", "channels", "no whole channel"])
def test_ekfac_is_the_dense_formula_with_block_diagonal_eigenvectors(case):
    make, make_input, block_size, sizes = CASES[case]
    model, x = make(), make_input()
    kfac = layer_checks.kfac_of(
        model,
        method="ekfac",
        block_size=block_size,
        factor_decay=0,
        update_freq=9,
        early_updates=False,
    )
    modules = {n: model.get_submodule(n) for n in sizes}
    for _ in range(2):  # the first step makes the eigenbasis, the second one the moments
        each = {n: [] for n in modules}
        for one in x:
            model.zero_grad()
            with kfac.pause():
                layer_checks.loss_of(model(one[None]), 1).backward()
            for n, m in modules.items():
                each[n].append(oracle.layer_gradient(m))
        model.zero_grad()
        layer_checks.loss_of(model(x), N).backward()
        raw = {n: oracle.layer_gradient(m) for n, m in modules.items()}
        kfac.step()
    for name, module in modules.items():
        entries = kfac.state_dict()["layers"][name]
        bases = []
        for side in FACTORS:
            vectors = [e["eigen"][1] for f, e in entries.items() if f[0] == side]
            bases.append(
                torch.stack(
                    [torch.block_diag(*of_group) for of_group in zip(*vectors, strict=True)]
                )
            )
        a, g = bases
        moments = (g.mT @ torch.stack(each[name]) @ a).square().mean(0)
        assert_close(entries["second_moment"], moments)
        want = g @ ((g.mT @ raw[name] @ a) / (moments + DAMPING)) @ a.mT
        assert_close(oracle.layer_gradient(module), want)


def test_a_size_that_divides_nothing_changes_no_bit():
    digests = []
    for block_size in (None, 19):  # the largest factor has 19 rows
        model = tiny_model()
        kfac = make_kfac(model, sgd(model), {}, block_size=block_size)
        for step in range(3):
            model.zero_grad()
            x, y = batch(step)
            nn.functional.cross_entropy(model(x), y).backward()
            kfac.step()
        grads = [raw_bytes(p.grad) for p in model.parameters()]
        digests.append((hashlib.sha256(b"".join(grads)).hexdigest(), kfac.plan.digest()))
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("a_dim", "taps"), [(7, 1), (36, 9), (37, 9), (46, 9), (12, 4), (13, 4), (100, 25)]
)
def test_blocks_are_few_and_about_equal_and_keep_channels(a_dim, taps):
    channels, bias = divmod(a_dim, taps)
    for most in range(1, a_dim + 2):
        blocks = LayerSpec("layer", a_dim, 1).divided(most, taps).a_blocks
        if most >= a_dim:
            assert blocks == ()
            continue
        assert sum(blocks) == a_dim
        assert max(blocks) <= most
        if taps + bias > most:
            assert len(blocks) == -(-a_dim // most)
            assert max(blocks) - min(blocks) <= 1
            continue
        of_block = [(n - bias * (i == len(blocks) - 1)) / taps for i, n in enumerate(blocks)]
        assert all(n == int(n) >= 1 for n in of_block)
        assert max(of_block) - min(of_block) <= 1
        # The bias may cost one more block, never more.
        assert len(blocks) <= -(-channels // ((most - bias) // taps))


def test_diagonals_stay_diagonals():
    spec = LayerSpec("head", 20, 30, a_diagonal=True, g_diagonal=True)
    assert spec.divided(4) == spec


class WholeMoment(LinearLayer):
    """A user's layer, which knows nothing of blocks."""

    def moment_a(self, x, g):
        rows = self.rows(x, g)[0].flatten(1, 2)
        return rows.mT @ rows


@pytest.mark.usefixtures("double")
def test_a_layer_may_return_whole_moments():
    factors = []
    for types in ({}, {nn.Linear: WholeMoment}):
        torch.manual_seed(0)
        model = nn.Linear(7, 3)
        kfac = layer_checks.kfac_of(model, block_size=3, layer_types=types)
        layer_checks.loss_of(model(torch.ones(2, 7).cumsum(1)), 2).backward()
        kfac.step()
        entries = kfac.state_dict()["layers"][""]
        factors.append({f: entry["factor"] for f, entry in entries.items()})
    assert list(factors[0]) == ["A.0", "A.1", "A.2", "G"]
    layer_checks.assert_same(*factors)


def test_a_convolution_computes_only_its_blocks(monkeypatch):
    widths = []
    compute = ConvLayer._input_moment

    def note(self, x, *, has_bias):
        widths.append((x.shape[1], has_bias))
        return compute(self, x, has_bias=has_bias)

    monkeypatch.setattr(ConvLayer, "_input_moment", note)
    model = nn.Conv2d(5, 4, 3)
    kfac = layer_checks.kfac_of(model, block_size=19)
    model(torch.randn(2, 5, 5, 5)).square().mean().backward()
    kfac.step()
    assert widths == [(2, False), (2, False), (1, True)]


# On several ranks


DIVIDED = [
    ("comm_opt", "eigen"),
    ("comm_opt", "ekfac"),
    ("hybrid_opt", "inverse"),
    ("owner_reduce", "eigen"),
    slow("comm_opt", "inverse"),
    slow("mem_opt", "eigen"),
    slow("mem_opt", "inverse"),
    slow("layer_wise", "eigen"),
    slow("layer_wise", "inverse"),
    slow("hybrid_opt", "eigen"),
    slow("owner_reduce", "inverse"),
    slow("local_factors", "eigen"),
    slow("local_factors", "inverse"),
]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "method"), DIVIDED)
def test_blocks_on_two_ranks_equal_one_process_and_their_own_plan(strategy, method):
    """Blocks of one factor are decomposed by both ranks, where both are gradient workers."""
    options = {"method": method, "block_size": 4}
    # A rank with local factors needs all of a layer's for the comparison. The others have a
    # fraction of their own.
    adjustable = strategy in ("hybrid_opt", "owner_reduce")
    placing = {"grad_worker_fraction": 1.0} if adjustable else {}
    first, *_ = train_and_compare_with_the_plan(2, SMALL, strategy, options, **placing)
    layers = [p for p in first.plan.placements if len(p.layer.factors_of("A")) > 1]
    assert len(layers) == 5
    shared = {len({p.worker(f) for f in p.layer.factors_of("A")}) for p in layers}
    one_owner = first.plan.factors_on != "all" and method == "inverse"
    apart = len(first.plan.placements[0].grad_workers) > 1 and not one_owner
    assert (2 in shared) == apart


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "method", "world", "more"),
    [
        ("comm_opt", "inverse", 2, {"damping": None}),
        ("comm_opt", "eigen", 2, {"damping": adaptive}),
        slow("owner_reduce", "inverse", 4, {"damping": None}),
        slow("comm_opt", "inverse", 4, {"factored_damping": True}),
        slow("comm_opt", "eigen", 4, {"state_dtype": torch.float32, "factored_damping": True}),
    ],
)
def test_dampings_of_blocks_equal_one_process(strategy, method, world, more):
    train_on_ranks(
        world, tiny_model, batch, LARGE, strategy, {"method": method, "block_size": 4, **more}
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "method"),
    [("comm_opt", "eigen"), slow("owner_reduce", "inverse"), slow("comm_opt", "ekfac")],
)
def test_shards_of_blocks_load_on_another_world_size(strategy, method):
    options = state_options(method) | {"block_size": 4}
    results = run_ranks(2, train_and_save, strategy, options)
    shards, _, weights, ends, (placements, _) = zip(*results, strict=True)
    for rank, shard in enumerate(map(loads, shards)):
        for p in placements:
            kept = shard["layers"][p.layer.name]
            entries = {key for key in kept if not key.startswith("second_moment")}
            assert entries == {f for f in p.layer.factors if p.worker(f) == rank}
    assert run_ranks(2, go_on, strategy, options, shards, weights[0]) == list(ends), "not bit-exact"
    alone = loads(go_on("comm_opt", options, shards, weights[0], distributed=False))
    torch.testing.assert_close(alone, loads(ends[0]), rtol=2e-4, atol=2e-5)


def test_a_state_of_other_blocks_is_refused():
    states = {}
    for block_size in (None, 4):
        model = tiny_model()
        kfac = make_kfac(model, sgd(model), {}, block_size=block_size)
        nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
        kfac.step()
        states[block_size] = kfac.state_dict()
    for own, other in ((None, 4), (4, None)):
        model = tiny_model()
        kfac = make_kfac(model, sgd(model), {}, block_size=own)
        with pytest.raises(
            ValueError, match=r"found nothing; .*the same model, max_dim, block_size"
        ):
            kfac.load_state_dict(states[other])


# The plan, the report, and what is refused


def test_blocks_cost_less_and_go_to_all_gradient_workers():
    """Of 4608 rows, 512 channels of 9 taps: the longest rank has one block of 468 rows."""
    spec = LayerSpec("conv", 4608, 512)
    plan = make_plan([spec.divided(512, 9)], 64, strategy="comm_opt")
    assert plan.placements[0].layer.a_blocks == (468, 468) + (459,) * 8
    members = [(op.ranks, op.members) for op in plan.decompose if isinstance(op, Decompose)]
    assert len(members) == 11
    assert len({ranks for ranks, _ in members}) == 11  # ten blocks of A, and G
    whole = make_plan([spec], 64, strategy="comm_opt")
    sent, of_whole = (sum(getattr(op, "numel", 0) for op in p.factors) for p in (plan, whole))
    assert of_whole / sent > 8


def test_the_report_names_the_blocks():
    model = nn.Sequential(nn.Conv2d(5, 4, 3))
    report = KFAC(model, sgd(model), block_size=19).report()
    assert "A 46 (3 blocks of at most 18), G 4" in str(report)
    assert report.largest_factor == 18


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "512"])
def test_a_size_that_is_no_number_of_rows_is_refused(size):
    model = tiny_model()
    with pytest.raises(ValueError, match=r"block_size=.* whole number of at least 1, or None"):
        KFAC(model, sgd(model), block_size=size)


def test_eigen_adam_is_refused():
    with pytest.raises(ValueError, match="block_size=4 with method=eigen_adam, which needs whole"):
        eigen_adam(tiny_model(), kfac={"block_size": 4})


def refused_on_rank():
    model = tiny_model()
    apart = {"strategy": "owner_reduce", "grad_worker_fraction": 1.0, "colocate_factors": False}
    options = apart | {"method": "inverse", "damping": None, "block_size": 4}
    with pytest.raises(ValueError, match=r"block_size with method=inverse .*colocate_factors=True"):
        make_kfac(model, sgd(model), options)
    make_kfac(model, sgd(model), options | {"damping": 0.1})
    return True


@pytest.mark.ranks
def test_an_inverse_needs_all_blocks_of_a_factor():
    assert run_ranks(2, refused_on_rank) == [True, True]
