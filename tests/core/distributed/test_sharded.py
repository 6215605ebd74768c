"""Models of which each rank holds parts: FSDP2 and tensor parallel equal one process."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from kfac_bench import KFAC
from kfac_bench.core.distributed.collective import SingleProcess, TorchCollective
from kfac_bench.core.distributed.dtensor import full, local, shard_like
from kfac_bench.core.execution.gradients import ShardedGradients
from kfac_bench.core.planning.plan import METHODS, STRATEGIES, GatherGradients
from tests.support.distributed import run_ranks
from tests.support.quick import quick_if, slow
from tests.support.training import (
    Mixed,
    adaptive,
    after_step,
    assert_close,
    batch,
    expected,
    is_clipped,
    make_kfac,
    my_part,
    one_process,
    optimizer_of,
    sentences,
    sgd,
    tiny_model,
    train_step,
    weights_of,
)

pytestmark = pytest.mark.ranks

ALL_CHOICES = [(s, m) for s in STRATEGIES for m in METHODS if m != "ekfac" or s == "comm_opt"]
CHOICES = [(s, m) for s, m in ALL_CHOICES if s != "local_factors"]


class Attention(nn.Module):
    """Heads beside each other, so that a rank may hold some of them."""

    def __init__(self, d):
        super().__init__()
        self.q, self.v = nn.Linear(d, d), nn.Linear(d, d)
        self.k = nn.Linear(d, d, bias=False)  # no gradient would reach a bias
        self.out = nn.Linear(d, d)

    def forward(self, x):
        heads = (p(x).unflatten(-1, (-1, 2)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """One block between an embedding and a head, whose sizes no number of ranks divides."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(9, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = Attention(8)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, x):
        x = self.tokens(x)
        x = x + self.attention(self.norm(x))
        return self.head(x + self.mlp(x))


def shard(model, mesh, **options):
    for module in model.modules():
        if module is not model and any(True for _ in module.parameters(recurse=False)):
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def compare(model, make_model, make_batch, options, strategy, data=my_part, tolerance=2e-4):
    """Train beside one process; the preconditioner."""
    optimizer = optimizer_of(model, options)
    kfac = make_kfac(model, optimizer, options, strategy=strategy)
    wanted = expected(make_model, make_batch, strategy, options)
    for step, (want_grads, want_weights, want_after) in enumerate(wanted):
        grads = train_step(model, kfac, optimizer, *data(*make_batch(step)))
        assert_close([full(g) for g in grads], want_grads, tolerance)
        assert_close([full(w) for w in weights_of(model)], want_weights, tolerance)
        assert after_step(kfac) == pytest.approx(want_after, rel=1e-3)
        assert is_clipped(kfac.plan.method, after_step(kfac)), "the clip is not at work"
    assert kfac.failed_decompositions == kfac.dropped_statistics == 0
    return kfac


ALL = {"skip": ()}


def world_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def fsdp_on_rank(make_model, make_batch, strategy, options):
    model = shard(make_model(), world_mesh())
    compare(model, make_model, make_batch, options, strategy)
    assert all(isinstance(p, DTensor) for p in model.parameters())


class Attentive(nn.Module):
    """Norms, an embedding, grouped convolutions and torch's own attention."""

    def __init__(self):
        super().__init__()
        self.mixed = Mixed()
        self.attention = nn.MultiheadAttention(11, 1, batch_first=True)
        self.attention.in_proj_bias = None  # no gradient would reach the keys'
        self.unused = nn.Linear(11, 2)

    def forward(self, x):
        x = self.mixed(x)
        return self.attention(x, x, x, need_weights=False)[0]


def attentive_on_rank(strategy, options):
    model = Attentive()
    for module in (*model.mixed.children(), model.attention, model.unused):
        if isinstance(module, nn.ModuleList):
            for child in module:
                fully_shard(child)
        else:
            fully_shard(module)
    kfac = compare(fully_shard(model), Attentive, sentences, options, strategy)
    assert len(kfac.report().layers) == 13


