"""The embedded tasks: real data without a download, from Python's reference and scikit-image."""

import math
import re
import socket

import numpy as np
import pytest
import torch
from torch import nn

from kfac_bench.config import compose
from kfac_bench.core.layers.coverage import find_layers
from kfac_bench.data.base.dataset import ImageDisplay
from kfac_bench.data.base.order import Shard
from kfac_bench.data.images import digits, pictures
from kfac_bench.data.language import pydoc
from kfac_bench.data.options import PydocConfig
from kfac_bench.errors import UsageError
from kfac_bench.models.token_networks import Transformer
from kfac_bench.record.events import Evaluated
from kfac_bench.tasks.image_tasks import Denoising
from kfac_bench.tasks.language_tasks import LanguageModel
from kfac_bench.training.dry_run import trace
from tests.support.runs import of_kind, train

# ---- text ----


def test_text_survives_encoding_and_decoding():
    text = "The if statement\n  x = {1: '~'}\n"
    symbols = pydoc.encode(text)
    assert symbols.dtype == torch.uint8
    assert symbols.max() < pydoc.SYMBOLS == PydocConfig.num_classes
    assert pydoc.decode(symbols) == text
    assert pydoc.decode(pydoc.encode("é\t\x00")) == "?  "


def test_windows_of_the_python_reference():
    data = pydoc.load(32)
    assert (data.shape, data.num_classes, data.eval_size) == ((32,), 96, 512)
    assert data.train_size > 5_000
    x, y = data.prepare(next(data.train(16, 0, 0, 0, Shard())))
    assert x.shape == y.shape == (16, 32)
    assert x.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1]), "targets are not what follows"
    text = " ".join(pydoc.decode(row) for row in x)
    assert sum(text.count(word) for word in ("the", "is", "of", "a ")) > 5, "no English"


def test_held_out_topics_are_not_trained_on():
    data = pydoc.load(64)
    train_rows = {bytes(row.numpy().tobytes()) for row in data._train[0]}
    held_out = {bytes(row.numpy().tobytes()) for row in data._evaluation[0]}
    assert len(held_out) > 500
    assert len(train_rows & held_out) <= 0.02 * len(held_out)  # a phrase may stand in two topics


def largest_allowed(error):
    """Return the number that the message tells the user to set."""
    return int(re.search(r"to (\d+) or less$", str(error.value))[1])


def test_a_window_longer_than_the_text_is_refused():
    with pytest.raises(UsageError, match=r"data.sequence_length=1000000: no topic") as error:
        pydoc.load(1_000_000)
    most = largest_allowed(error)
    assert pydoc.load(most).train_size > 0
    with pytest.raises(UsageError):
        pydoc.load(most + 1)


# ---- pictures ----


def test_noisy_patches_of_installed_pictures(monkeypatch):
    def no_network(*_):
        raise AssertionError("asked the network for a picture")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    data = pictures.load(16, 0.1)
    assert (data.shape, data.num_classes, data.eval_size) == ((1, 16, 16), 1, 256)
    assert data.train_size > 5_000
    noisy, clean = data.prepare(next(data.evaluate(256, Shard())))
    assert noisy.shape == clean.shape == (256, 1, 16, 16)
    pixels = clean * pictures.STD + pictures.MEAN
    assert 0 <= pixels.min() < 0.1
    assert 0.9 < pixels.max() <= 1.0001
    noise = (noisy - clean) * pictures.STD
    assert noise.std().item() == pytest.approx(0.1, rel=0.02)
    assert noise.mean().item() == pytest.approx(0, abs=0.002)
    again = pictures.load(16, 0.1).prepare(next(data.evaluate(256, Shard())))
    assert torch.equal(again[0], noisy)


def test_pictures_held_out_are_not_trained_on():
    assert not set(pictures.TRAIN) & set(pictures.HELD_OUT)
    patch = pictures._patches("camera.png", 16)[37]
    assert any(torch.equal(patch, p) for p in pictures.load(16)._train[1])
    assert not any(torch.equal(patch, p) for p in pictures.load(16)._evaluation[1])


def test_a_patch_larger_than_the_pictures_is_refused():
    with pytest.raises(UsageError, match=r"data.image_size=5000: scikit-image's pictures") as error:
        pictures.load(5000)
    most = largest_allowed(error)
    assert pictures.load(most).train_size > 0
    with pytest.raises(UsageError):
        pictures.load(most + 1)


def test_without_scikit_image_the_error_names_the_package(monkeypatch):
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install '.\[pictures\]'"):
        pictures.load()


# ---- the transformer ----


def small_transformer():
    torch.manual_seed(0)
    return Transformer(symbols=11, length=8, width=12, layers=2, heads=3)


def test_no_position_sees_what_follows_it():
    model, x = small_transformer(), torch.randint(11, (2, 8))
    changed = x.clone()
    changed[:, 5] = (x[:, 5] + 1) % 11
    before, after = model(x), model(changed)
    assert before.shape == (2, 8, 11)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert all((before[:, i] - after[:, i]).abs().max() > 1e-6 for i in (5, 6, 7))


def test_kfac_covers_every_linear_layer_of_the_transformer():
    model = small_transformer()
    layers, skipped = find_layers(model)
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert [layer.name for layer in layers] == linear
    assert len(linear) == 2 * 4 + 1
    assert {s.kind for s in skipped} == {"Embedding", "LayerNorm"}


def test_heads_must_divide_the_width():
    with pytest.raises(UsageError, match=r"model.width=12 must be a multiple of model.heads=5"):
        Transformer(11, 8, 12, 1, 5)


