"""COCO's layout: reading, refusing and leaving out entries, and the samples of an epoch."""

import copy
import json
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image
from pycocotools import mask as pycocotools_mask

from kfac_bench.data.base.dataset import fingerprint
from kfac_bench.data.base.order import Shard
from kfac_bench.data.demo import demo_images
from kfac_bench.data.images import coco_annotations, coco_dataset, coco_masks
from kfac_bench.errors import UsageError
from tests.cli.test_kfac_data import run


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    root = tmp_path_factory.mktemp("coco") / "demo"
    demo_images.make_coco(root, train=44, val=11, size=64)
    return root


def opened(root, **options):
    return coco_dataset.load(root, **{"image_size": 64, "max_size": 80, **options})


# ---- annotation files ----

TINY = {
    "images": [
        {"id": 7, "file_name": "a.png", "height": 6, "width": 8},
        {"id": 2, "file_name": "b.png", "height": 5, "width": 5},
        {"id": 9, "file_name": "c.png", "height": 5, "width": 5},
    ],
    "annotations": [
        {
            "id": 1,
            "image_id": 7,
            "category_id": 11,
            "bbox": [1, 1, 4, 3],
            "area": 12.0,
            "iscrowd": 0,
            "segmentation": [[1, 1, 5, 1, 5, 4, 1, 4]],
        },
        {
            "id": 2,
            "image_id": 7,
            "category_id": 4,
            "bbox": [0, 0, 2, 6],
            "area": 12,
            "iscrowd": 1,
            "segmentation": {"size": [6, 8], "counts": [0, 12, 36]},
        },
        {
            "id": 3,
            "image_id": 2,
            "category_id": 4,
            "bbox": [3, 3, 2.5, 2],
            "area": 4,
            "segmentation": [[3, 3, 5, 3, 5, 5, 3, 5]],
        },
        {
            "id": 4,
            "image_id": 9,
            "category_id": 4,
            "bbox": [0, 0, 5, 5],
            "area": 25,
            "iscrowd": 1,
            "segmentation": {"size": [5, 5], "counts": [0, 25]},
        },
    ],
    "categories": [{"id": 11, "name": "cat"}, {"id": 4, "name": "dog"}],
}


def write(root, train=TINY, val=TINY, year=2017):
    """Write a folder with these annotations and the images of TINY."""
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    for split, content in (("train", train), ("val", val)):
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        file = root / "annotations" / f"instances_{split}{year}.json"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        folder = root / f"{split}{year}"
        folder.mkdir(exist_ok=True)
        for number, image in enumerate(TINY["images"]):
            pixels = np.arange(image["height"] * image["width"] * 3) % 200 + number
            pixels = pixels.reshape(image["height"], image["width"], 3).astype(np.uint8)
            Image.fromarray(pixels).save(folder / image["file_name"])
    return root


def changed(**tables):
    """Return TINY with changed entries; annotations=(0, {"bbox": ...}) drops the key bbox."""
    content = copy.deepcopy(TINY)
    for table, (number, change) in tables.items():
        entry = content[table][number] | change
        content[table][number] = {k: v for k, v in entry.items() if v is not ...}
    return content


def test_labels_follow_the_category_ids_and_training_leaves_out_crowds(tmp_path):
    data = opened(write(tmp_path), augment=False)
    assert data.looks.classes == ("nothing", "dog", "cat")
    assert data.num_classes == 3
    assert (data.train_size, data.eval_size) == (2, 3)
    assert data.notes == [
        f"1 images of {tmp_path}/annotations/instances_train2017.json have no objects to learn "
        "from: left out",
    ]
    assert [p.id for p in data.truth] == [2, 7, 9]
    assert [(x.label, x.crowd, x.area) for x in data.truth[1].instances] == [
        (2, False, 12.0),
        (1, True, 12.0),
    ]
    batches = list(data.train(1, 0, 0, 0, Shard()))
    seen = {
        int(t["image_id"]): (i, t)
        for images, targets in batches
        for i, t in zip(images, targets, strict=True)
    }
    assert set(seen) == {2, 7}
    image, target = seen[7]
    assert image.shape == (3, 60, 80)  # the longer side limits: 6 x 8 times 10
    assert target["labels"].tolist() == [2]
    torch.testing.assert_close(target["boxes"], torch.tensor([[10.0, 10, 50, 40]]))
    true = torch.zeros(1, 6, 8, dtype=torch.uint8)
    true[:, 1:4, 1:5] = 1
    big = true.repeat_interleave(10, 1).repeat_interleave(10, 2)
    assert torch.equal(target["masks"], big)
    _, target = seen[2]
    torch.testing.assert_close(target["boxes"], torch.tensor([[3.0, 3, 5, 5]]) * 64 / 5)  # clipped