@pytest.mark.parametrize(
    ("strategy", "method"), [("comm_opt", "ekfac"), slow("mem_opt", "inverse")]
)
def test_fsdp2_covers_all_kinds_of_layers(strategy, method):
    options = ALL | {"max_dim": 10, "method": method}
    run_ranks(2, attentive_on_rank, strategy, options)


@pytest.mark.supports("fsdp2", "{strategy}")
@pytest.mark.parametrize(
    ("world", "strategy", "method"),
    [
        # On two ranks, hybrid_opt is mem_opt.
        *quick_if(
            lambda case: case[2] in ("eigen", "ekfac") or case[1:] == ("mem_opt", "eigen_adam"),
            [(2, s, m) for s, m in ALL_CHOICES if s != "hybrid_opt"],
        ),
        *(slow(4, s, "eigen") for s in STRATEGIES),
        slow(4, "mem_opt", "eigen_adam"),
    ],
)
def test_fsdp2_equals_one_process(world, strategy, method):
    run_ranks(world, fsdp_on_rank, tiny_model, batch, strategy, {"method": method})


def parallelize(model, mesh, *, sequence=False):
    """Heads and hidden features over the ranks of ``mesh``; with ``sequence``, tokens between."""
    style = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        **{f"attention.{n}": ColwiseParallel() for n in "qkv"},
        "attention.out": RowwiseParallel(),
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    if sequence:
        tokens = Shard(1)
        style |= {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
            "norm": SequenceParallel(),
            **{f"attention.{n}": ColwiseParallel(input_layouts=tokens) for n in "qkv"},
            "attention.out": RowwiseParallel(output_layouts=tokens),
            "mlp.0": ColwiseParallel(input_layouts=tokens),
            "mlp.2": RowwiseParallel(output_layouts=tokens),
            "head": ColwiseParallel(input_layouts=tokens, output_layouts=Replicate()),
        }
    return parallelize_module(model, mesh, style)


def whole(*tensors):
    return tensors


def even_sentences(step):
    """Sequence parallel splits tokens: torch wants as many on each rank."""
    return [t[:, :4] for t in sentences(step)]


def tensor_parallel_on_rank(strategy, options, sequence):
    make_batch = even_sentences if sequence else sentences
    model = parallelize(Transformer(), world_mesh(), sequence=sequence)
    kfac = compare(model, Transformer, make_batch, options, strategy, whole)
    assert any(isinstance(op, GatherGradients) for op in kfac.plan.precondition)


@pytest.mark.supports("tensor parallel", "{strategy}")
@pytest.mark.parametrize(
    ("strategy", "method", "sequence"),
    [
        *quick_if(
            (
                *(("comm_opt", "ekfac", True), ("mem_opt", "eigen_adam", True)),
                ("owner_reduce", "eigen", True),
            ).__contains__,
            [(s, m, True) for s, m in CHOICES if s != "hybrid_opt" or m == "eigen"],
        ),
        slow("comm_opt", "eigen", False),
        slow("mem_opt", "inverse", False),
        slow("owner_reduce", "eigen", False),
    ],
)
def test_tensor_parallel_equals_one_process(strategy, method, sequence):
    run_ranks(2, tensor_parallel_on_rank, strategy, ALL | {"method": method}, sequence)


