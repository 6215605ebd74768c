"""Dice loss and the Dice score of volumes, against numpy; runs on made-up slices."""

import numpy as np
import pytest
import torch
from torch import nn

from kfac_bench.data.base.order import Shard
from kfac_bench.data.demo import demo_images
from kfac_bench.data.images import lgg
from kfac_bench.errors import UsageError
from kfac_bench.record.events import Trained
from kfac_bench.tasks.image_tasks import Segmentation
from tests.support.distributed import run_ranks
from tests.support.runs import (
    before_step,
    end,
    evaluated,
    here,
    of_kind,
    terminate,
    train,
    trainer_of,
)

IDENTITY = nn.Identity()
UNET = (
    "model=unet",
    "model.width=2",
    "model.depth=2",
    "data.image_size=16",
    "data.workers=0",
    "data.eval_share=0.6",
    "trainer.batch_size=4",
    "logger=none",
    "trainer.threads=1",
    "optimizer=adam",
    "kfac.update_freq=4",
    "kfac.factor_update_freq=2",
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    root = tmp_path_factory.mktemp("lgg")
    demo_images.make_lgg(root, volumes=5, slices=5, size=16)
    return root


def some(n=6, size=4, share=0.3):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, 1, size, size, generator=generator)
    masks = (torch.rand(n, 1, size, size, generator=generator) < share).to(torch.uint8)
    masks[1:2] = 0
    return logits, masks


def by_hand(logits, masks, bce):
    """The loss, from the definition, image by image."""
    losses = []
    for x, t in zip(logits.double().numpy(), masks.double().numpy(), strict=True):
        p = 1 / (1 + np.exp(-x))
        dice = (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)
        losses.append(1 - dice - bce * (t * np.log(p) + (1 - t) * np.log(1 - p)).mean())
    return np.mean(losses)


@pytest.mark.parametrize("bce", [0.0, 0.5])
def test_the_loss_is_the_mean_over_images_of_their_losses(bce):
    logits, masks = some()
    task = Segmentation(bce=bce)
    loss, output = task.forward(IDENTITY, (logits, masks))
    assert loss.item() == pytest.approx(by_hand(logits, masks, bce), rel=1e-6)
    assert output is logits
    parts = [task.forward(IDENTITY, (logits[i], masks[i]))[0] for i in (slice(2), slice(2, 6))]
    assert loss.item() == pytest.approx((2 * parts[0] + 4 * parts[1]).item() / 6, rel=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        half = task.forward(IDENTITY, (logits.bfloat16(), masks))[0]
    assert half.dtype == torch.float32


def test_an_image_without_a_tumour_has_a_gradient():
    logits, masks = some()
    logits.requires_grad_()
    Segmentation(bce=0.0).forward(IDENTITY, (logits, masks))[0].backward()
    assert (logits.grad[1] > 0).all()


def test_the_cross_entropy_has_the_likelihood_and_its_scale():
    """Its Hessian, times the pixels it is a mean over, is the Fisher of independent pixels."""
    logits, masks = some(n=1, size=2)
    logits = logits.double()
    with_bce, without = Segmentation(bce=1.0), Segmentation(bce=0.0)

    def bce(x):
        batch = (x, masks)
        return with_bce.forward(IDENTITY, batch)[0] - without.forward(IDENTITY, batch)[0]

    hessian = torch.autograd.functional.hessian(bce, logits).view(4, 4)
    p = logits.sigmoid().flatten()
    torch.testing.assert_close(4 * hessian, torch.diag(p * (1 - p)))


def dice_by_hand(logits, masks, volumes, count):
    predicted, true = logits.numpy() > 0, masks.numpy() > 0
    scores = []
    for v in range(count):
        p, t = predicted[volumes.numpy() == v], true[volumes.numpy() == v]
        scores.append(2 * (p & t).sum() / (p.sum() + t.sum()) if p.any() or t.any() else 1.0)
    return np.mean(scores)


@pytest.mark.parametrize("size", [1, 4, 10])
def test_dice_is_a_mean_over_volumes_however_slices_are_batched(size):
    logits, masks = some(n=10)
    volumes = torch.tensor([0, 2, 0, 1, 1, 1, 2, 0, 3, 3])
    masks[8:], logits[8:] = 0, -1.0  # volume 3: nothing there, nothing found
    task = Segmentation(volumes=4)
    totals = torch.zeros(task.num_totals, dtype=torch.float64)
    for i in torch.randperm(10).split(size):
        totals += task.totals(IDENTITY, (logits[i], masks[i], volumes[i]))
    figures = task.metrics(totals)
    assert figures["dice"] == pytest.approx(dice_by_hand(logits, masks, volumes, 4), abs=1e-12)
    assert figures["loss"] == pytest.approx(by_hand(logits, masks, 1.0), rel=1e-6)
    of_slices = np.mean(
        [dice_by_hand(x, t, torch.zeros(1), 1) for x, t in zip(logits, masks, strict=True)]
    )
    assert abs(figures["dice"] - of_slices) > 0.02, "no mean over slices"
    assert totals[0] == 10


def test_a_false_detection_in_an_empty_volume_scores_0():
    task = Segmentation(volumes=1)
    batch = (torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), torch.zeros(1, dtype=torch.int64))
    assert task.metrics(task.totals(IDENTITY, batch))["dice"] == 0