# ---- figures ----


class Fixed(nn.Module):
    """A model whose output does not depend on its input."""

    def __init__(self, output):
        super().__init__()
        self.output = nn.Parameter(output)

    def forward(self, x):
        return self.output


def test_a_constant_model_has_the_loss_of_uniform_guessing():
    batch = torch.zeros(3, 4, dtype=torch.int64), torch.arange(12).view(3, 4)
    task, model = LanguageModel(), Fixed(torch.zeros(3, 4, 96))
    assert task.forward(model, batch)[0].item() == pytest.approx(math.log(96))
    assert task.metrics(task.totals(model, batch))["loss"] == pytest.approx(math.log(96))
    sure = 100 * nn.functional.one_hot(batch[1], 96).float()
    sure[0, 0] = 0
    found = task.metrics(task.totals(Fixed(sure), batch))
    assert found["loss"] == pytest.approx(math.log(96) / 12)
    assert found["accuracy"] == pytest.approx(1.0)  # 0 of equals is the first, which is right
    [worst] = task.show(Fixed(sure), batch, 1)
    assert "loss 1.14" in worst.caption


def test_psnr_is_computed_for_pixels_from_0_to_1():
    """An error of 0.1 everywhere is 20 dB, for any normalization of the images."""
    clean = torch.rand(2, 1, 4, 4)
    for std in (1.0, 0.25):
        task = Denoising(16, ImageDisplay([0.5], [std]))
        batch = (clean, (clean - 0.5) / std)
        model = Fixed(batch[1] + 0.1 / std)
        assert task.metrics(task.totals(model, batch))["psnr"] == pytest.approx(20, abs=1e-3)
        assert task.forward(model, batch)[0].item() == pytest.approx(0.5 * (0.1 / std) ** 2)
        assert "PSNR 20.0 dB" in task.show(model, batch, 1)[0].caption
    with pytest.raises(UsageError, match="shape of the clean image"):
        task.forward(Fixed(torch.zeros(2, 2, 4, 4)), batch)


def test_psnr_of_an_output_that_is_not_finite_reaches_no_target():
    psnr = [Denoising(4).metrics(torch.tensor([4.0, e]))["psnr"] for e in (0, math.inf, math.nan)]
    assert psnr == pytest.approx([math.inf, -math.inf, math.nan], nan_ok=True)


def test_the_curvature_of_denoising_is_the_hessian_of_its_loss():
    task, clean = Denoising(6), torch.rand(1, 1, 2, 3)

    def loss(output):
        return 0.5 * (output - clean).square().mean()

    model = Fixed(torch.rand(1, 1, 2, 3))
    assert task.forward(model, (clean, clean))[0] == loss(model.output)
    hessian = torch.autograd.functional.hessian(loss, model.output.detach()).view(6, 6)
    torch.testing.assert_close(hessian, task.curvature * torch.eye(6))


# ---- runs ----

MC = ("kfac.fisher=mc", "kfac.method=inverse", "kfac.damping=0.03", "optimizer.lr=0.05")


@pytest.mark.parametrize(
    ("experiment", "overrides", "better"),
    [
        (
            "embedded/pydoc_transformer",
            ("model.width=16", "model.layers=1", "data.sequence_length=16"),
            lambda start, end: end < start - 0.3,
        ),
        (
            "embedded/pictures_unet",
            ("model.width=2", "model.depth=1", "data.image_size=8"),
            lambda start, end: end > start + 1,
        ),
    ],
)
def test_a_few_steps_with_kfac_and_the_sampled_fisher(tmp_path, experiment, overrides, better):
    short = ("logger=none", "trainer.max_steps=20", "trainer.eval_freq=20")
    base = (f"experiment={experiment}", *overrides, *MC, *short)
    status, path = train(tmp_path, base=base)
    first, last = (e.metrics for e in of_kind(path, Evaluated))
    metric = "loss" if "loss" in first else "psnr"
    assert status == "finished"
    assert better(first[metric], last[metric])
    captions = next((path / "predictions").rglob("captions.txt")).read_text()
    assert ("guessed: " if metric == "loss" else "dB; noisy, output, clean") in captions


@pytest.mark.parametrize("experiment", ["embedded/pydoc_transformer", "embedded/pictures_unet"])
def test_a_dry_run_accepts_the_embedded_experiments(experiment):
    config = compose.load([f"experiment={experiment}"])
    found = trace(config)
    assert found.parameters > 10_000
    assert found.step_flops > found.forward_flops > 0


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (("model=transformer", "data=digits"), "data=digits does not fit task=language_model"),
        (
            ("model=resnet8", "data=pictures"),
            "data=pictures is for task=denoising, with model=unet",
        ),
        (("model=unet", "data=pictures"), "data=pictures does not fit task=segmentation"),
        (("model=transformer", "task=denoising"), "does not fit"),
    ],
)
def test_options_that_contradict_each_other_are_refused(overrides, fragment):
    with pytest.raises(UsageError, match=fragment):
        compose.load(list(overrides))


def test_grey_is_the_luma_of_red_green_and_blue():
    import skimage.data

    rgb = skimage.data.astronaut()[:16, :16].astype(np.float64)
    grey = (0.299 * rgb[..., 0] + 0.587 * rgb[..., 1] + 0.114 * rgb[..., 2]) / 255
    got = pictures._patches("astronaut.png", 16)[0, 0].double().numpy()
    np.testing.assert_allclose(got, grey, atol=1e-6)
