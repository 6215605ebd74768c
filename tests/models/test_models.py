import subprocess
import sys

import pytest
import torch
from torch import nn

from kfac_bench.errors import UsageError
from kfac_bench.models.image_networks import Autoencoder, BasicBlock, cifar_resnet
from kfac_bench.models.options import TorchvisionResNetConfig
from tests.support.quick import slow


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def seeded(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def check_resumable(make, x):
    first, again, other = seeded(make), seeded(make), make()
    assert torch.equal(first(x), again(x))
    assert not torch.equal(first(x), other(x))
    other.load_state_dict(first.state_dict())
    assert torch.equal(first.eval()(x), other.eval()(x))


def resnet_parameters(depth, classes, channels):
    """Section 4.2 of the paper, written as a sum over its table."""
    n = (depth - 2) // 6
    convolutions = 9 * channels * 16
    for before, width in ((16, 16), (16, 32), (32, 64)):
        convolutions += 9 * before * width + 9 * (2 * n - 1) * width**2
    normalisation = 2 * (16 * (2 * n + 1) + 32 * 2 * n + 64 * 2 * n)
    return convolutions + normalisation + 64 * classes + classes


@pytest.mark.parametrize(
    ("depth", "expected", "paper"),
    [
        (8, 75_290, None),
        (20, 269_722, 0.27),
        slow(32, 464_154, 0.46),
        slow(44, 658_586, 0.66),
        slow(56, 853_018, 0.85),
        slow(110, 1_727_962, 1.7),
    ],
)
def test_cifar_resnet_has_the_layers_and_parameters_of_the_paper(depth, expected, paper):
    with torch.device("meta"):
        model = cifar_resnet(depth)
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    assert all(p.is_meta for p in model.parameters())
    assert parameters(model) == expected == resnet_parameters(depth, 10, 3)
    if paper:
        assert float(f"{expected / 1e6:.2g}") == paper
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth  # no convolution hides in a shortcut


def test_cifar_resnet_takes_other_images_and_trains_every_parameter():
    model = cifar_resnet(8, num_classes=5, in_channels=1)
    assert parameters(model) == resnet_parameters(8, 5, 1)
    logits = model(torch.randn(3, 1, 9, 12))
    assert logits.shape == (3, 5)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    check_resumable(lambda: cifar_resnet(8), torch.randn(2, 3, 8, 8))


def test_cifar_resnet_is_initialised_after_he():
    model = seeded(lambda: cifar_resnet(20))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            assert module.bias is None
            expected = (2 / (9 * module.in_channels)) ** 0.5
            assert module.weight.std().item() == pytest.approx(expected, rel=0.12)
    assert model.fc.bias.abs().max() == 0


def test_shortcut_is_option_a():
    block = BasicBlock(2, 6, stride=2)
    nn.init.zeros_(block.bn2.weight)  # the residual is zero: what remains is the shortcut
    x = torch.rand(3, 2, 5, 4)
    out = block(x)
    assert out.shape == (3, 6, 3, 2)
    assert torch.equal(out[:, 2:4], x[:, :, ::2, ::2])
    assert out[:, :2].abs().sum() == out[:, 4:].abs().sum() == 0


@pytest.mark.parametrize("depth", [2, 9, 18, 48])
def test_other_depths_are_usage_errors(depth):
    with pytest.raises(UsageError, match=rf"6n \+ 2 .*{depth}"):
        cifar_resnet(depth)


def test_autoencoder_is_a_mirror_with_linear_code_and_output():
    model = Autoencoder(64, (128, 64, 32, 12))
    widths = [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]
    encoder = [(64, 128), (128, 64), (64, 32), (32, 12)]
    assert widths == encoder + [(b, a) for a, b in reversed(encoder)]
    assert sum(isinstance(m, nn.Tanh) for m in model.modules()) == 6
    assert isinstance(model.encoder[-1], nn.Linear)
    assert isinstance(model.decoder[-1], nn.Linear)
    x = torch.randn(5, 1, 8, 8)
    assert model(x).shape == x.shape
    check_resumable(lambda: Autoencoder(64, [7, 3]), x)
    with torch.device("meta"):
        assert Autoencoder(12, [4])(torch.empty(2, 3, 2, 2)).shape == (2, 3, 2, 2)


def test_autoencoder_computes_what_its_layers_say():
    model = Autoencoder(12, [5, 2], activation="relu")
    first, _, code = model.encoder
    wide, _, last = model.decoder
    x = torch.randn(4, 3, 2, 2)
    expected = last(wide(code(first(x.flatten(1)).clamp(min=0))).clamp(min=0)).view(4, 3, 2, 2)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("hidden", [[], [3, 0]])
def test_autoencoder_refuses_what_it_cannot_build(hidden):
    with pytest.raises(UsageError, match="positive"):
        Autoencoder(64, hidden)
    with pytest.raises(UsageError, match="tanh, relu, sigmoid"):
        Autoencoder(64, [3], activation="swish")


def torchvision_resnet(name, num_classes, channels):
    return TorchvisionResNetConfig(name).build((channels, 32, 32), num_classes, "classification")


@pytest.mark.parametrize(("name", "expected"), [("resnet18", 11_689_512), ("resnet50", 25_557_032)])
def test_torchvision_resnets(name, expected):
    with torch.device("meta"):
        assert parameters(torchvision_resnet(name, 1000, 3)) == expected
        model = torchvision_resnet(name, 7, 1)
        assert model(torch.empty(2, 1, 32, 32)).shape == (2, 7)
    assert model.conv1.bias is None
    assert model.conv1.stride == (2, 2)


def test_a_replaced_first_convolution_is_initialised_as_the_others():
    model = seeded(lambda: torchvision_resnet("resnet18", 10, 5))
    assert model.conv1.weight.std().item() == pytest.approx((2 / (49 * 64)) ** 0.5, rel=0.05)


def test_slow_imports_wait_until_they_are_needed():
    code = (
        "import sys, kfac_bench.models.options\n"
        "from kfac_bench.data.images import digits, pictures\n"
        "digits.load(), pictures.load()\n"
        "sys.exit(sum(name in sys.modules for name in ('torchvision', 'sklearn', 'skimage')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
