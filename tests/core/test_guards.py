"""Certain misuse raises, probable misuse warns once, and right scripts do neither.

Warnings are errors in this suite, so each test without ``pytest.warns`` also shows that a right
script gets none.
"""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_bench import KFAC, eigen_adam
from kfac_bench.core.stepper import WITH_STATISTICS, WITHOUT

OPTIONS = {"damping": 0.03, "update_freq": 1, "factor_update_freq": 1}
SCALE = 2.0**16


def network(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


def batch(n=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=generator)
    return x, torch.randint(3, (n,), generator=generator)


def backward(model, *, n=16, seed=0, scale=1.0):
    x, y = batch(n, seed)
    (scale * F.cross_entropy(model(x), y)).backward()


def setup(**options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, KFAC(model, optimizer, **(OPTIONS | options))


class TestStepTwice:
    """``step()`` on gradients that K-FAC has preconditioned already."""

    def test_at_once(self):
        model, _, kfac = setup()
        backward(model)
        kfac.step()
        with pytest.raises(RuntimeError, match="called twice without"):
            kfac.step()

    @pytest.mark.parametrize("between", ["backward", "clip"])
    def test_after_one_more_operation(self, between):
        """K-FAC knows that it sees the optimizer's steps once it has seen one."""
        model, optimizer, kfac = setup()
        backward(model)
        kfac.step()
        optimizer.step()
        optimizer.zero_grad()
        backward(model)
        kfac.step()
        backward(model) if between == "backward" else clip(model)
        with pytest.raises(RuntimeError, match="called twice without"):
            kfac.step()

    @pytest.mark.parametrize("set_to_none", [True, False])
    @pytest.mark.parametrize("skips", [True, False])
    def test_updates_that_are_skipped_are_fine(self, set_to_none, skips):
        """As by a GradScaler, or by a script that skips losses that are not finite."""
        model, optimizer, kfac = setup()
        for seed in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(model, seed=seed)
            kfac.step()
            if not (skips and seed % 2):
                optimizer.step()
        assert kfac.steps == 4

    def test_an_optimizer_in_a_wrapper_without_hooks_is_fine(self):
        """The wrapper updates the weights itself, as ZeRO does."""
        model, _, _ = setup()
        KFAC.detach_all(model)

        class Wrapper:
            param_groups = torch.optim.SGD(model.parameters(), lr=0.1).param_groups

        kfac = KFAC(model, Wrapper(), **OPTIONS)
        for seed in range(3):
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.data.zero_()
            backward(model, seed=seed)
            kfac.step()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        assert kfac.steps == 3

    def test_gradients_written_into_the_same_tensors_are_fine(self):
        model, optimizer, kfac = setup()
        for seed in range(3):
            x, y = batch(seed=seed)
            grads = torch.autograd.grad(F.cross_entropy(model(x), y), [*model.parameters()])
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.grad = grad.clone() if p.grad is None else p.grad
                p.grad.data.copy_(grad)
            kfac.step()
            optimizer.step()
        assert kfac.steps == 3


def clip(model, norm=1e-3):
    nn.utils.clip_grad_norm_(model.parameters(), norm)


class TestAttached:
    """Steps of an attached optimizer that are no training steps."""

    @pytest.mark.parametrize("with_gradients", [True, False])
    def test_a_step_without_backward_does_not_count(self, with_gradients):
        model, optimizer, kfac = setup()
        kfac.attach()
        if with_gradients:
            backward(model)
            optimizer.step()
        before = [p.grad for p in model.parameters()]
        copies = [None if g is None else g.clone() for g in before]
        optimizer.step()
        assert kfac.steps == with_gradients
        for p, grad, copy in zip(model.parameters(), before, copies, strict=True):
            assert p.grad is grad
            assert grad is None or torch.equal(grad, copy)


class TestEvalMode:
    """Training steps in eval mode."""

    def test_a_model_in_eval_mode_is_named_once(self):
        model, optimizer, kfac = setup()
        model.eval()
        with pytest.warns(UserWarning, match=r"'0' is trained in eval mode.*2 of 2.*model\.train"):
            train(model, optimizer, kfac)
        train(model, optimizer, kfac)

    def test_a_frozen_backbone_in_eval_mode_is_fine(self):
        model = network()
        model[0].requires_grad_(False).eval()
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        train(model, optimizer, KFAC(model, optimizer, **OPTIONS))

    def test_an_evaluation_between_backward_and_step_is_fine(self):
        model, _, kfac = setup()
        backward(model)
        model.eval()
        model(batch()[0])
        kfac.step()


def train(model, optimizer, kfac, steps=2, **options):
    for seed in range(steps):
        optimizer.zero_grad()
        backward(model, seed=seed, **options)
        kfac.step()
        optimizer.step()


class TestModelChanges:
    """Layers that came after K-FAC."""

    def test_a_replaced_layer(self):
        model, optimizer, kfac = setup()
        train(model, optimizer, kfac)
        model[2] = nn.Linear(8, 3)
        optimizer.add_param_group({"params": model[2].parameters()})
        with pytest.warns(UserWarning, match=r"'2' was replaced.*call detach\(\)"):
            train(model, optimizer, kfac)

    @pytest.mark.parametrize("attaches", [True, False])
    def test_new_weights_in_an_old_module(self, attaches):
        model, optimizer, kfac = setup()
        if attaches:  # the optimizer has the old weights, so K-FAC makes no step
            kfac.attach()
        model.load_state_dict(network().state_dict(), assign=True)
        backward(model)
        with pytest.warns(UserWarning, match="'0' was replaced"):
            optimizer.step() if attaches else kfac.step()

    def test_an_added_layer(self):
        model, optimizer, kfac = setup()
        model.append(nn.Linear(3, 3))
        with pytest.warns(UserWarning, match="'3' was added or unfrozen"):
            train(model, optimizer, kfac)

    def test_an_unfrozen_layer(self):
        model = network()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, **OPTIONS | {"update_freq": 2, "factor_update_freq": 2})
        train(model, optimizer, kfac, steps=1)
        model[0].requires_grad_(True)
        train(model, optimizer, kfac, steps=1)  # no statistics are due
        with pytest.warns(UserWarning, match=r"'0' was added or unfrozen.*\(such layers: 1\)"):
            train(model, optimizer, kfac, steps=1)

    def test_layers_that_k_fac_leaves_out_may_change(self):
        model, optimizer, kfac = setup()
        model[0].requires_grad_(False)
        model.append(nn.LayerNorm(3))
        train(model, optimizer, kfac)


MISUSES = {
    "two lines, scale not passed": ({"unscales": True}, "during backward .* 65536 times"),
    "two lines, not unscaled": ({"passes": True}, "65536 is still in .grad"),
    "two lines, nothing": ({}, r"gradients were still multiplied"),
    "attached without the scaler": ({"attaches": True}, "during backward .* 65536 times"),
    "attached, unscaled by hand": ({"attaches": True, "unscales": True}, "during backward"),
    "attached, clipped": ({"attaches": True, "unscales": True, "clips": True}, "during backward"),
}
LOSSES = {
    "cross entropy": (3, lambda out, y: F.cross_entropy(out, y)),
    "large targets": (1, lambda out, y: F.mse_loss(out[:, 0], 1e4 * y.float())),
    "small loss": (1, lambda out, y: 1e-4 * F.mse_loss(out[:, 0], y.float())),
}


def train_scaled(outputs, loss, *, fused=False, steps=3, attaches=False, **options):
    """A script with a GradScaler; ``options`` are the lines that it has."""
    model = network(outputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    kfac = KFAC(model, optimizer, **OPTIONS)
    if attaches:
        kfac.attach(scaler if options.get("passes") else None)
    for seed in range(steps):
        optimizer.zero_grad()
        x, y = batch(seed=seed)
        scaler.scale(loss(model(x), y)).backward()
        if options.get("unscales"):
            scaler.unscale_(optimizer)
        if options.get("clips"):
            clip(model, 0.3)
        if not attaches:
            kfac.step(loss_scale=scaler.get_scale if options.get("passes") else 1.0)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("kind", LOSSES)
class TestLossScale:
    """A loss scale that K-FAC does not know, or that is still in ``.grad``."""

    @pytest.mark.parametrize("misuse", MISUSES)
    def test_misuse_is_named_once(self, misuse, kind):
        options, message = MISUSES[misuse]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_scaled(*LOSSES[kind], **options)
        texts = [str(w.message) for w in caught]
        assert sum(re.search(message, text) is not None for text in texts) == 1, texts
        # Of a cross entropy K-FAC also sees that it is too large, before the scaler divides it.
        assert len(texts) == 1 + (misuse == "two lines, nothing" and kind == "cross entropy")
        assert {w.filename for w in caught} == {__file__}

    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize("attaches", [True, False])
    def test_right_use_is_silent(self, attaches, fused, kind):
        options = {"attaches": attaches, "unscales": not attaches, "passes": True}
        train_scaled(*LOSSES[kind], fused=fused, **options)

    def test_a_fused_optimizer_that_unscales_later_is_seen_at_once(self, kind):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_scaled(*LOSSES[kind], fused=True, steps=1)
        assert "still multiplied by the loss scale" in str(caught[-1].message)


class TestRightScripts:
    """No warnings, whatever the task."""

    @pytest.mark.parametrize("norm", [1e-3, 0.1, 1e6])
    @pytest.mark.parametrize("attaches", [True, False])
    def test_clipping(self, norm, attaches):
        model, optimizer, kfac = setup()
        if attaches:
            kfac.attach()
        for seed in range(3):
            optimizer.zero_grad()
            backward(model, seed=seed)
            if attaches:
                clip(model, norm)
            else:
                kfac.step()
                clip(model, norm)
            optimizer.step()

    def test_micro_batches_of_unequal_size(self):
        model, optimizer, kfac = setup()
        for _ in range(3):
            optimizer.zero_grad()
            for n in (1, 10, 5):
                backward(model, n=n, scale=n / 16)
            kfac.step()
            optimizer.step()

    def test_a_cross_entropy_with_one_heavy_class(self):
        """The mean over 64 examples, of which one has nearly all the weight."""
        model, optimizer, kfac = setup()
        x, y = batch(64)
        y = torch.zeros_like(y)
        y[0] = 1
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, weight=torch.tensor([1.0, 1e6, 1.0])).backward()
        kfac.step()

    def test_tokens_that_are_ignored(self):
        model, optimizer, kfac = setup()
        x, y = torch.randn(4, 10, 6), torch.full((4, 10), -100)
        y[0, 0] = 1
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        kfac.step()

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_losses_without_softmax_are_not_judged(self, reduction):
        model, optimizer, kfac = setup()
        x, _ = batch(64)
        optimizer.zero_grad()
        F.mse_loss(model(x), torch.full((64, 3), 1e4), reduction=reduction).backward()
        kfac.step()


def test_the_gradient_of_an_input_is_no_loss_scale():
    """An adversarial example often takes the sum of the loss: here 256 times the mean."""
    model, _, kfac = setup()
    x, y = batch(256)
    x.requires_grad_()
    torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x)
    F.cross_entropy(model(x), y).backward()
    kfac.step()


