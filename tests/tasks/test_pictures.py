"""Pictures of predictions: what is drawn, which examples, and what their captions say."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from kfac_bench.data.base.dataset import UNKNOWN, ImageDisplay
from kfac_bench.data.base.in_memory import LabelledImages
from kfac_bench.data.base.order import Shard
from kfac_bench.data.images import cifar, imagefolder
from kfac_bench.tasks import pictures
from kfac_bench.tasks.image_tasks import (
    PREDICTED,
    TRUE,
    Classification,
    Reconstruction,
    Segmentation,
)

IDENTITY = nn.Identity()
AS_IT_IS = ImageDisplay([0.0], [1.0])


class Says(nn.Module):
    """Gives the same output whatever its input is."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x):
        return self.output[: len(x)]


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_normalization_is_undone_exactly():
    stored = torch.from_numpy(pixels(4, 3, 5, 6))
    split = (stored, torch.zeros(4, dtype=torch.int64))
    data = LabelledImages("x", split, split, 10, mean=cifar.CIFAR10.mean, std=cifar.CIFAR10.std)
    [(images, _)] = map(data.prepare, data.evaluate(4, Shard()))
    for shown, original in zip(images, stored, strict=True):
        assert (pictures.to_rgb(shown, data.looks) == original.permute(1, 2, 0).numpy()).all()
    assert (pictures.to_rgb(stored[0], data.looks) == stored[0].permute(1, 2, 0).numpy()).all()


def test_an_image_folder_knows_its_normalization_and_its_classes(tmp_path):
    original = pixels(16, 16, 3)
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.fromarray(original).save(tmp_path / split / name / "a.png")
    data = imagefolder.load(tmp_path, image_size=14, workers=0)
    [(images, _)] = map(data.prepare, data.evaluate(2, Shard()))
    assert (pictures.to_rgb(images[1], data.looks) == original[1:15, 1:15]).all()
    assert list(data.looks.classes) == ["cat", "dog"]


def test_an_image_of_unknown_looks_goes_from_black_to_white():
    image = torch.tensor([[[-3.0, -1.0], [1.0, 0.0]]])
    shown = pictures.to_rgb(image, UNKNOWN)
    assert shown.dtype == np.uint8
    assert shown[..., 0].tolist() == [[0, 128], [255, 191]]
    assert (shown == shown[..., :1]).all()
    assert (pictures.to_rgb(torch.full((3, 2, 2), 7.0), UNKNOWN) == 0).all()
    assert pictures.to_rgb(torch.full((3, 2, 2), float("nan")), UNKNOWN).shape == (2, 2, 3)


def test_channels_become_red_green_and_blue_or_grey():
    x = torch.from_numpy(pixels(5, 2, 3))
    assert (pictures.to_rgb(x, UNKNOWN) == x[:3].permute(1, 2, 0).numpy()).all()
    for channels in (1, 2):
        assert (pictures.to_rgb(x[:channels], UNKNOWN) == x[0, :, :, None].numpy()).all()
    bright = torch.tensor([[[2.0, -1.0]]])
    assert pictures.to_rgb(bright, AS_IT_IS)[0, :, 0].tolist() == [255, 0]  # clipped


@pytest.mark.parametrize(
    ("size", "fitted"),
    [
        ((8, 8), (256, 256)),
        ((300, 200), (300, 200)),
        ((600, 1000), (307, 512)),
        ((1, 2000), (1, 512)),
    ],
)
def test_pictures_are_enlarged_or_reduced_to_a_visible_size(size, fitted):
    colours, mask = pixels(*size, 3), pixels(*size) % 2
    assert pictures.fit(colours).shape == (*fitted, 3)
    assert pictures.fit(mask).shape == fitted
    assert set(np.unique(pictures.fit(mask))) <= {0, 1}
    if size == (8, 8):
        assert (pictures.fit(colours)[::32, ::32] == colours).all()
        assert (pictures.fit(colours)[31::32, 31::32] == colours).all()