def test_a_volume_of_which_no_slice_was_read_does_not_count():
    task = Segmentation(volumes=3)
    batch = (torch.ones(2, 1, 2, 2), torch.tensor([0, 1]).view(2, 1, 1, 1).expand(2, 1, 2, 2))
    totals = task.totals(IDENTITY, (*batch, torch.tensor([0, 2])))
    assert task.metrics(totals)["dice"] == 0.5


def test_logits_that_do_not_fit_the_masks_are_refused():
    with pytest.raises(UsageError, match="one logit per pixel"):
        Segmentation().forward(IDENTITY, (torch.zeros(2, 3, 4, 4), torch.zeros(2, 1, 4, 4)))


# ---- runs ----


def test_a_network_learns_the_demo(demo, tmp_path):
    more = ("trainer.max_steps=30", "optimizer.lr=0.01", "kfac=none")
    _, path = train(tmp_path, f"data.root={demo}", *more, "model.width=4", base=UNET)
    losses = [e.loss for e in of_kind(path, Trained)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_weights(demo, tmp_path):
    options = (f"data.root={demo}", "kfac=comm_opt", "trainer.max_steps=6")
    _, straight = train(tmp_path, *options, "run_id=straight", base=UNET)
    with before_step(3, terminate):  # of 2 steps an epoch: in the middle of one
        train(tmp_path, *options, "run_id=stopped", base=UNET)
    with before_step(5, terminate):
        train(tmp_path, *options, "run_id=stopped", base=UNET)
    _, path = train(tmp_path, *options, "run_id=stopped", base=UNET)
    assert end(path).weights_sha256 == end(straight).weights_sha256


def evaluate_here(root, folder):
    torch.manual_seed(0)
    options = (f"data.root={root}", "kfac=none")
    return evaluated(trainer_of(folder, *options, base=UNET, backend=here()))


@pytest.mark.ranks
def test_metrics_are_the_same_on_two_ranks_that_share_a_volume(demo, tmp_path):
    data = lgg.load(demo, 16, eval_share=0.6)
    first, second = (
        torch.cat([volumes for *_, volumes in data.evaluate(4, Shard(rank, 2))]) for rank in (0, 1)
    )
    assert first[-1] == second[0] == 1
    alone = evaluated(trainer_of(tmp_path, f"data.root={demo}", "kfac=none", base=UNET))
    for metrics in run_ranks(2, evaluate_here, demo, tmp_path):
        assert metrics["dice"] == alone["dice"]
        assert metrics["loss"] == pytest.approx(alone["loss"], rel=1e-6)
