"""The LGG layout: order of slices, split, augmentation, and files that cannot be read."""

import math
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from kfac_bench import cli
from kfac_bench.config import compose
from kfac_bench.data.base.order import Shard, epoch_order, keyed_generator
from kfac_bench.data.demo import demo_images
from kfac_bench.data.images import lgg
from kfac_bench.errors import UsageError
from tests.data.base.test_data import ALONE, equal
from tests.support.runs import train
from tests.tasks.test_segmentation import UNET

SIZE, VOLUMES, SLICES = 16, 5, 11


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("lgg")
    demo_images.make_lgg(root, VOLUMES, SLICES, SIZE)
    return root


@pytest.fixture
def root(made, tmp_path):
    return shutil.copytree(made, tmp_path / "lgg")


def files(root):
    return sorted(root.glob("kaggle_3m/*/*.tif"))


def pixels_of(data, seed=0):
    """All evaluation images, masks and volumes."""
    return [torch.cat(part) for part in zip(*data.evaluate(7, ALONE), strict=True)]


def test_slices_are_in_order_with_their_masks_and_normalized_by_volume(made):
    data = lgg.load(made, SIZE, eval_share=0.4, augment=False)
    assert (data.shape, data.num_classes, data.eval_volumes) == ((3, SIZE, SIZE), 1, 2)
    assert (data.train_size, data.eval_size) == (3 * SLICES, 2 * SLICES)
    images, masks, volumes = pixels_of(data)
    assert (images.dtype, masks.dtype, masks.shape[1:]) == (
        torch.float32,
        torch.uint8,
        (1, SIZE, SIZE),
    )
    assert volumes.tolist() == [0] * SLICES + [1] * SLICES
    names = [v.name for v in data._evaluation]
    assert names == sorted(names)
    for number, name in enumerate(names):
        raw, inside = (
            np.stack(
                [
                    np.array(Image.open(made / "kaggle_3m" / name / f"{name}_{i}{end}.tif"))
                    for i in range(1, SLICES + 1)  # by number: 10 after 9
                ]
            )
            for end in ("", "_mask")
        )
        x = raw.transpose(0, 3, 1, 2) / 255
        want = (x - x.mean((0, 2, 3), keepdims=True)) / x.std((0, 2, 3), keepdims=True)
        np.testing.assert_allclose(images[volumes == number], want, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(masks[volumes == number][:, 0], inside > 0)
    assert masks.max() == 1


def test_slices_with_the_same_number_have_the_same_order_in_every_process(tmp_path):
    folder = tmp_path / "kaggle_3m" / "TCGA_DEMO_1_1"
    folder.mkdir(parents=True)
    names = [f"{letter}_1" for letter in "abcdefg"]
    for name in names:
        Image.new("RGB", (8, 8)).save(folder / f"{name}.tif")
        Image.new("L", (8, 8)).save(folder / f"{name}_mask.tif")
    assert [image.stem for image, _ in lgg.scan(tmp_path)[0][0].slices] == names


def test_the_split_is_by_patient_and_stable(root):
    folder = next(p for p in (root / "kaggle_3m").iterdir())
    again = folder.with_name(folder.name[:-8] + "20110101")  # the same patient, later
    again.mkdir()
    for path in folder.iterdir():
        shutil.copy(path, again / path.name.replace(folder.name, again.name))
    names = {}
    for share in (0.2, 0.4, 0.6):
        data = lgg.load(root, SIZE, eval_share=share)
        names[share] = {v.patient for v in data._evaluation}
        assert not names[share] & {v.patient for v in data._train}
        assert len(names[share]) == round(share * VOLUMES)
    assert names[0.2] < names[0.4] < names[0.6]
    assert names[0.4] == {"TCGA_DEMO_1002", "TCGA_DEMO_1004"}


def test_batches_do_not_depend_on_workers_start_or_sharding(made):
    here, there = lgg.load(made, SIZE), lgg.load(made, SIZE, workers=2)
    full = list(here.train(8, 5, 1, 0, ALONE))
    assert [len(batch) for batch in full] == [2] * len(full)
    assert equal(full, there.train(8, 5, 1, 0, ALONE))
    assert equal(full[2:], here.train(8, 5, 1, 2, ALONE))
    parts = [list(here.train(8, 5, 1, 0, Shard(rank, 2))) for rank in range(2)]
    joined = [tuple(map(torch.cat, zip(*pair, strict=True))) for pair in zip(*parts, strict=True)]
    assert equal(full, joined)
    rest = [list(here.train(43, 5, 1, 0, Shard(r, 2), drop_last=False))[-1] for r in (0, 1)]
    assert [[len(x) for x in part] for part in rest] == [[0, 0], [1, 1]]
    assert [x.shape[1:] for x in rest[0]] == [x.shape[1:] for x in rest[1]]
    assert [x.dtype for x in rest[0]] == [x.dtype for x in rest[1]]
    state = torch.get_rng_state()
    assert not equal(full, here.train(8, 6, 1, 0, ALONE))
    assert not equal(full, here.train(8, 5, 2, 0, ALONE))
    assert torch.equal(state, torch.get_rng_state())


def test_each_epoch_augments_a_slice_differently_and_evaluation_does_not(made):
    plain, data = (lgg.load(made, SIZE, augment=augment) for augment in (False, True))
    size, seen = data.train_size, []
    for epoch in range(2):
        images, _ = next(data.train(size, 0, epoch, 0, ALONE))
        seen.append(images[epoch_order(size, 0, epoch) == 5])
    assert not torch.equal(*seen)
    assert equal(plain.evaluate(5, ALONE), data.evaluate(5, ALONE))
    order = epoch_order(size, 0, 0)
    images, masks = next(plain.train(size, 0, 0, 0, ALONE))
    again, masks_again = next(plain.train(size, 0, 1, 0, ALONE))
    assert torch.equal(images[order == 5], again[epoch_order(size, 0, 1) == 5])
    assert torch.equal(masks[order == 5], masks_again[epoch_order(size, 0, 1) == 5])


def test_image_and_mask_are_turned_together_and_half_are_mirrored():
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, 65)] * 2, indexing="ij")
    blob = ((x - 0.5) ** 2 + y**2 < 0.02).float()[None]
    angles, areas, mirrored = [], [], 0
    for i in range(60):
        image, mask = lgg.turn_and_flip(blob, blob.clone(), keyed_generator(i))
        assert torch.equal(image, mask)
        centre = complex((mask[0] * x).sum() / mask.sum(), (mask[0] * y).sum() / mask.sum())
        mirrored += centre.real < 0
        angles.append(math.degrees(math.atan2(centre.imag, abs(centre.real))))
        areas.append((mask.sum() / blob.sum()).item())
        assert abs(centre) == pytest.approx(0.5, rel=0.07)
    assert 18 <= mirrored <= 42
    assert 10 < max(angles) < 15.5
    assert -15.5 < min(angles) < -10
    assert 0.86 < min(areas) < 0.96
    assert 1.04 < max(areas) < 1.14


