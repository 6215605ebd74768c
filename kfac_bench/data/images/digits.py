"""scikit-learn's handwritten digits: real data on every install, a demo without download."""

import torch
from torch.nn import functional

from kfac_bench.data.base.in_memory import LabelledImages
from kfac_bench.errors import UsageError

EVAL_SIZE = 450


def load(image_size: int = 8, normalize: bool = True) -> LabelledImages:
    """Return the 1797 digits, 1347 for training and 450 for evaluation, as [1, size, size].

    The stratified split is fixed and independent of any run's seed. Pixels are in [0, 1]
    (stored value / 16); another `image_size` than 8 is resized bilinearly, once. `normalize`
    subtracts the training mean and divides by the standard deviation at batch time; switch it
    off for reconstruction, whose error is meant in pixels. Raises UsageError on a size below 1.
    """
    # slow to import, and only this data set needs it
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    if image_size < 1:
        raise UsageError(f"image_size must be at least 1, got {image_size}")
    pixels, targets = load_digits(return_X_y=True)
    labels = torch.from_numpy(targets).long()
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16
    if image_size != 8:
        size = (image_size, image_size)
        images = functional.interpolate(images, size=size, mode="bilinear", antialias=True)
    chosen, held_out = train_test_split(
        range(len(labels)), test_size=EVAL_SIZE, stratify=targets, random_state=0
    )
    std, mean = torch.std_mean(images[chosen].double())
    return LabelledImages(
        "digits",
        (images[chosen], labels[chosen]),
        (images[held_out], labels[held_out]),
        num_classes=10,
        mean=[mean.item()] if normalize else None,
        std=[std.item()] if normalize else None,
    )