@pytest.mark.parametrize("width", [1, 2, 4])
def test_an_outline_is_the_inner_edge_of_a_mask(width):
    mask = np.zeros((20, 24), np.uint8)
    mask[3:18, 2:15] = 1
    mask[0:6, 10:24] = 255  # reaches the border, which has an outline too
    mask[9, 8] = 0
    picture = pixels(20, 24, 3) % 200
    drawn = pictures.outline(picture, mask, (255, 0, 201), width)
    for y, x in np.ndindex(mask.shape):
        near = [
            0 <= v < 20 and 0 <= u < 24 and mask[v, u] != 0
            for v in range(y - width, y + width + 1)
            for u in range(x - width, x + width + 1)
        ]
        edge = mask[y, x] != 0 and not all(near)
        assert drawn[y, x].tolist() == ([255, 0, 201] if edge else picture[y, x].tolist()), (y, x)


def test_classification_shows_confident_errors_first():
    p = torch.tensor([[0.9, 0.05, 0.05], [0.45, 0.5, 0.05], [0.1, 0.7, 0.2], [0.4, 0.35, 0.25]])
    labels = torch.tensor([0, 0, 2, 0])
    images = torch.from_numpy(pixels(4, 1, 2, 2))
    task = Classification(looks=ImageDisplay([0.0], [1.0], ["cat", "<b>", "cow"]))
    shown = task.show(Says(p.log()), (images, labels), 3)
    assert [x.caption for x in shown] == [
        "wrong: <b> (0.70), true: cow",
        "wrong: <b> (0.50), true: cat",
        "right: cat (0.40)",
    ]
    for example, i in zip(shown, (2, 1, 3), strict=True):
        assert (example.image[::128, ::128, 0] == images[i, 0].numpy()).all()
    nameless = Classification().show(Says(p.log()), (images, labels), 9)
    assert [x.caption for x in nameless][-1] == "right: 0 (0.90)"
    assert len(nameless) == 4


def test_reconstruction_shows_input_and_output_on_one_scale_the_largest_error_first():
    images = torch.from_numpy(pixels(3, 1, 2, 2)).float() / 255
    output = images + torch.tensor([0.0, 0.2, -0.1]).view(3, 1, 1, 1)
    shown = Reconstruction(AS_IT_IS).show(Says(output), (images, torch.zeros(3)), 2)
    assert [x.caption for x in shown] == [
        "squared error 0.16; input, output",
        "squared error 0.04; input, output",
    ]
    for example, i in zip(shown, (1, 2), strict=True):
        assert example.image.shape == (256, 256 + pictures.GAP + 256, 3)
        left, right = example.image[::128, :256:128, 0], example.image[::128, 260::128, 0]
        assert (left == np.rint(255 * images[i, 0].double().numpy())).all()
        assert (right == np.rint(255 * output[i, 0].double().clamp(0, 1).numpy())).all()


def test_segmentation_outlines_both_masks_and_shows_most_wrong_pixels_first():
    masks = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    masks[0, 0, 2:6, 2:6] = 1
    logits = torch.full((3, 1, 8, 8), -1.0)
    logits[0, 0, 2:6, 3:7] = 1.0  # 4 pixels missed, 4 too many
    logits[1, 0, 0, 0:2] = 1.0
    masks[2, 0, 0:6, 0:6] = 1  # the largest, all right
    logits[2, 0, 0:6, 0:6] = 1.0
    images = torch.zeros(3, 3, 8, 8)
    batch = (images, masks, torch.tensor([5, 0, 1]))
    shown = Segmentation(6).show(Says(logits), batch, 9)
    assert [x.caption for x in shown] == [
        "slice of volume 5: Dice 0.75; true yellow, predicted magenta",
        "slice of volume 0: Dice 0.00; true yellow, predicted magenta",
        "slice of volume 1: Dice 1.00; true yellow, predicted magenta",
    ]

    def where(picture, colour):
        rows, columns = np.nonzero((picture == colour).all(-1))
        return [int(x) // 32 for x in (rows.min(), rows.max(), columns.min(), columns.max())]

    assert where(shown[0].image, TRUE)[:3] == [2, 5, 2]
    assert where(shown[0].image, PREDICTED) == [2, 5, 3, 6]
    assert where(shown[1].image, PREDICTED) == [0, 0, 0, 1]
    assert where(shown[2].image, PREDICTED) == [0, 5, 0, 5]
    assert where(shown[2].image, TRUE) == [0, 5, 0, 5]  # wider: seen beneath
    assert (shown[2].image[16:176, 16:176] == 0).all()