def test_a_name_that_is_no_unicode_text_has_a_fingerprint(tmp_path):
    """JSON may contain halves of characters."""
    odd = changed(categories=(0, {"name": "\ud800"}))
    assert fingerprint(opened(write(tmp_path, odd, odd)))["eval"]["examples"] == 3


def test_evaluation_images_keep_their_size(tmp_path):
    data = opened(write(tmp_path))
    batches = list(data.evaluate(1000, Shard()))
    assert [len(images) for images, _ in batches] == [1, 1, 1]
    for (images, targets), picture in zip(batches, data.truth, strict=True):
        assert int(targets[0]["image_id"]) == picture.id
        on_disk = np.asarray(Image.open(picture.path)).transpose(2, 0, 1)
        assert np.array_equal((images[0] * 255).round().byte().numpy(), on_disk)


def test_a_photo_is_turned_unless_its_annotations_have_the_size_of_the_stored_pixels(tmp_path):
    data = opened(write(tmp_path))
    path = data.truth[1].path  # 8 x 6 pixels
    stored = np.arange(48 * 3, dtype=np.uint8).reshape(8, 6, 3)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    as_annotated = stored.reshape(6, 8, 3)
    for pixels, expected in ((stored, np.rot90(stored, -1)), (as_annotated, as_annotated)):
        Image.fromarray(pixels).save(path, exif=exif)
        [image] = [i[0] for i, t in data.evaluate(2, Shard()) if int(t[0]["image_id"]) == 7]
        assert np.array_equal((image * 255).round().byte().permute(1, 2, 0), expected)


FAULTS = [
    ({"annotations": (0, {"bbox": ...})}, "annotation 1: its box is missing, not four"),
    ({"annotations": (0, {"bbox": [1, 1, 4]})}, "annotation 1: its box is [1, 1, 4], not"),
    ({"annotations": (0, {"bbox": [1, 1, 4, True]})}, "its box is [1, 1, 4, True], not four"),
    ({"annotations": (0, {"bbox": [1, 1, 4, 10**400]})}, "annotation 1: its box is [1, 1, 4"),
    ({"annotations": (0, {"bbox": [1, 1, 4, 0.0]})}, "annotation 1: its box has no area inside"),
    ({"annotations": (0, {"bbox": [8, 1, 4, 3]})}, "annotation 1: its box has no area inside"),
    ({"annotations": (0, {"area": 0})}, "annotation 1: its area is 0, not a number above 0"),
    ({"annotations": (0, {"area": "12"})}, "annotation 1: its area is '12', not a number"),
    ({"annotations": (0, {"image_id": 8})}, "annotation 1: its image 8 is unknown"),
    ({"annotations": (0, {"category_id": [4]})}, "annotation 1: its category [4] is unknown"),
    ({"annotations": (0, {"iscrowd": 2})}, "annotation 1: iscrowd is 2, neither 0 nor 1"),
    ({"annotations": (0, {"segmentation": ...})}, "annotation 1: it has no segmentation"),
    ({"annotations": (0, {"segmentation": []})}, "annotation 1: it has no segmentation"),
    ({"annotations": (0, {"segmentation": [[1, 1, 2, 2]]})}, "a polygon needs three points"),
    ({"annotations": (0, {"segmentation": [[1, 1, 2, 2, 3, 1e9]]})}, "far outside"),
    ({"annotations": (0, {"segmentation": [[1, 1, 2, 2, 3, "3"]]})}, "not a number"),
    ({"annotations": (1, {"segmentation": {"size": [8, 6], "counts": [48]}})}, "another size"),
    ({"annotations": (1, {"segmentation": {"size": [6, 8], "counts": [50]}})}, "do not add up"),
    ({"annotations": (1, {"segmentation": {"size": [6, 8], "counts": [49, -1]}})}, "not a list of"),
    ({"annotations": (1, {"segmentation": {"size": [6, 8], "counts": "a\x7f"}})}, "damaged"),
    ({"images": (1, {"height": 0})}, "image 2: its height is 0 and its width 5"),
    ({"images": (1, {"width": 10**9})}, "its width 1000000000, not numbers of"),
    ({"images": (1, {"file_name": "../train2017/a.png"})}, "image 2: there is no file"),
    ({"images": (1, {"file_name": "gone.png"})}, "image 2: there is no file 'gone.png' in"),
    ({"images": (1, {"id": 7})}, "image 7: another image has the id 7, too"),
    (
        {"images": (1, {"id": 1.5})},
        "image number 1 (without an id): its id is 1.5, not a whole number",
    ),
]


