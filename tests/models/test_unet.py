"""The U-Net: its shapes, and K-FAC on all of it against the dense oracle."""

import pytest
import torch
from torch import nn

from kfac_bench.core import KFAC
from kfac_bench.errors import UsageError
from kfac_bench.models.image_networks import UNet
from kfac_bench.tasks.image_tasks import Segmentation
from tests.models.test_models import check_resumable, parameters
from tests.support.layer_checks import check

pytestmark = pytest.mark.usefixtures("double")


def parameters_of(width, depth, channels, classes):
    """Written as a sum over levels: two 3x3 convolutions and two norms, 1x1 between."""
    widths = [width * 2**i for i in range(depth + 1)]
    total = sum(9 * a * b + 9 * b * b + 4 * b for a, b in zip([channels, *widths], widths))  # noqa: B905
    total += sum(2 * w * w + w + 9 * 2 * w * w + 9 * w * w + 4 * w for w in widths[:-1])
    return total + width * classes + classes


@pytest.mark.parametrize(("width", "depth", "channels", "classes"), [(32, 4, 3, 1), (4, 1, 2, 5)])
def test_shapes_and_parameters(width, depth, channels, classes):
    with torch.device("meta"):
        model = UNet(channels, classes, width, depth)
        x = torch.empty(2, channels, 16, 48)
        assert model(x).shape == (2, classes, 16, 48)
    assert all(p.is_meta for p in model.parameters())
    assert parameters(model) == parameters_of(width, depth, channels, classes)


def test_every_level_sees_its_own_size_and_every_weight_is_trained():
    model, sizes = UNet(3, 1, width=2, depth=3), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda m, x, y, n=name: sizes.update({n: y.shape[2]}))
    model(torch.randn(2, 3, 16, 16)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert [sizes[f"down.{i}.3"] for i in range(3)] == [16, 8, 4]
    assert sizes["bottom.3"] == 2
    assert [sizes[f"halve.{i}"] for i in range(3)] == [2, 4, 8]
    assert [sizes[f"up.{i}.3"] for i in range(3)] == [4, 8, 16]
    check_resumable(lambda: UNet(3, 1, 2, 2), torch.randn(2, 3, 8, 8))


def test_skip_connections_join_levels_of_the_same_size():
    """A pixel matters to its own logit even where the bottom is cut off."""
    model = UNet(1, 1, width=2, depth=2).eval()
    with torch.no_grad():
        for halve in model.halve:
            halve.weight.zero_()
    x = torch.randn(1, 1, 8, 8)
    bumped = x.clone()
    bumped[0, 0, 2, 2] += 1
    changed = (model(x) != model(bumped)).nonzero()[:, 2:]
    assert len(changed)
    assert changed.float().sub(2).abs().max() <= 4  # the reach of four 3x3 convolutions


@pytest.mark.parametrize("shape", [(18, 16), (16, 20)])
def test_a_size_that_cannot_be_halved_is_refused(shape):
    with pytest.raises(UsageError, match=rf"{shape[0]} x {shape[1]}, must be multiples of 8"):
        UNet(1, 1, 2, depth=3)(torch.zeros(1, 1, *shape))
    with pytest.raises(UsageError, match="at least 1"):
        UNet(1, 1, 2, depth=0)


@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_kfac_on_every_convolution_equals_the_oracle(method):
    model = UNet(2, 1, width=2, depth=2)
    x = torch.randn(5, 2, 8, 8)
    masks = (torch.rand(5, 1, 8, 8) < 0.3).to(torch.uint8)
    task = Segmentation()
    kfac = check(
        model,
        lambda: task.forward(model, (x, masks))[0],
        kinds=nn.Conv2d,
        method=method,
        skip=["Norm"],
    )
    assert {x.kind for x in kfac.report().skipped} == {"BatchNorm2d"}


def test_kfac_takes_the_fisher_of_independent_pixels():
    """ "type2" on a convolution alone, where a pixel's logit is linear in the weights: exact."""
    model = nn.Conv2d(2, 1, 1, bias=False)
    kfac = KFAC(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        fisher="type2",
        update_freq=1,
        factor_update_freq=1,
        kl_clip=None,
    )
    x, masks = torch.randn(3, 2, 2, 2), torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
    task = Segmentation()
    loss, logits = task.forward(model, (x, masks))
    kfac.fisher_backward(logits, task.likelihood)
    loss.backward()
    kfac.step()
    p = logits.detach().sigmoid()
    (layer,) = kfac.state_dict()["layers"].values()
    want = (p * (1 - p)).sum() / 3  # a sum over pixels, mean over images
    torch.testing.assert_close(layer["G"]["factor"].flatten(), want.view(1))
    kfac.detach()
