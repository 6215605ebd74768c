import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from kfac_bench.core.capture import fisher
from kfac_bench.data.base.in_memory import LabelledImages
from kfac_bench.data.base.order import Shard, eval_indices
from kfac_bench.errors import UsageError
from kfac_bench.tasks.image_tasks import Classification, Reconstruction
from kfac_bench.tasks.options import ClassificationConfig
from kfac_bench.tasks.task import reached

TASKS = [Classification(), Reconstruction()]


class Scale(nn.Module):
    """Multiplies its input by one parameter."""

    def __init__(self, value):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(value))

    def forward(self, x):
        return x * self.factor


def classified(count=11):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 1, 2, 3, generator=generator)
    return images, torch.randint(0, 4, (count,), generator=generator)


def classifier():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 4))


def model_for(task):
    return classifier() if isinstance(task, Classification) else Scale(0.5)


def test_accuracy_and_loss_are_exact():
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    batch = (logits, torch.tensor([0, 1, 0]))
    task = Classification()
    totals = task.totals(nn.Identity(), batch)
    losses = [math.log1p(math.exp(-2)), math.log1p(math.exp(-1)), math.log1p(math.exp(3))]
    assert totals.dtype == torch.float64
    assert totals.tolist() == pytest.approx([3, 2, sum(losses)], rel=1e-12)
    assert task.metrics(totals) == pytest.approx({"accuracy": 2 / 3, "loss": sum(losses) / 3})
    assert task.forward(nn.Identity(), batch)[0].item() == pytest.approx(sum(losses) / 3)
    assert task.metric == "accuracy"
    assert task.higher_is_better


def test_one_class_is_refused():
    images, labels = torch.zeros(3, 1, 2, 2), torch.zeros(3, dtype=torch.int64)
    data = LabelledImages("imagefolder", (images, labels), (images, labels), num_classes=1)
    with pytest.raises(UsageError, match="data=imagefolder has only one class"):
        ClassificationConfig("classification").build(data)


def test_smoothing_changes_the_training_loss_and_not_the_metric():
    batch, model = classified(), classifier()
    smooth = Classification(label_smoothing=0.1)
    log_p = model(batch[0]).log_softmax(dim=1)
    target = 0.9 * functional.one_hot(batch[1], 4) + 0.1 / 4
    loss, logits = smooth.forward(model, batch)
    torch.testing.assert_close(loss, -(target * log_p).sum(1).mean())
    assert torch.equal(logits, model(batch[0]))
    assert torch.equal(smooth.totals(model, batch), Classification().totals(model, batch))
    assert loss != Classification().forward(model, batch)[0]


def test_squared_error_is_summed_over_pixels_and_halved_in_the_loss_only():
    images = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(2, 1, 1, 2)
    task, model = Reconstruction(), Scale(0.5)
    batch = (images, torch.zeros(2, dtype=torch.int64))
    totals = task.totals(model, batch)
    assert totals.tolist() == [2, 7.5]  # (1 + 4 + 9 + 16) / 4
    assert totals.dtype == torch.float64
    assert task.metrics(totals) == {"squared_error": 3.75}
    loss, output = task.forward(model, batch)
    assert loss.item() == 1.875
    assert torch.equal(output, images / 2)
    loss.backward()
    assert model.factor.grad.item() == -7.5  # mean over examples of sum of x (x/2 - x)
    assert task.metric == "squared_error"
    assert not task.higher_is_better


def test_reconstruction_refuses_an_output_that_would_broadcast():
    batch = (torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(UsageError, match=r"\[2, 1, 4, 4\], not \[2, 1, 4, 1\]"):
        Reconstruction().forward(lambda x: x[..., :1], batch)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("world", [1, 2, 3, 16])
def test_metrics_are_exact_on_uneven_shards(task, world):
    images, labels = classified()
    model = model_for(task)
    totals = torch.zeros(task.num_totals, dtype=torch.float64)
    for rank in range(world):
        for i in eval_indices(len(labels), 4, Shard(rank, world)):
            totals += task.totals(model, (images[i], labels[i]))
    assert totals[0] == len(labels)
    figures = task.metrics(totals)
    assert figures == pytest.approx(task.metrics(task.totals(model, (images, labels))), rel=1e-6)
    if isinstance(task, Classification):
        assert figures["accuracy"] == (model(images).argmax(1) == labels).sum().item() / 11
    else:
        error = (model(images) - images).square().flatten(1).sum(1).mean()
        assert figures["squared_error"] == pytest.approx(error.item(), rel=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_the_loss_is_a_mean_and_totals_record_no_gradient(task):
    batch, model = classified(), model_for(task)
    twice = tuple(torch.cat([part, part]) for part in batch)
    loss, output = task.forward(model, batch)
    torch.testing.assert_close(loss, task.forward(model, twice)[0])
    assert loss.requires_grad
    assert output.requires_grad
    assert not task.totals(model, batch).requires_grad
    assert task.metric in task.metrics(task.totals(model, batch))


@pytest.mark.parametrize("task", TASKS)
def test_the_loss_is_float32_under_autocast(task):
    batch, model = classified(), model_for(task)
    with torch.autocast("cpu", torch.bfloat16):
        assert task.forward(model, batch)[0].dtype == torch.float32


HESSIANS = {
    "categorical": lambda output: (
        torch.diag_embed(output.softmax(1))
        - output.softmax(1).unsqueeze(2) * output.softmax(1).unsqueeze(1)
    ),
    "gaussian": lambda output: torch.eye(output[0].numel()).expand(len(output), -1, -1),
}


@pytest.mark.parametrize("task", [*TASKS, Classification(label_smoothing=0.3)])
def test_the_loss_is_the_negative_log_likelihood(task):
    """Its Hessian in the output is the likelihood's Fisher, as the core scales it."""
    batch, model = classified(), model_for(task)
    output = task.forward(model, batch)[1].detach()

    def loss(x):
        return task.forward(lambda images: x, batch)[0]

    n, size = len(output), output[0].numel()
    hessian = torch.autograd.functional.hessian(loss, output).reshape(n, size, n, size)
    blocks = hessian[range(n), :, range(n)]
    torch.testing.assert_close(n * blocks, HESSIANS[task.likelihood](output))
    made, count = fisher.seeds(output, "type2", task.likelihood)
    seeds = torch.stack([s.flatten(1) for s in made]) / count
    torch.testing.assert_close(n * torch.einsum("sni,snj->nij", seeds, seeds), blocks)


def test_reached_knows_the_direction_and_nan_never_reaches():
    up, down = TASKS
    assert reached(up, 0.97, 0.97)
    assert reached(up, 0.98, 0.97)
    assert not reached(up, 0.96, 0.97)
    assert reached(down, 0.4, 0.4)
    assert reached(down, 0.3, 0.4)
    assert not reached(down, 0.5, 0.4)
    assert not any(reached(task, math.nan, 0.4) for task in TASKS)