@pytest.mark.parametrize(("change", "said"), FAULTS)
def test_an_entry_with_errors_is_fatal_or_left_out_and_reported(tmp_path, change, said):
    write(tmp_path, train=changed(**change))
    with pytest.raises(UsageError) as refused:
        opened(tmp_path)
    assert said in str(refused.value)
    assert "data.on_error=skip" in str(refused.value)
    data = opened(tmp_path, on_error="skip")
    assert any(said in f"{fault.path}: {fault.reason}" for fault in data.faults.new)
    for images, targets in data.train(1, 0, 0, 0, Shard()):
        assert len(images) == len(targets) == 1
        assert all(len(targets[0][k]) for k in ("boxes", "labels", "masks"))


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON: "),
        (b"\xff\xfe\x00", "is not JSON"),
        ("[]", "it is a list, not an object"),
        (
            '{"images": [], "annotations": [3], "categories": []}',
            "annotations[0] is a int, and not",
        ),
        (TINY | {"categories": []}, "the list 'categories' is empty"),
        (TINY | {"categories": TINY["categories"] * 2}, "[2]: an earlier category has its id 11"),
        (changed(categories=(1, {"id": "4"})), "categories[1]: its id is '4', not a whole number"),
        (changed(categories=(0, {"name": ...})), "categories[0]: its name is missing, not a text"),
        ({"images": [], "classes": []}, "objects 'annotations'. Keys: 'images', 'classes'"),
        (
            TINY | {"categories": [{"id": 4, "name": "dog"}, {"id": 11, "name": "x"}]},
            "different cat",
        ),
        (
            TINY | {"annotations": []},
            "train2017.json has no image with objects to learn from: it has ",
        ),
        (
            TINY | {"annotations": [a | {"iscrowd": 1} for a in TINY["annotations"]]},
            "all 4 annotations are crowds",
        ),
        (
            TINY
            | {"annotations": [a | {"category_id": 90 + a["id"]} for a in TINY["annotations"]]},
            "annotation 1: its category 91 is unknown (and 3 more like this)",
        ),
    ],
)
def test_an_invalid_annotation_file_is_refused(tmp_path, train, said):
    write(tmp_path, train=train)
    with pytest.raises(UsageError) as refused:
        opened(tmp_path, on_error="skip")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_folders_and_ambiguous_years_are_refused(tmp_path):
    with pytest.raises(UsageError, match="COCO's layout is annotations/instances_"):
        opened(tmp_path)
    write(tmp_path, year=2014)
    assert opened(tmp_path).train_size == 2
    (tmp_path / "annotations" / "instances_valminusminival2014.json").write_text("other")
    write(tmp_path, year=2017)
    with pytest.raises(UsageError, match=r"has train of 2014, 2017: set data\.year"):
        opened(tmp_path)
    counts, faults = coco_dataset.scan(tmp_path)
    assert [*counts] == ["train of 2014", "train of 2017", "val of 2014", "val of 2017"]
    assert faults == []
    assert opened(tmp_path, year=2014).truth[0].path.parent.name == "val2014"
    with pytest.raises(UsageError, match="instances_train2015"):
        opened(tmp_path, year=2015)
    with pytest.raises(UsageError, match=r"data\.max_size=80"):
        opened(tmp_path, year=2014, min_sizes=[81])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)
