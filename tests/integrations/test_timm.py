"""A loop with timm's NativeScaler, optimizers, schedulers and models."""

import pytest
import torch
import torch.nn.functional as F

from kfac_bench import KFAC
from tests.support.examples import run_example

timm = pytest.importorskip("timm")
from timm.optim import create_optimizer_v2  # noqa: E402
from timm.scheduler import create_scheduler_v2  # noqa: E402
from timm.utils import NativeScaler  # noqa: E402

OPTIONS = {"damping": 0.03, "update_freq": 4, "factor_update_freq": 2}


def vision_transformer():
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=12, depth=1, num_classes=3
    )


def batch(step):
    x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(step))
    return x, x.mean((2, 3)).argmax(1)


def train(opt, clip, scale):
    """Eight micro-batches, two per step; return the model and its K-FAC."""
    model = vision_transformer()
    optimizer = create_optimizer_v2(model, opt=opt, lr=0.01, weight_decay=0.05, momentum=0.9)
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=4, warmup_epochs=1, warmup_lr=1e-3)
    scaler = NativeScaler("cpu")
    scaler._scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
    kfac = KFAC(model, optimizer, **OPTIONS).attach(scaler._scaler)
    for step in range(8):
        x, y = batch(step)
        is_last = step % 2 == 1
        loss = F.cross_entropy(model(x), y) / 2
        scaler(
            loss,
            optimizer,
            clip_grad=clip,
            parameters=model.parameters(),
            need_update=is_last,
        )
        if is_last:
            optimizer.zero_grad()
            scheduler.step(step // 2 + 1)
    return model, kfac


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("opt", ["momentum", "lamb", "nadamw"])
def test_the_native_scaler_changes_nothing(opt, clip):
    (model, kfac), (want, without) = train(opt, clip, 2.0**10), train(opt, clip, 1.0)
    assert kfac.steps == without.steps == 4
    layers = without.state_dict()["layers"]
    for name, entry in kfac.state_dict()["layers"].items():
        torch.testing.assert_close(entry["G"]["factor"], layers[name]["G"]["factor"], msg=name)
    if opt == "momentum":  # Adam's first steps turn rounding of a zero gradient into an update
        for key, value in want.state_dict().items():
            torch.testing.assert_close(model.state_dict()[key], value, msg=key)


@pytest.mark.slow
def test_the_example_runs_and_learns(tmp_path, monkeypatch):
    variables = run_example("timm_training.py", tmp_path, monkeypatch)
    with torch.no_grad():
        assert F.cross_entropy(variables["model"](variables["images"]), variables["labels"]) < 0.6
