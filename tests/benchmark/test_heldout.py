"""The held-out tasks: each has a target, and K-FAC covers its weights."""

import pytest
import torch

from kfac_bench.config import compose
from kfac_bench.core.layers.coverage import find_layers
from kfac_bench.training.dry_run import trace

TASKS = {
    "fashion_autoencoder": (8, set()),
    "fashion_resnet": (8, {"BatchNorm2d"}),
    "patches_vit": (10, {"Embedding", "LayerNorm"}),
    "pydoc_lstm": (3, {"Embedding"}),
}
"""Layers that K-FAC covers, and the modules that the pinned ``kfac.skip`` leaves out."""


def test_these_are_all_tasks():
    folder = compose.CONF_DIR / "experiment" / "heldout"
    assert {p.stem for p in folder.glob("*.yaml")} >= TASKS.keys()


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_bounded_and_kfac_covers_its_layers(name):
    config = compose.load([f"experiment=heldout/{name}"])
    trainer = config.trainer
    assert (trainer.threads, trainer.eval_freq) == (1, 10)
    assert trainer.target is not None
    assert trainer.max_steps is not None
    with torch.device("meta"):
        model = config.model.build(*config.data.shape(), config.task.name)
    layers, skipped = find_layers(model, skip=config.kfac.skip)
    assert (len(layers), {s.kind for s in skipped}) == TASKS[name]
    found = trace(config)
    assert found.step_flops > found.forward_flops > 0


def test_the_autoencoder_is_the_classic_one():
    config = compose.load(["experiment=heldout/fashion_autoencoder"])
    with torch.device("meta"):
        model = config.model.build(*config.data.shape(), config.task.name)
    widths = [w.shape[1] for w in model.parameters() if w.ndim == 2]
    assert widths == [784, 1000, 500, 250, 30, 250, 500, 1000]
