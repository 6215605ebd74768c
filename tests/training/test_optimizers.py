"""Optimizers against their papers' formulas, and in a run."""

import pytest
import torch
from torch import nn

from kfac_bench import muon
from kfac_bench.config import compose
from kfac_bench.config.groups import TABLES
from kfac_bench.core.kernels import linalg
from kfac_bench.errors import UsageError
from kfac_bench.record.events import Evaluated, Resumed
from kfac_bench.training.build import build_optimizer
from tests.support.configs import quick_load
from tests.support.quick import quick_if
from tests.support.runs import before_step, end, of_kind, terminate, train

NOT_ELEMENTWISE = [
    name for name in TABLES["optimizer"] if not TABLES["optimizer"][name].is_elementwise
]


def parameters():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False)).double()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def updated(*overrides, steps=3):
    """Weights, one gradient, after some updates."""
    model = parameters()
    grads = [p.grad.clone() for p in model.parameters()]
    optimizer = build_optimizer(quick_load(overrides).optimizer, model)
    for _ in range(steps):
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def test_lars():
    """You et al. (2017), algorithm 1, the rate within the momentum; vectors by plain SGD."""
    settings = {"lr": 0.5, "momentum": 0.8, "weight_decay": 0.01, "trust_coefficient": 0.02}
    found = updated("optimizer=lars", *(f"optimizer.{k}={v}" for k, v in settings.items()))
    model = parameters()
    for name, p in model.named_parameters():
        w, v = p.detach().clone(), torch.zeros_like(p)
        for _ in range(3):
            update = p.grad
            if p.ndim > 1:
                rate = 0.02 * w.norm() / (p.grad.norm() + 0.01 * w.norm())
                update = rate * (p.grad + 0.01 * w)
            v = 0.8 * v + update
            w = w - 0.5 * v
        torch.testing.assert_close(found[name], w)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_lamb(clip):
    """You et al. (2020), algorithm 2, without bias correction; norms and biases without decay."""
    found = updated("optimizer=lamb", "optimizer.lr=0.1", f"optimizer.max_grad_norm={clip}")
    model = parameters()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    shrink = min(1.0, clip / norm.item()) if clip else 1.0
    for name, p in model.named_parameters():
        w, g, m, v = p.detach().clone(), shrink * p.grad, 0.0, 0.0
        decay = 0.01 if name in ("0.weight", "2.weight") else 0.0
        for _ in range(3):
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g.square()
            update = m / (v.sqrt() + 1e-6) + decay * w
            ratio = w.norm() / update.norm() if w.norm() > 0 else 1.0
            w = w - 0.1 * ratio * update
        torch.testing.assert_close(found[name], w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_nesterov_makes_nadam_with_a_constant_beta1(name):
    """Dozat (2016): the first moment of the next step, with this step's gradient."""
    settings = {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.2}
    overrides = [f"optimizer={name}", "optimizer.nesterov=true"]
    found = updated(*overrides, *(f"optimizer.{k}={v}" for k, v in settings.items()))
    for n, p in parameters().named_parameters():
        w, m, v = p.detach().clone(), 0.0, 0.0
        for t in range(1, 4):
            g = p.grad + 0.2 * w if name == "adam" else p.grad
            w = w - (0.1 * 0.2 * w if name == "adamw" else 0.0)
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g.square()
            look_ahead = 0.8 * m / (1 - 0.8 ** (t + 1)) + 0.2 * g / (1 - 0.8**t)
            w = w - 0.1 * look_ahead / ((v / (1 - 0.9**t)).sqrt() + 1e-6)
        torch.testing.assert_close(found[n], w)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("root", [0, 2])
def test_shampoo_has_the_length_of_rmsprop(root, nesterov):
    """Inverse roots of both factors; sums as momentum; vectors have RMSProp's own direction."""
    settings = {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "precondition_freq": 1, "eps": 1e-6}
    settings |= {"grafting": "rmsprop", "root": root, "merge_dims": False, "nesterov": nesterov}
    found = updated("optimizer=shampoo", *(f"optimizer.{k}={v}" for k, v in settings.items()))
    for n, p in parameters().named_parameters():
        w, g, v, momentum = p.detach().clone(), p.grad, 0.0, 0.0
        left, right = (1e-6 * torch.eye(size).double() for size in (len(p), p[0].numel()))
        for _ in range(3):
            v = 0.9 * v + 0.1 * g.square()
            update = length = g / (v.sqrt() + 1e-10)
            if p.ndim > 1:
                left, right = 0.9 * left + 0.1 * g @ g.mT, 0.9 * right + 0.1 * g.mT @ g
                update = inverse_root(left, root or 4) @ g @ inverse_root(right, root or 4)
                update = update * length.norm() / update.norm()
            momentum = 0.8 * momentum + update
            w = w - 0.1 * (0.8 * momentum + update if nesterov else momentum)
        torch.testing.assert_close(found[n], w, rtol=1e-3, atol=1e-4)


def inverse_root(matrix, p):
    values, vectors = torch.linalg.eigh(matrix + 1e-6 * matrix.norm(2) * torch.eye(len(matrix)))
    return vectors @ torch.diag(values ** (-1 / p)) @ vectors.mT


def test_soap_leaves_large_sides_in_the_standard_basis():
    model = parameters()
    config = quick_load(["optimizer=soap", "optimizer.max_dim=3"]).optimizer
    optimizer = build_optimizer(config, model)
    optimizer.step()
    sides = [len(q) for q in optimizer.state[model[0].weight]["Q"]]
    assert sides == [3, 0]


def test_weights_without_decay_by_name_and_by_class():
    config = quick_load(["optimizer=adamw", 'optimizer.no_decay=["bias$",Norm]']).optimizer
    model = parameters()
    model[2].weight = nn.Parameter(model[2].weight.detach())
    model[1].bias.requires_grad = False
    groups = build_optimizer(config, model).param_groups
    names = {p: n for n, p in model.named_parameters()}
    assert [[names[p] for p in g["params"]] for g in groups] == [
        ["0.weight", "2.weight"],
        ["0.bias", "1.weight"],
    ]
    assert [g["weight_decay"] for g in groups] == [0.01, 0.0]


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9")
def test_muon(is_fast, monkeypatch):
    """Hidden weights as torch's own has them; the last layer and vectors by Adam."""
    precisions = set()

    def orthogonalize(x, steps, dtype):
        precisions.add(dtype)
        return exact(x, steps, dtype)

    exact = linalg.orthogonalize
    monkeypatch.setattr(linalg, "orthogonalize", orthogonalize)
    monkeypatch.setattr(linalg, "has_fast_bfloat16", lambda device: is_fast)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 2))
    grads = {n: torch.randn(3, *p.shape) for n, p in model.named_parameters()}
    start = {n: p.detach().clone() for n, p in model.named_parameters()}

    def after(make, names):
        own = [nn.Parameter(start[n].clone()) for n in names]
        optimizer = make(own)
        for step in range(3):
            for n, p in zip(names, own, strict=True):
                p.grad = grads[n][step]
            optimizer.step()
        return dict(zip(names, own, strict=True))

    hidden = ["0.weight", "2.weight"]
    wanted = after(lambda ps: torch.optim.Muon(ps, lr=0.1, weight_decay=0.01), hidden)
    rest = [n for n in grads if n not in hidden]
    adam = {"lr": 0.003, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.01}
    wanted |= after(lambda ps: torch.optim.AdamW(ps, **adam), rest)
    said = ("optimizer.lr=0.1", "optimizer.adam_lr=0.003", "optimizer.weight_decay=0.01")
    optimizer = build_optimizer(quick_load(["optimizer=muon", *said]).optimizer, model)
    for step in range(3):
        for n, p in model.named_parameters():
            p.grad = grads[n][step]
        optimizer.step()
    for n, p in model.named_parameters():
        if n in hidden:  # torch iterates in bfloat16
            assert (p - wanted[n]).norm() < 0.02 * (wanted[n] - start[n]).norm()
        else:
            torch.testing.assert_close(p, wanted[n])
    assert {g["initial_lr"] for g in optimizer.param_groups} == {0.1, 0.003}
    assert precisions == {torch.bfloat16 if is_fast else torch.float32}


