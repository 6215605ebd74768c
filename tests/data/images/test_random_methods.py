"""RandAugment, TrivialAugment and mixup: functions of seed, epoch and image or step alone."""

import pytest
import torch
from torch.nn import functional

from kfac_bench.data.base.in_memory import LabelledImages
from kfac_bench.data.base.order import Shard
from kfac_bench.data.folder_options import ImageFolderConfig
from kfac_bench.data.images import cifar
from kfac_bench.data.images.random_methods import METHODS, Mixup, RandomMethod
from kfac_bench.tasks.image_tasks import Classification
from tests.support.runs import write_pictures


def batch_of(n, classes=3):
    generator = torch.Generator().manual_seed(n)
    images = torch.rand(n, 2, 4, 4, generator=generator)
    return images, torch.arange(n) % classes


@pytest.mark.parametrize("name", METHODS)
def test_a_change_depends_on_its_seed_alone(name):
    image = torch.randint(256, (3, 16, 16), dtype=torch.uint8)
    method, state = RandomMethod(name), torch.get_rng_state()
    changed = [method(image, seed) for seed in range(20)]
    assert torch.equal(torch.get_rng_state(), state), "the global generator moved"
    torch.manual_seed(5)
    assert all(torch.equal(method(image, seed), changed[seed]) for seed in (3, 0))
    assert len({x.numpy().tobytes() for x in changed}) > 5
    assert {(x.shape, x.dtype) for x in changed} == {(image.shape, image.dtype)}


def training_images(data, batch_size, shards, epoch=1, start=0):
    """Return the images of an epoch in the order of the whole batches."""
    parts = [data.train(batch_size, 3, epoch, start, shard) for shard in shards]
    return torch.cat([torch.cat([b[0] for b in batches]) for batches in zip(*parts, strict=True)])


def opened(kind, root, auto_augment):
    if kind == "imagefolder":
        if not (root / "train").exists():
            write_pictures(root, train=16, val=2)
        options = {"image_size": 8, "auto_augment": auto_augment}
        return ImageFolderConfig(name=kind, root=str(root), **options).build("classification")
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (18, 3, 32, 32), dtype=torch.uint8, generator=generator)
    train, evaluation = ((x, torch.zeros(len(x)).long()) for x in (pixels[:16], pixels[16:]))
    augment = cifar.augmentation(auto_augment or True)
    return LabelledImages(kind, train, evaluation, num_classes=2, augment=augment)


@pytest.mark.parametrize("kind", ["cifar10", "imagefolder"])
def test_images_are_the_same_on_any_number_of_ranks_and_after_a_resume(tmp_path, kind):
    data, plain = (opened(kind, tmp_path, name) for name in ("trivialaugment", None))
    whole = training_images(data, 8, [Shard()])
    assert torch.equal(whole[8:], training_images(data, 8, [Shard()], start=1))
    parts = training_images(data, 8, [Shard(0, 2), Shard(1, 2)])
    assert torch.equal(whole, parts)
    cropped = training_images(plain, 8, [Shard()])
    assert (whole != cropped).flatten(1).any(1).float().mean() > 0.5
    assert torch.equal(*(next(each.evaluate(2, Shard()))[0] for each in (data, plain)))


def test_mixup_equals_a_mean_of_images_and_of_losses():
    images, labels = batch_of(6)
    mixed, shares = Mixup(1.0, 3, seed=0)((images, labels), 4)
    share = shares[0, labels[0]].item()
    assert 0 < share < 1
    rolled = images.roll(1, 0)
    torch.testing.assert_close(mixed, share * images + (1 - share) * rolled)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32, 3))
    loss, logits = Classification().forward(model, (mixed, shares))
    own, other = (functional.cross_entropy(logits, y) for y in (labels, labels.roll(1)))
    torch.testing.assert_close(loss, share * own + (1 - share) * other)


def test_the_share_of_a_step_is_one_number_on_all_ranks():
    mixup, state = Mixup(0.5, 3, seed=0), torch.get_rng_state()
    pair = torch.eye(3)[:2][:, None, None]  # two images whose mean shows the share

    def share(step, mixup=mixup):
        images, _ = mixup((pair.clone(), torch.tensor([0, 1])), step)
        return images[0, 0, 0, 0].item()

    shares = [share(step) for step in range(5)]
    assert [Mixup(0.5, 3, seed=0)((pair.clone(), torch.tensor([0, 1])), 2)[0][0, 0, 0, 0]] == [
        pytest.approx(shares[2])
    ]
    assert len(set(shares)) == 5
    assert share(2, Mixup(0.5, 3, seed=1)) != shares[2]
    assert torch.equal(torch.get_rng_state(), state), "the global generator moved"


def test_an_empty_batch_stays_empty():
    images, labels = batch_of(6)
    empty = Mixup(0.5, 3, seed=0)((images[:0], labels[:0]), 1)
    assert [len(x) for x in empty] == [0, 0]