def grid_on_rank(strategy, options, sequence, data_parallel):
    """2 x 2 ranks; data parallel by FSDP2, or by a reduction of gradients that DTensor ignores."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(Transformer(), mesh["tp"], sequence=sequence)
    if data_parallel == "fsdp2":
        shard(model, mesh["dp"])
    else:
        group = mesh.get_group("dp")

        def average(param):
            dist.all_reduce(local(param.grad), group=group)
            local(param.grad).div_(2)

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(average)
    make_batch = even_sentences if sequence else sentences
    position, size = mesh.get_local_rank("dp"), mesh.size(0)

    def data(*tensors):
        return my_part(*tensors, rank=position, world=size)

    compare(model, Transformer, make_batch, options, strategy, data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "data_parallel", "sequence"),
    [
        ("mem_opt", "fsdp2", True),
        ("comm_opt", "fsdp2", False),
        ("comm_opt", "by hand", True),
        ("mem_opt", "by hand", False),
    ],
)
def test_tensor_parallel_beside_data_parallel_equals_one_process(strategy, data_parallel, sequence):
    run_ranks(4, grid_on_rank, strategy, ALL, sequence, data_parallel)


def hybrid_on_rank(strategy):
    """A 2 x 2 mesh of FSDP2: parameters are divided along one dimension, copied along the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    compare(shard(tiny_model(), mesh), tiny_model, batch, {}, strategy)


@pytest.mark.parametrize("strategy", [slow("comm_opt"), slow("mem_opt"), "local_factors"])
def test_fsdp2_with_copies_equals_one_process(strategy):
    run_ranks(4, hybrid_on_rank, strategy)


# precision, accumulation


def accumulate_on_rank():
    """Parts of 5, 7 and 4 samples; ranks meet at the last one. On one process in one go."""
    model = shard(tiny_model(), world_mesh())
    optimizer = sgd(model)
    kfac = make_kfac(model, optimizer, {})
    for step, (want_grads, want_weights, _) in enumerate(one_process(tiny_model, batch, ())):
        x, y = my_part(*batch(step))
        optimizer.zero_grad()
        parts = list(zip(x.split([5, 7, 4]), y.split([5, 7, 4]), strict=True))
        for i, (part, labels) in enumerate(parts):
            model.set_requires_gradient_sync(i == len(parts) - 1)
            loss = F.cross_entropy(model(part), labels) * len(part) / len(x)
            loss.backward()
        kfac.step()
        assert_close([full(p.grad) for p in model.parameters()], want_grads)
        optimizer.step()
        assert_close([full(w) for w in weights_of(model)], want_weights)


@pytest.mark.supports("fsdp2", "gradient accumulation")
def test_fsdp2_accumulates_as_one_large_batch():
    run_ranks(2, accumulate_on_rank)


def accumulate_tensor_parallel_on_rank():
    """Parts of one sample, which leaves a rank without, and of seven."""
    model = parallelize(Transformer(), world_mesh())
    optimizer = sgd(model)
    kfac = make_kfac(model, optimizer, ALL)
    want = one_process(Transformer, sentences, tuple(ALL.items()))
    for step, (want_grads, _, _) in enumerate(want):
        x, y = sentences(step)
        optimizer.zero_grad()
        for part in (slice(0, 1), slice(1, 8)):
            output = model(x[part]).flatten(0, 1)
            (F.cross_entropy(output, y[part].flatten()) * len(x[part]) / len(x)).backward()
        kfac.step()
        assert_close([full(p.grad) for p in model.parameters()], want_grads)
        optimizer.step()
    assert kfac.dropped_statistics == 0


@pytest.mark.supports("tensor parallel", "gradient accumulation")
def test_tensor_parallel_accumulates_as_one_large_batch():
    run_ranks(2, accumulate_tensor_parallel_on_rank)


