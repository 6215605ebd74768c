"""The vision transformer: which pixels it sees and makes, and K-FAC against the dense oracle."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from kfac_bench.errors import UsageError
from kfac_bench.models.options import ViTConfig
from kfac_bench.models.token_networks import VisionTransformer
from kfac_bench.record.events import Evaluated
from kfac_bench.tasks.image_tasks import Classification, Denoising
from tests.models.test_models import check_resumable, parameters
from tests.support.layer_checks import check
from tests.support.runs import of_kind, train


def small(classes=5, shape=(2, 4, 6)):
    model = VisionTransformer(shape, classes, patch=2, width=8, layers=2, heads=2)
    for module in model.modules():
        # Weights of 0.02 make attention nearly uniform and gradients tiny.
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)
    return model


def test_shapes_and_parameters():
    with torch.device("meta"):
        for task, shape in (("classification", (2, 13)), ("denoising", (2, 1, 16, 16))):
            model = ViTConfig("vit").build((1, 16, 16), 13, task)
            assert model(torch.empty(2, 1, 16, 16)).shape == shape
            block = 4 * 64 + 3 * 64 * 65 + 64 * 65 + 256 * 65 + 64 * 257
            outputs = 13 if task == "classification" else 16
            assert parameters(model) == 64 * 17 + 16 * 64 + 2 * block + 2 * 64 + 65 * outputs
    check_resumable(small, torch.randn(3, 2, 4, 6))


def test_weights_are_drawn_as_those_of_the_language_model():
    model = VisionTransformer((3, 32, 32), 10, 4, 64, 2, 4)
    stds = {"patches": 0.02, "blocks.0.qkv": 0.02, "blocks.1.out": 0.01, "blocks.1.down": 0.01}
    for name, std in stds.items():
        module = model.get_submodule(name)
        assert module.weight.std().item() == pytest.approx(std, rel=0.1)
        assert not module.bias.any()


def test_every_patch_matters_and_only_positions_tell_their_order():
    model, x = small(), torch.randn(1, 2, 4, 6)
    mixed = torch.cat([x[..., 4:], x[..., :4]], dim=3)  # the three columns of patches, turned
    assert (model(x) - model(mixed)).abs().max() > 1e-3
    nn.init.zeros_(model.positions.weight)
    torch.testing.assert_close(model(x), model(mixed))
    model(x).square().sum().backward()
    bare = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not bare


def test_each_token_makes_the_pixels_of_its_own_patch():
    model = small(classes=None)
    for block in model.blocks:
        for layer in (block.out, block.down):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    x = torch.randn(1, 2, 4, 6)
    bumped = x.clone()
    bumped[0, 1, 3, 2] += 1
    changed = (model(x) != model(bumped)).any(1)[0]
    inside = torch.zeros(4, 6, dtype=torch.bool)
    inside[2:4, 2:4] = True
    assert torch.equal(changed, inside)
    nn.init.zeros_(model.head.weight)
    with torch.no_grad():
        model.head.bias.copy_(torch.arange(8.0))
    assert torch.equal(model(x)[0], torch.arange(8.0).view(2, 2, 2).repeat(1, 2, 3))


def test_attention_looks_in_both_directions():
    model = small(classes=None)
    x = torch.randn(1, 2, 4, 6)
    for pixel, other in (((0, 0), (3, 5)), ((3, 5), (0, 0))):
        bumped = x.clone()
        bumped[0, :, *pixel] += 1
        assert (model(x) - model(bumped))[0, :, *other].abs().max() > 1e-4


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match=r"model.patch=4 must divide the sides .* 28 x 30"):
        VisionTransformer((1, 28, 30), 10, 4, 64, 2, 4)
    with pytest.raises(UsageError, match=r"model.width=64 must be a multiple of model.heads=5"):
        VisionTransformer((1, 28, 28), 10, 4, 64, 2, 5)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("method", "classes"), [("eigen", 5), ("inverse", None)])
def test_kfac_on_every_linear_map_equals_the_oracle(method, classes):
    model, x = small(classes), torch.randn(3, 2, 4, 6)
    if classes is None:
        task, targets = Denoising(48), functional.avg_pool2d(x, 3, 1, 1)
    else:
        task, targets = Classification(), torch.tensor([0, 4, 2])
    kfac = check(
        model,
        lambda: task.forward(model, (x, targets))[0],
        kinds=nn.Linear | nn.Conv2d,
        method=method,
        skip=["Norm", "Embedding"],
    )
    assert {s.kind for s in kfac.report().skipped} == {"LayerNorm", "Embedding"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "metric"),
    [
        (("model=vit", "data=patches", "trainer.batch_size=128"), "accuracy"),
        (("model=vit", "task=denoising", "data=pictures", "data.image_size=8"), "psnr"),
    ],
)
def test_a_few_steps_with_kfac(tmp_path, overrides, metric):
    size = ("model.width=16", "model.layers=1")
    kfac = ("kfac.fisher=mc", "kfac.method=inverse", "kfac.damping=0.03", "optimizer.lr=0.05")
    short = ("logger=none", "trainer.threads=1", "trainer.max_steps=20", "trainer.eval_freq=20")
    status, path = train(tmp_path, base=(*overrides, *size, *kfac, *short))
    first, last = (e.metrics[metric] for e in of_kind(path, Evaluated))
    assert status == "finished"
    assert last > first + (0.1 if metric == "accuracy" else 1)