def test_a_slice_of_another_size_is_resized_with_its_mask(made):
    small, large = (pixels_of(lgg.load(made, size, eval_share=0.4)) for size in (SIZE, 4 * SIZE))
    assert large[0].shape[1:] == (3, 64, 64)
    assert set(large[1].unique().tolist()) == {0, 1}
    back = torch.nn.functional.avg_pool2d(large[1].float(), 4) >= 0.5
    assert (back != small[1].bool()).sum() < 0.15 * small[1].sum()


@pytest.mark.parametrize("place", ["lgg-mri-segmentation/kaggle_3m", "."])
def test_root_may_be_the_archive_folder_or_the_folder_of_volumes(root, place, tmp_path):
    other = tmp_path / "other"
    (other / place).parent.mkdir(parents=True, exist_ok=True)
    shutil.move(root / "kaggle_3m", other / place)
    assert lgg.load(other, SIZE).train_size == 4 * SLICES


# ---- what cannot be read ----


def cut(path):
    path.write_bytes(path.read_bytes()[:-300])


def spoil(path, mode, size=(SIZE, SIZE), value=0):
    Image.new(mode, size, value).save(path)


FAULTS = {
    "cut": (lambda image, mask: cut(image), "image", "truncated|read"),
    "text": (lambda image, mask: mask.write_bytes(b"no image"), "mask", "is no image"),
    "empty": (lambda image, mask: image.write_bytes(b""), "image", "is no image"),
    "no mask": (lambda image, mask: mask.unlink(), "image", "there is no .*_3_mask.tif"),
    "no slice": (lambda image, mask: image.unlink(), "mask", "neither a slice"),
    "another size": (lambda image, mask: spoil(mask, "L", (8, 16)), "mask", "8 x 16 .* 16 x 16"),
    "grey": (lambda image, mask: spoil(image, "L"), "image", "mode is L, not RGB"),
    "0 and 1": (lambda image, mask: spoil(mask, "L", value=1), "mask", "0 or 255"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_slice_is_fatal_or_left_out_and_reported(root, fault):
    whole = lgg.load(root, SIZE)
    assert not whole.faults.new
    volume = whole._train[1]
    image = root / "kaggle_3m" / volume.name / f"{volume.name}_3.tif"
    paths = {"image": image, "mask": image.with_name(f"{image.stem}_mask.tif")}
    spoil_it, named, reason = FAULTS[fault]
    spoil_it(*paths.values())
    with pytest.raises(UsageError, match=rf"{paths[named]}: .*{reason}.*on_error=skip") as caught:
        lgg.load(root, SIZE)
    assert "\n" not in str(caught.value)
    data = lgg.load(root, SIZE, on_error="skip")
    assert data.train_size == whole.train_size - 1
    assert data.eval_size == whole.eval_size
    assert [fault.path for fault in data.faults.new] == [str(paths[named])]
    assert re.search(reason, data.faults.new[0].reason)
    assert all(image not in pair for v in data._train for pair in v.slices)
    assert len(list(data.train(4, 0, 0, 0, ALONE))) == data.train_size // 4


def test_a_truncated_file_is_reported_as_unreadable(root):
    image = next(p for p in files(root) if not p.stem.endswith("mask"))
    whole, mask = image.read_bytes(), image.with_name(f"{image.stem}_mask.tif")
    for length in range(0, len(whole), 13):
        image.write_bytes(whole[:length])
        assert isinstance(lgg._read(image, mask), lgg.Unreadable), length


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_disappears_during_a_run_is_named(root, workers):
    data = lgg.load(root, SIZE, workers)
    for path in files(root):
        path.unlink()
    with pytest.raises(UsageError, match=r"TCGA_.*tif cannot be read: .*No such file"):
        next(data.train(4, 0, 0, 0, ALONE))


def test_many_faults_are_counted(root):
    for path in files(root):
        if path.stem.endswith("mask") and "_1000_" in path.name:
            path.unlink()
    for path in files(root):
        if path.stem.endswith("mask") and "_1001_" in path.name:
            cut(path)
    data = lgg.load(root, SIZE, on_error="skip")
    assert len(data.faults.take()) == 2 * SLICES
    assert not data.faults.new
    with pytest.raises(
        UsageError,
        match=r"22 bad files or entries in .* \(and 10 more like this\);.* \(and 10 more",
    ):
        lgg.load(root, SIZE)


def test_wrong_folders_are_named(root, tmp_path):
    with pytest.raises(UsageError, match=r"nowhere: expected .*nowhere/kaggle_3m/TCGA_"):
        lgg.load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="workers"):
        lgg.load(root, workers=-1)
    for folder in sorted((root / "kaggle_3m").iterdir())[1:]:
        shutil.rmtree(folder)
    with pytest.raises(UsageError, match="but both need one"):
        lgg.load(root, SIZE)
    empty = root / "kaggle_3m" / "TCGA_DEMO_0_0"
    empty.mkdir()
    with pytest.raises(UsageError, match=rf"{empty}: the volume has no slices"):
        lgg.load(root, SIZE)


# ---- the demo, and the command line ----


def test_the_demo_is_reproducible_and_not_overwritten(made, tmp_path):
    demo_images.make_lgg(tmp_path, VOLUMES, SLICES, SIZE)
    for one, two in zip(files(made), files(tmp_path), strict=True):
        assert one.read_bytes() == two.read_bytes()
    with pytest.raises(UsageError, match="has volumes already"):
        demo_images.make_lgg(tmp_path)
    demo_images.make_lgg(tmp_path / "other", VOLUMES, SLICES, SIZE, seed=1)
    assert any(
        one.read_bytes() != two.read_bytes()
        for one, two in zip(files(made), files(tmp_path / "other"), strict=True)
    )


def test_demo_tumours_are_inside_the_head_and_many_slices_have_none():
    generator = np.random.default_rng(0)
    images, masks = demo_images.make_volume(generator, 16, 48, tumour=True)
    with_tumour = (masks > 0).any((1, 2))
    assert 4 <= with_tumour.sum() <= 12
    inside = images[masks > 0].mean(0)
    head = images[(masks == 0) & (images.sum(-1) > 90)].mean(0)
    assert inside[1] > head[1] + 10  # brighter, in the second channel
    assert images[masks > 0].sum(1).min() > 30
    _, none = demo_images.make_volume(generator, 16, 48, tumour=False)
    assert not none.any()


def test_skipped_slices_are_named_on_the_console(root, tmp_path, capsys):
    image = files(root)[0]
    cut(image)
    options = (f"data.root={root}", "kfac=none", "trainer.max_steps=1")
    train(tmp_path, *options, "data.on_error=skip", base=UNET)
    said = capsys.readouterr().out.replace("\n", "")
    assert f"left out: {image}" in said
    with pytest.raises(UsageError, match=image.name):
        train(tmp_path, *options, base=UNET)


@pytest.mark.parametrize(
    "overrides", [["model=unet", "data=digits"], ["data=lgg"], ["task=segmentation"]]
)
def test_unet_lgg_and_segmentation_fit_together(overrides):
    with pytest.raises(UsageError, match="does not fit task="):
        compose.load(overrides)
    assert compose.load(["model=unet"]).task.name == "segmentation"


def test_a_dry_run_needs_no_data(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.train([*UNET, "dry_run=true"])
    assert not caught.value.code
    said = capsys.readouterr().out
    assert "unet on lgg [3, 16, 16]" in said
    assert "K-FAC covers 13 layers" in said