PLACES = [
    (table, number, key)
    for table in TINY
    for number, entry in enumerate(TINY[table])
    for key in entry
]


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(changes=st.lists(st.tuples(st.sampled_from(PLACES), JSON), min_size=1, max_size=3))
def test_any_value_in_a_file_is_read_or_refused_in_one_line(tmp_path, changes):
    content = copy.deepcopy(TINY)
    for (table, number, key), value in changes:
        content[table][number][key] = value
    write(tmp_path, train=content)
    said = ""
    try:
        data = opened(tmp_path, on_error="skip")
        list(data.train(1, 0, 0, 0, Shard()))
    except UsageError as error:
        said = str(error)
    assert "\n" not in said


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=30) | st.text(alphabet=[chr(48 + i) for i in range(64)], max_size=20))
def test_compressed_run_lengths_are_read_or_refused(text):
    text = text if isinstance(text, str) else text.decode("latin1")
    try:
        coco_masks.read({"size": [6, 8], "counts": text}, 6, 8)
    except coco_masks.BadMaskError:
        return
    raw = {"size": [6, 8], "counts": text.encode()}
    assert pycocotools_mask.area(raw) <= 48


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_a_mask_is_the_same_in_every_notation(height, width, seed):
    masks = (np.random.default_rng(seed).random((3, height, width)) < 0.4).astype(np.uint8)
    rles = coco_masks.encode(masks)
    assert np.array_equal(coco_masks.decode(rles, height, width), masks)
    for mask, rle in zip(masks, rles, strict=True):
        compressed = {"size": [height, width], "counts": rle["counts"].decode()}
        plain = demo_images._run_lengths(mask.astype(bool))
        for notation in (compressed, plain):
            again = coco_masks.read(notation, height, width)
            assert np.array_equal(coco_masks.decode([again], height, width)[0], mask)


# ---- samples ----


def flat(batch):
    images, targets = batch
    return images + [t[k] for t in targets for k in sorted(t)]