def bf16_on_rank(kind):
    """Cosines with fp32's preconditioned gradients, and the types at hand."""
    torch.manual_seed(0)
    make_model = tiny_model if kind == "fsdp2" else Transformer
    make_batch, options = (batch, {}) if kind == "fsdp2" else (sentences, ALL)
    model = make_model()
    if kind == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, world_mesh(), mp_policy=policy)
    else:
        parallelize(model, world_mesh())
    optimizer = sgd(model)
    kfac = make_kfac(model, optimizer, options)
    x, y = make_batch(0)
    if kind == "fsdp2":
        x, y = my_part(x, y)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind != "fsdp2"):
        output = model(x).flatten(0, -2)
    assert output.dtype == torch.bfloat16
    F.cross_entropy(output.float(), y.flatten()).backward()
    kfac.step()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert kfac.dropped_statistics == 0
    want = one_process(make_model, make_batch, tuple(options.items()))[0][0]
    got = [full(p.grad) for p in model.parameters()]
    return [
        F.cosine_similarity(a.flatten(), b.flatten(), 0).item()
        for a, b in zip(got, want, strict=True)
    ]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("fsdp2", marks=pytest.mark.supports("fsdp2", "bf16 autocast")),
        pytest.param(
            "tensor parallel", marks=pytest.mark.supports("tensor parallel", "bf16 autocast")
        ),
    ],
)
def test_bf16_follows_fp32(kind):
    cosines = run_ranks(2, bf16_on_rank, kind)
    assert cosines[0] == cosines[1]
    assert min(cosines[0]) > 0.98


@pytest.mark.parametrize("square", [0.0, 1e-30, 1.0])
def test_the_cosine_of_small_gradients(square):
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].weight.grad = torch.ones(2, 3)
    gradients = ShardedGradients(KFAC(model, sgd(model))._layers, world_size=1)
    gradients.keep_products(torch.tensor([0.5 * square, square, square, 1.0]))
    assert gradients.cosines().item() == pytest.approx(0.5 if square else 0.0)


def scaled_on_rank(overflow):
    """With an overflow on one rank no rank steps; else all is as without a scaler."""
    model = shard(tiny_model(), world_mesh())
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=256.0)
    kfac = make_kfac(model, optimizer, {})
    x, y = my_part(*batch(0))
    before = [full(w).clone() for w in weights_of(model)]
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    if overflow and dist.get_rank() == 1:
        local(model[2].weight.grad).fill_(torch.inf)
    scaler.unscale_(optimizer)
    kfac.step(scaler.get_scale)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (128.0 if overflow else 256.0)
    got = [full(w) for w in weights_of(model)]
    assert_close(got, before if overflow else one_process(tiny_model, batch, ())[0][1])


@pytest.mark.supports("fsdp2", "fp16 with GradScaler")
@pytest.mark.parametrize("overflow", [False, True])
def test_a_grad_scaler_steps_or_skips_on_all_ranks(overflow):
    run_ranks(2, scaled_on_rank, overflow)


# what does not fit