def test_muon_knows_weights_of_inputs_times_outputs():
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    linear, conv, last = nn.Linear(3, 12), Conv1D(12, 3), nn.Linear(12, 2)
    gradient = torch.randn(12, 3)
    before = conv.weight.detach().clone()
    linear.weight.data = before.T.clone()
    for module, grad in ((linear, gradient), (conv, gradient.T)):
        optimizer = muon(nn.Sequential(module, last))
        module.weight.grad = grad.clone()
        optimizer.step()
    assert not torch.equal(conv.weight, before)
    torch.testing.assert_close(conv.weight.T, linear.weight)


def test_muon_takes_named_parameters_and_groups_of_one_tensor():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))

    def groups(params):
        return [[*map(id, group["params"])] for group in muon(model, params=params).param_groups]

    want = groups(model.parameters())
    assert groups(model.named_parameters()) == want
    assert groups([{"params": list(model.named_parameters())}]) == want
    assert groups([{"params": model[0].weight}]) == [[id(model[0].weight)]]


def test_muon_refuses_what_it_would_ignore():
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"options \['lr'\], which would be ignored"):
        muon(model, params=[{"params": [*model.parameters()], "lr": 0.1}])
    new = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"needs use_muon and all options.*\[0\], \"params\""):
        muon(model).add_param_group({"params": [new], "lr": 0.1})
    optimizer = muon(model, params=model.parameters())
    optimizer.add_param_group({**optimizer.param_groups[0], "params": [new], "step": 0})
    new.grad = torch.eye(4)
    optimizer.step()
    assert not torch.equal(new, torch.ones(4, 4))
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module.*muon\(model\)"):
        muon(model.parameters())