def same(one, two):
    pairs = zip(flat(one), flat(two), strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def images_by_id(batches):
    return {
        int(target["image_id"]): image
        for images, targets in batches
        for image, target in zip(images, targets, strict=True)
    }


SIZES = {"min_sizes": [48, 56, 64]}


def test_a_sample_depends_on_seed_epoch_and_index_alone(demo):
    data = opened(demo, **SIZES)
    alone = list(data.train(6, 1, 2, 0, Shard()))
    state = torch.get_rng_state()
    again = list(opened(demo, workers=2, **SIZES).train(6, 1, 2, 3, Shard()))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(again) == len(alone) - 3
    assert all(same(a, b) for a, b in zip(alone[3:], again, strict=True))
    ranks = [list(data.train(6, 1, 2, 0, Shard(rank, 4))) for rank in range(4)]
    for step, batch in enumerate(alone):
        parts = [rank[step] for rank in ranks]
        together = [[x for part in parts for x in part[i]] for i in (0, 1)]
        assert same(batch, together)
    by_id = images_by_id(alone)
    # If the draws ignored the index, all images of an epoch would get the same shorter side.
    shorter = [min(image.shape[1:]) for image in by_id.values()]
    assert max(shorter) - min(shorter) > 8
    for seed, epoch in [(1, 3), (2, 2)]:
        other = images_by_id(data.train(6, seed, epoch, 0, Shard()))
        both = by_id.keys() & other.keys()
        assert sum(not torch.equal(by_id[i], other[i]) for i in both) > len(both) / 2


def test_sizes_are_drawn_and_half_of_the_images_are_mirrored(demo):
    data, plain = (opened(demo, max_size=90, augment=a, **SIZES) for a in (True, False))
    shorter, mirrored = [], []
    for epoch in range(3):
        for one, two in zip(
            data.train(4, 0, epoch, 0, Shard()), plain.train(4, 0, epoch, 0, Shard()), strict=True
        ):
            for image, target, other, true in zip(*one, *two, strict=True):
                shorter.append(min(image.shape[1:]))
                mirrored.append(not torch.equal(image, other))
                if mirrored[-1]:
                    assert torch.equal(image.flip(2), other)
                    assert torch.equal(target["masks"].flip(2), true["masks"])
                    x1, y1, x2, y2 = true["boxes"].unbind(1)
                    w = image.shape[2]
                    back = torch.stack([w - x2, y1, w - x1, y2], 1)
                    torch.testing.assert_close(target["boxes"], back)
    of_size = [{n, n - 1} for n in SIZES["min_sizes"]]  # 49 * (56 / 49) is below 56 in floats
    counts = [sum(n in sizes for n in shorter) / len(shorter) for sizes in of_size]
    assert all(0.15 < share < 0.55 for share in counts)
    assert sum(counts) == pytest.approx(1)
    assert 0.3 < sum(mirrored) / len(mirrored) < 0.7


def test_boxes_enclose_their_masks(demo):
    images, targets = next(opened(demo, **SIZES).train(30, 0, 0, 0, Shard()))
    for target in targets:
        for box, mask in zip(target["boxes"], target["masks"], strict=True):
            rows, columns = (mask.any(axis).nonzero().flatten() for axis in (1, 0))
            around = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            assert max(abs(float(a - b)) for a, b in zip(around, box, strict=True)) <= 2.1
    assert all(i.min() >= 0 and i.max() <= 1 for i in images)


def test_a_damaged_image_is_reported_when_it_is_read(tmp_path, demo):
    write(tmp_path)
    (tmp_path / "train2017" / "a.png").write_bytes(b"\x89PNG no more")
    for workers in (0, 1):
        with pytest.raises(UsageError, match=r"a\.png cannot be read"):
            list(opened(tmp_path, workers=workers).train(2, 0, 0, 0, Shard()))
    for workers in (0, 1):
        data = opened(tmp_path, workers=workers, on_error="skip")
        batches = list(data.train(1, 0, 0, 0, Shard()))
        assert sorted(len(images) for images, _ in batches) == [0, 1]
        assert [fault.path for fault in data.faults.take()] == [f"{tmp_path}/train2017/a.png"]
    Image.new("RGB", (6, 8)).save(tmp_path / "train2017" / "a.png")
    with pytest.raises(UsageError, match="it has 6 x 8 pixels, its annotations say 8 x 6"):
        list(opened(tmp_path).train(2, 0, 0, 0, Shard()))


def test_without_pycocotools_the_error_names_the_package_to_install(monkeypatch, demo):
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    with pytest.raises(UsageError) as refused:
        opened(demo)
    assert "pip install '.[detection]'" in str(refused.value)


# ---- the demo and kfac-data ----


def test_the_demo_has_correct_masks_and_all_features_of_coco(demo):
    content = coco_annotations.load(*coco_annotations.find(demo, "train"))
    assert list(content.categories) == [1, 3, 8]
    assert not content.faults
    instances = [(image, x) for image in content.images for x in image.instances]
    assert any(x.crowd for _, x in instances)
    assert {isinstance(x.segmentation, dict) for _, x in instances} == {True, False}
    assert any(not image.instances for image in content.images)
    for image, x in instances:
        rle = coco_masks.to_rle(x.segmentation, image.height, image.width)
        assert abs(pycocotools_mask.area(rle) - x.area) <= 0.06 * x.area + 3
        box = pycocotools_mask.toBbox(rle)
        assert np.abs(box - x.bbox).max() <= 2
    # The masks of two objects hardly overlap: each pixel belongs to the object in front.
    for image in content.images:
        masks = coco_masks.decode(
            [x.segmentation for x in image.instances], image.height, image.width
        )
        assert (masks.sum(0) > 1).sum() <= 0.02 * image.height * image.width


def test_the_demo_is_reproducible(tmp_path, demo):
    demo_images.make_coco(tmp_path / "again", train=44, val=11, size=64)
    for file in (f for f in demo.rglob("*") if f.is_file()):
        assert (tmp_path / "again" / file.relative_to(demo)).read_bytes() == file.read_bytes()
    with pytest.raises(UsageError, match="Choose another folder"):
        demo_images.make_coco(tmp_path / "again")


def test_kfac_data_makes_and_verifies_coco(capsys, tmp_path):
    root = tmp_path / "demo"
    assert run(capsys, "make-demo", "coco", root)[0] == 0
    code, out, _ = run(capsys, "verify", root)
    assert (code, out) == (
        0,
        "coco: 200 images in train, 50 images in val; no faults\n"
        f"next: kfac-train model=maskrcnn_resnet50_fpn data=coco data.root={root}\n",
    )
    (root / "train2017" / "000000000007.jpg").write_bytes(b"nothing")
    (root / "val2017" / "000000000003.jpg").unlink()
    code, out, _ = run(capsys, "verify", root)
    assert code == 1
    assert "000000000007.jpg: it is no image" in out
    assert "instances_val2017.json: image 3: there is no file '000000000003.jpg'" in out
    assert out.splitlines()[-1].startswith("coco: 199 images in train, 49 images in val; ")