def test_an_overflow_before_many_steps_without_statistics_is_fine():
    """The steps between two statistics must not add up to what looks like a loss scale."""
    every = {"update_freq": 128, "factor_update_freq": 128, "spread": False}
    model, _, kfac = setup(**every, early_updates=False)
    for step in range(129):
        model.zero_grad()
        backward(model, scale=1.0 if step else float("inf"))  # weights do not change
        kfac.step()


def test_a_norm_layer_whose_shift_has_no_gradient_is_fine():
    """Here the gradient of its shift is a sum of opposite numbers, the one of its scale is not."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, optimizer, **OPTIONS, skip=[])
    x = batch()[0][:, :4]
    model(torch.cat([x, -x])).square().mean().backward()
    kfac.step()


class TestSum:
    """A cross entropy that is a sum over the examples."""

    @pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])
    @pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
    def test_of_images(self, dtype, weight_sharing):
        model, _, kfac = setup(weight_sharing=weight_sharing)
        x, y = batch(64)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        with pytest.warns(UserWarning, match=r"too large for a mean over the 64 examples"):
            kfac.step()

    def test_of_tokens(self):
        model, _, kfac = setup()
        x, y = torch.randn(16, 10, 6), torch.randint(3, (160,))
        F.cross_entropy(model(x).flatten(0, 1), y, reduction="sum").backward()
        with pytest.warns(UserWarning, match="too large for a mean over the 16 examples"):
            kfac.step()

    def test_over_tokens_but_not_over_examples_is_fine(self):
        model, _, kfac = setup()
        x, y = torch.randn(16, 10, 6), torch.randint(3, (160,))
        (F.cross_entropy(model(x).flatten(0, 1), y, reduction="sum") / 16).backward()
        kfac.step()


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_overflows_and_zeros_prove_nothing(value):
    """The next sound step does."""
    model, optimizer, kfac = setup()
    kfac.attach()
    for is_sound in (False, True):
        optimizer.zero_grad()
        (SCALE * model(batch()[0]).square().mean()).backward()
        for p in model.parameters():
            p.grad.mul_(1 / SCALE) if is_sound else p.grad.fill_(value)
        if not is_sound:
            optimizer.step()
            model.load_state_dict(network().state_dict())
    with pytest.warns(UserWarning, match="65536 times"):
        optimizer.step()


class TestWideLayers:
    """Preconditioning takes longer than the step."""

    @staticmethod
    def train(rows, **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 600), nn.Tanh(), nn.Linear(600, 600), nn.Linear(600, 3))
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), **(OPTIONS | options))
        x, y = torch.randn(rows, 20), torch.randint(3, (rows,))
        F.cross_entropy(model(x), y).backward()
        kfac.step()

    def test_the_warning_names_the_ratio_the_layer_and_a_remedy(self):
        shapes = [(600, 21), (600, 601), (3, 601)]
        work = sum(4 * g * a * (g + a) for g, a in shapes)
        ratio = work / (6 * 64 * sum(g * a for g, a in shapes))
        with pytest.warns(UserWarning, match=rf"about {ratio:.1f} times") as seen:
            self.train(64, method="eigen")
        assert "layer 2 has 600 x 601 weights and 64 rows per step" in str(seen[0].message)
        assert "max_overhead=0.5" in str(seen[0].message)

    @pytest.mark.parametrize(
        ("options", "remedy"),
        [({}, "max_overhead=1"), ({"background": True}, "max_dim to fewer rows")],
    )
    def test_eigen_adam_gets_the_remedy_that_it_accepts(self, options, remedy):
        model = nn.Sequential(nn.Linear(20, 600), nn.Linear(600, 600), nn.Linear(600, 3))
        optimizer = eigen_adam(model, kfac=options)
        model(torch.randn(64, 20)).square().mean().backward()
        with pytest.warns(UserWarning, match=rf"64 rows per step\. Set {remedy}"):
            optimizer.step()

    def test_a_budget_needs_no_warning(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 600), nn.Linear(600, 600), nn.Linear(600, 3))
        optimizer = eigen_adam(model, kfac={"max_overhead": 1e9})
        for _ in range(WITH_STATISTICS + WITHOUT + 1):
            optimizer.zero_grad()
            model(torch.randn(64, 20)).square().mean().backward()
            optimizer.step()
        assert optimizer.preconditioner.steps == 1

    def test_a_remedy_that_background_work_accepts(self):
        with pytest.warns(UserWarning, match=r"64 rows per step\. Set block_size=1024"):
            self.train(64, method="eigen", background=True)

    def test_embeddings_alone_have_no_ratio(self):
        torch.manual_seed(0)
        users, items = nn.Embedding(10_000, 200), nn.Embedding(10_000, 200)
        model = nn.ModuleList([users, items])
        optimizer = eigen_adam(model)
        ids = torch.arange(64)
        (users(ids) * items(ids)).sum(1).square().mean().backward()
        optimizer.step()

    def test_orthogonalization_does_not_count(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 600), nn.Linear(600, 600), nn.Linear(600, 3))
        optimizer = eigen_adam(model, kfac={"max_dim": 32})
        model(torch.randn(64, 20)).square().mean().backward()
        optimizer.step()

    @pytest.mark.parametrize(("rows", "options"), [(900, {}), (64, {"max_dim": 32})])
    def test_a_larger_batch_and_a_smaller_max_dim_help(self, rows, options):
        self.train(rows, **options)


class TestMissingStep:
    """The optimizer trains, and K-FAC never runs."""

    @staticmethod
    def train(model, optimizer, steps, before=lambda: None):
        for seed in range(steps):
            optimizer.zero_grad()
            backward(model, seed=seed)
            before()
            optimizer.step()

    @pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
    @pytest.mark.parametrize("foreach", [False, True])
    def test_a_forgotten_step(self, name, foreach):
        model = network()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, foreach=foreach)
        kfac = KFAC(model, optimizer, **OPTIONS)
        self.train(model, optimizer, 3)
        with pytest.warns(UserWarning, match="changed 3 times, but K-FAC made no step"):
            self.train(model, optimizer, 1)
        self.train(model, optimizer, 5)
        assert kfac.steps == 0

    def test_another_optimizer_steps_than_the_one_with_k_fac(self):
        """A framework returns an optimizer of its own around the same parameters."""
        model, optimizer, kfac = setup()
        kfac.attach()
        other = torch.optim.SGD(optimizer.param_groups, lr=0.1)
        with pytest.warns(UserWarning, match="made no step"):
            self.train(model, other, 4)

    @pytest.mark.parametrize("is_attached", [False, True])
    def test_right_scripts(self, is_attached):
        model, optimizer, kfac = setup(factor_update_freq=5, update_freq=5)
        if is_attached:
            kfac.attach()
        before = (lambda: None) if is_attached else kfac.step
        self.train(model, optimizer, 8, before)
        model.eval()
        for seed in range(5):  # evaluation, and weights that are loaded
            backward(model, seed=seed)
            model.load_state_dict(network().state_dict())
        model.train()
        optimizer.zero_grad()
        self.train(model, optimizer, 8, before)
        optimizer.zero_grad()
        for seed in range(6):  # micro-batches
            backward(model, seed=seed)
        self.train(model, optimizer, 2, before)
        kfac.detach()
        self.train(model, optimizer, 8)

    def test_sharpness_aware_minimization(self):
        """The weights move, and move back, in each step."""
        model, optimizer, kfac = setup()
        for seed in range(6):
            backward(model, seed=seed)
            with torch.no_grad():
                moved = [0.05 * p.grad for p in model.parameters()]
                for p, m in zip(model.parameters(), moved, strict=True):
                    p.add_(m)
            optimizer.zero_grad()
            backward(model, seed=seed)
            with torch.no_grad():
                for p, m in zip(model.parameters(), moved, strict=True):
                    p.sub_(m)
            kfac.step()
            optimizer.step()
            optimizer.zero_grad()
