"""Image classifiers of torchvision and timm: built by name, for images of any shape.

The options are in :mod:`.library_options`. Nothing is downloaded: weights start at random,
or come from a file that the user names.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_bench import randomness
from kfac_bench.config.groups import TABLES
from kfac_bench.errors import UsageError, one_line, shortage

if TYPE_CHECKING:
    from kfac_bench.models.library_options import ArchitectureConfig

Sides = tuple[int, int]
"""Height and width of an image."""


def build(config: ArchitectureConfig, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return the classifier, after it has classified one image.

    A hook before the forward pass repeats the channel of grey images and resizes images. So the
    names of the parameters stay those of the library.

    Args:
        config: The library, the architecture and the size of its images.
        shape: (C, H, W) of an image of the dataset.
        num_classes: Number of classes.

    Raises:
        UsageError: The architecture is unknown, or does not classify images of this shape.
    """
    name = str(config.architecture)
    _check_known(config, name)
    sides = (shape[1], shape[2]) if config.image_size is None else (config.image_size,) * 2
    channels = 3 if shape[0] == 1 else shape[0]
    make, _ = _LIBRARIES[config.name]
    try:
        with warnings.catch_warnings():
            # timm warns of architectures that have new names; they work.
            warnings.simplefilter("ignore")
            model = make(name, channels, sides, num_classes)
            resize = sides if config.image_size is not None else None
            model.register_forward_pre_hook(partial(_prepare, channels, resize))
            _try(model, shape, num_classes)
    except Exception as error:  # an architecture may raise any class for a wrong size
        if shortage(error):
            raise
        raise UsageError(
            f"model.architecture={name}: fails on images of {shape[0]} x {sides[0]} x {sides[1]} "
            f"({one_line(error)[:150]}). Its usual images have a side of "
            f"{usual_side(config)} pixels: set model.image_size or data.image_size to it"
        ) from None
    return model


def usual_side(config: ArchitectureConfig) -> int:
    """Return the side in pixels of the images that the architecture is usually trained on."""
    return _LIBRARIES[config.name][1](str(config.architecture))


def _check_known(config: ArchitectureConfig, name: str) -> None:
    """Raise :class:`UsageError`, with the nearest names, if the library lacks the architecture."""
    known = config.architectures()
    # A name of timm may name weights after a dot. Weights change nothing of the architecture.
    if name in known or (config.name == "timm" and name.partition(".")[0] in known):
        return
    for other, choice in TABLES["model"].items():
        if name in choice.architectures():
            raise UsageError(f"model.architecture={name}: it belongs to model={other}")
    near = difflib.get_close_matches(name, known, 5)
    raise UsageError(
        f"model.architecture={name}: {config.name} has no image classifier of this name"
        + (f"; did you mean {', '.join(near)}?" if near else f". {_LISTS[config.name]} lists them")
    )


def _make_torchvision(name: str, channels: int, sides: Sides, num_classes: int) -> nn.Module:
    import torchvision

    if channels != 3:
        raise UsageError(
            f"model.architecture={name}: torchvision's architectures read 1 or 3 channels, not "
            f"{channels}. Use model=timm, which has architectures for any number"
        )
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        # With auxiliary classifiers the output in training is a tuple of logits.
        options = {"aux_logits": False, "init_weights": True}
    elif name.startswith("vit_"):
        options = {"image_size": sides[0]}
    elif name.startswith("maxvit"):
        options = {"input_size": sides}
    model: nn.Module = torchvision.models.get_model(
        name, weights=None, num_classes=num_classes, **options
    )
    return model


def _make_timm(name: str, channels: int, sides: Sides, num_classes: int) -> nn.Module:
    import timm

    options: dict[str, Any] = {"num_classes": num_classes, "in_chans": channels}
    defaults = timm.get_pretrained_cfg(name)
    if defaults is not None and defaults.fixed_input_size:
        try:
            return timm.create_model(name, img_size=sides, **options)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
    return timm.create_model(name, **options)


def _usual_side_of_torchvision(name: str) -> int:
    import torchvision

    weights = list(torchvision.models.get_model_weights(name))
    return int(weights[0].transforms().crop_size[0]) if weights else 224


def _usual_side_of_timm(name: str) -> int:
    import timm

    defaults = timm.get_pretrained_cfg(name)
    return 224 if defaults is None else int(defaults.input_size[-1])


_LIBRARIES: Mapping[
    str, tuple[Callable[[str, int, Sides, int], nn.Module], Callable[[str], int]]
] = {
    "torchvision": (_make_torchvision, _usual_side_of_torchvision),
    "timm": (_make_timm, _usual_side_of_timm),
}
"""The function that makes an architecture and the usual side of its images, by library."""
_LISTS = {
    "torchvision": "torchvision.models.list_models(module=torchvision.models)",
    "timm": "timm.list_models()",
}


def _prepare(
    channels: int, sides: Sides | None, module: nn.Module, inputs: tuple[Tensor]
) -> tuple[Tensor]:
    """Return the images [n, C, H, W] with the channels and the sides of the architecture."""
    (images,) = inputs
    if images.shape[1] == 1:
        images = images.expand(-1, channels, -1, -1)
    if sides is not None:
        images = functional.interpolate(images, sides, mode="bilinear", antialias=True)
    return (images,)


def _try(model: nn.Module, shape: tuple[int, ...], num_classes: int) -> None:
    """Raise an error unless the model gives one image of zeros logits [1, num_classes]."""
    model.eval()
    with torch.no_grad(), randomness.preserve_rng():
        logits = model(torch.zeros(1, *shape))
    model.train()
    if not isinstance(logits, Tensor):
        raise TypeError(f"its output is a {type(logits).__name__}, not a tensor of logits")
    if logits.shape != (1, num_classes):
        raise ValueError(f"its output is {list(logits.shape)}, not logits [1, {num_classes}]")