def refused_on_rank(kind):
    model = tiny_model() if kind != "fisher" else Transformer()
    if kind == "collective":
        shard(model, world_mesh())
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        half = TorchCollective(groups[dist.get_rank() // 2])
        with pytest.raises(ValueError, match="spread over 4 ranks, K-FAC over 2: give it a coll"):
            make_kfac(model, sgd(model), {}, collective=half)
    elif kind == "optimizer":
        optimizer = sgd(model)
        shard(model, world_mesh())
        with pytest.raises(ValueError, match="does not hold the weight of"):
            make_kfac(model, optimizer, {})
    else:
        parallelize(model, world_mesh())
        kfac = make_kfac(model, sgd(model), ALL, fisher="mc")
        output = model(sentences(0)[0])
        with pytest.raises(
            RuntimeError, match="tensor-parallel layers need the same labels: use fisher=emp"
        ):
            kfac.fisher_backward(output)


@pytest.mark.parametrize(("kind", "world"), [("collective", 4), ("optimizer", 2), ("fisher", 2)])
def test_unsupported_options_are_an_error_on_every_rank(kind, world):
    run_ranks(world, refused_on_rank, kind)


# other Fishers, adaptive damping, state


def alone_on_rank():
    model = fully_shard(tiny_model(), mesh=world_mesh())
    kfac = make_kfac(model, sgd(model), {}, trust_ratio=0.1, grafting=True)
    train_step(model, kfac, sgd(model), *batch(0))
    plain = tiny_model()
    reference = make_kfac(plain, sgd(plain), {}, trust_ratio=0.1, grafting=True)
    train_step(plain, reference, sgd(plain), *batch(0))
    assert_close([full(w) for w in weights_of(model)], weights_of(plain))


def test_fsdp2_on_one_rank_limits_the_step():
    run_ranks(1, alone_on_rank)


def upsampling():
    torch.manual_seed(0)
    layers = nn.ConvTranspose2d(1, 4, 2), nn.Tanh(), nn.ConvTranspose2d(4, 6, 3, groups=2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(486, 3))


def upsampling_on_rank():
    compare(shard(upsampling(), world_mesh()), upsampling, batch, {}, "mem_opt")


def test_fsdp2_with_grouped_transposed_convolutions_equals_one_process():
    run_ranks(2, upsampling_on_rank)


def fisher_on_rank(options):
    compare(shard(tiny_model(), world_mesh()), tiny_model, batch, options, "mem_opt")


@pytest.mark.parametrize(
    "options", [{"fisher": "type2"}, {"damping": adaptive}], ids=["type2", "adaptive"]
)
def test_fsdp2_with_other_fishers_and_dampings_equals_one_process(options):
    run_ranks(2, fisher_on_rank, options)


def sharded_model(kind):
    """What is trained, and a function from a batch to this rank's part."""
    if kind == "fsdp2":
        return shard(Transformer(), world_mesh()), my_part
    return parallelize(Transformer(), world_mesh()), whole


def save_on_rank(kind, strategy):
    """(weights, state) after 3 steps; preconditioned gradients of the next one."""
    model, data = sharded_model(kind)
    optimizer = sgd(model)
    kfac = make_kfac(model, optimizer, ALL, strategy=strategy)
    for step in range(3):
        train_step(model, kfac, optimizer, *data(*sentences(step)))
    weights, state = [full(w).clone() for w in weights_of(model)], kfac.state_dict(shard=True)
    state = copy.deepcopy(state)
    grads = train_step(model, kfac, optimizer, *data(*sentences(3)))
    return weights, state, [full(g) for g in grads]


def go_on(model, data, weights, states, strategy="comm_opt", **options):
    for p, w in zip(model.parameters(), weights, strict=True):
        local(p.data).copy_(local(shard_like(w, p)))
    optimizer = sgd(model)
    kfac = make_kfac(model, optimizer, ALL, strategy=strategy, **options)
    kfac.load_state_dict(*states)
    return [full(g) for g in train_step(model, kfac, optimizer, *data(*sentences(3)))]


def go_on_on_rank(kind, strategy, weights, states):
    model, data = sharded_model(kind)
    return go_on(model, data, weights, states, strategy)


@pytest.mark.supports("{kind}", "resume on another world size")
@pytest.mark.parametrize("kind", ["fsdp2", slow("tensor parallel")])
@pytest.mark.parametrize("strategy", [slow("comm_opt"), "mem_opt"])
def test_state_is_that_of_whole_layers(kind, strategy):
    """Two ranks, then one process, then ranks that hold other parts."""
    (weights, first, want), (_, second, _) = run_ranks(2, save_on_rank, kind, strategy)
    alone = go_on(Transformer(), whole, weights, [first, second], collective=SingleProcess())
    assert_close(alone, want)
    for other, world in (("fsdp2", 4), ("tensor parallel", 2)):
        got = run_ranks(world, go_on_on_rank, other, "mem_opt", weights, [first, second])
        assert_close(got[-1], want)


def kept_gradients_on_rank():
    model = parallelize(Transformer(), world_mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, optimizer).attach()
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        x, y = sentences(step)
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    return kfac.steps


def test_attached_kfac_sees_new_gradients_in_the_same_tensors():
    """Backward changes the version of a DTensor, but not that of its local part."""
    assert run_ranks(2, kept_gradients_on_rank) == [3, 3]