@pytest.mark.parametrize("name", ["lr", "adam_lr", "weight_decay", "momentum"])
def test_muon_refuses_numbers_out_of_range(name):
    with pytest.raises(ValueError, match=rf"muon\(\): {name}=-1: must be at least 0"):
        muon(torch.nn.Linear(2, 2), **{name: -1})


def test_muon_leaves_the_tokens_of_a_vision_transformer_to_adam():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    model.register_parameter("class_token", nn.Parameter(torch.zeros(1, 1, 5)))
    optimizer = build_optimizer(quick_load(["optimizer=muon"]).optimizer, model)
    by_muon = [p.shape for g in optimizer.param_groups if g["use_muon"] for p in g["params"]]
    assert by_muon == [(5, 6)]


@pytest.mark.parametrize(
    "name", quick_if(("soap", "shampoo", "muon").__contains__, NOT_ELEMENTWISE)
)
def test_it_learns_and_goes_on_where_it_stopped(tmp_path, name):
    learns_and_goes_on(tmp_path, name)


def learns_and_goes_on(tmp_path, name):
    """Train with the optimizer, and again with a stop in the middle."""
    rates = {"lars": 1.0, "lamb": 0.01, "muon": 0.1, "shampoo": 0.003, "eigen_adam": 0.03}
    run = (f"optimizer={name}", f"optimizer.lr={rates.get(name, 0.01)}", "trainer.max_steps=24")
    run += ("schedule=cosine",)
    if name == "eigen_adam":
        run += ("kfac.update_freq=4", "kfac.factor_update_freq=2")
    else:
        run += ("kfac=none",)
    if name.endswith(("soap", "shampoo")):
        run += ("optimizer.precondition_freq=5",)
    _, straight = train(tmp_path, *run, "run_id=straight")
    with before_step(12, terminate):
        assert train(tmp_path, *run, "run_id=stopped")[0] == "interrupted"
    _, stopped = train(tmp_path, *run, "run_id=stopped")
    assert of_kind(stopped, Resumed)
    assert end(straight).weights_sha256 == end(stopped).weights_sha256
    first, *_, last = (e.metrics["squared_error"] for e in of_kind(straight, Evaluated))
    assert last < 0.8 * first


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_pieces_of_weights_are_refused(name):
    with pytest.raises(UsageError, match=f"optimizer={name} does not fit backend.zero_stage=2"):
        compose.load([f"optimizer={name}", "backend=deepspeed", "backend.zero_stage=2"])
    compose.load([f"optimizer={name}", "backend=deepspeed", "backend.zero_stage=0"])


@pytest.mark.parametrize("name", ["fused_lamb", "lamb", "lars", "soap", "shampoo"])
def test_parts_of_weights_are_refused(name):
    with pytest.raises(UsageError, match=f"optimizer={name} does not fit backend=fsdp2"):
        compose.load([f"optimizer={name}", "backend=fsdp2"])
