"""Mean precision against its definition in numpy; runs of a tiny Mask R-CNN on drawn shapes."""

import json

import numpy as np
import pytest
import torch

from kfac_bench.config import compose
from kfac_bench.core.distributed.collective import TorchCollective
from kfac_bench.data.base.dataset import ImageDisplay
from kfac_bench.data.demo import demo_images
from kfac_bench.data.images import coco_masks
from kfac_bench.data.images.coco_annotations import CocoImage, Instance
from kfac_bench.distributed.backends.fsdp2 import FSDP2
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import UsageError
from kfac_bench.record.events import Evaluated, Trained
from kfac_bench.tasks.detection import FOUND, TRUE, Detection, found_in
from kfac_bench.training import dry_run
from kfac_bench.training.update import Update
from tests.support.distributed import run_ranks
from tests.support.runs import (
    CPU,
    before_step,
    end,
    evaluated,
    here,
    of_kind,
    terminate,
    train,
    train_here,
    trainer_of,
)

TINY = (
    "model=maskrcnn_tiny",
    "data.image_size=64",
    "data.max_size=80",
    "data.workers=0",
    "logger=none",
    "trainer.threads=1",
    "trainer.batch_size=4",
    "optimizer.lr=0.01",
    "kfac.update_freq=4",
    "kfac.factor_update_freq=2",
    "trainer.checkpoint_freq=100",
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    root = tmp_path_factory.mktemp("coco") / "demo"
    demo_images.make_coco(root, train=9, val=5, size=64)
    return root


# ---- metrics ----

SIZE, CLASSES = 24, 4


def world(seed, pictures=6):
    """True things with crowds, and what a model might find: moved, missed, doubled, made up."""
    rng = np.random.default_rng(seed)
    truth, outputs = [], []

    def mask_of(x, y, w, h):
        mask = np.zeros((SIZE, SIZE), np.uint8)
        mask[y : y + h, x : x + w] = rng.random((h, w)) < 0.9
        return mask

    for id in rng.permutation(100)[:pictures].tolist():
        things, found = [], []
        for _ in range(rng.integers(0, 6)):
            x, y, w, h = (*rng.integers(0, 14, 2).tolist(), *rng.integers(3, 9, 2).tolist())
            label, crowd, mask = (
                int(rng.integers(1, CLASSES)),
                rng.random() < 0.15,
                mask_of(x, y, w, h),
            )
            rle = coco_masks.encode(mask[None])[0]
            things.append(Instance((x, y, w, h), label, float(mask.sum()), bool(crowd), rle))
            for _ in range(rng.integers(0, 3)):
                dx, dy = rng.integers(-1, 2, 2)
                moved = np.roll(mask, (dy, dx), (0, 1))
                wrong = rng.random() < 0.2
                found.append(
                    ([x + dx, y + dy, x + dx + w, y + dy + h], 1 if wrong else label, moved)
                )
        if rng.random() < 0.5:
            found.append(([1, 1, 8, 8], 2, mask_of(1, 1, 7, 7)))
        truth.append(CocoImage(id, None, SIZE, SIZE, things))
        outputs.append(
            {
                "boxes": torch.tensor([b for b, _, _ in found], dtype=torch.float32).view(-1, 4),
                "labels": torch.tensor([k for _, k, _ in found], dtype=torch.int64),
                "scores": torch.from_numpy(rng.random(len(found)).astype(np.float32).round(2)),
                "masks": torch.tensor(
                    np.array([m for *_, m in found]).reshape(-1, 1, SIZE, SIZE) * 0.01 + 0.49
                ),
            }
        )
    pairs = sorted(zip(truth, outputs, strict=True), key=lambda pair: pair[0].id)
    return [p for p, _ in pairs], [o for _, o in pairs]


def overlap_of_boxes(found, true, crowd):
    (ax, ay, bx, by), (x, y, w, h) = found, true
    inside = max(0, min(bx, x + w) - max(ax, x)) * max(0, min(by, y + h) - max(ay, y))
    own = (bx - ax) * (by - ay)
    return inside / (own if crowd else own + w * h - inside)


def overlap_of_masks(found, true, crowd):
    inside = (found & true).sum()
    return inside / max(1, found.sum() if crowd else (found | true).sum())


def mean_precision(pairs, kind, thresholds):
    """Of (picture, output) pairs, from the definition: COCO's 101 points, crowds ignored."""
    results = []
    for threshold in thresholds:
        for label in range(1, CLASSES):
            scored, positives = [], 0
            for picture, output in pairs:
                true = [t for t in picture.instances if t.label == label]
                positives += sum(not t.crowd for t in true)
                taken = set()
                mine = (output["labels"] == label).nonzero().flatten().tolist()
                for i in sorted(mine, key=lambda i: -output["scores"][i].item()):
                    overlaps = {}
                    for number, t in enumerate(true):
                        if kind == "bbox":
                            o = overlap_of_boxes(output["boxes"][i].tolist(), t.bbox, t.crowd)
                        else:
                            o = overlap_of_masks(
                                output["masks"][i, 0].numpy() >= 0.5,
                                coco_masks.decode([t.segmentation], SIZE, SIZE)[0] > 0,
                                t.crowd,
                            )
                        overlaps[number] = o
                    free = [n for n in overlaps if n not in taken and not true[n].crowd]
                    best = max(free, key=lambda n: (overlaps[n], n), default=None)
                    if best is not None and overlaps[best] >= threshold:
                        taken.add(best)
                        scored.append((output["scores"][i].item(), 1))
                    elif not any(overlaps[n] >= threshold for n in overlaps if true[n].crowd):
                        scored.append((output["scores"][i].item(), 0))
            if positives:
                results.append(average_precision(scored, positives))
    return np.mean(results)


def average_precision(scored, positives):
    scored = sorted(scored, key=lambda pair: -pair[0])  # stable
    right = np.cumsum([hit for _, hit in scored]) if scored else np.zeros(0)
    recall, precision = right / positives, right / np.arange(1, len(right) + 1)
    points = np.linspace(0, 1, 101)
    return np.mean([precision[recall >= p].max() if (recall >= p).any() else 0 for p in points])


@pytest.mark.parametrize("seed", range(6))
def test_metrics_equal_mean_precision_by_its_definition(seed, capsys):
    truth, outputs = world(seed)
    order = np.random.default_rng(seed).permutation(len(truth))
    pairs = list(zip(truth, outputs, strict=True))
    task = Detection(truth, CLASSES)
    found = [found_in(pairs[i][0].id, pairs[i][1]) for i in order]
    metrics = task.metrics(json.loads(json.dumps(found)))
    assert capsys.readouterr() == ("", "")
    ten = np.arange(0.5, 0.99, 0.05).round(2)
    for kind in ("bbox", "segm"):
        names = {"mAP": ten, "AP50": [0.5], "AP75": [0.75]}
        for name, thresholds in names.items():
            want = mean_precision(pairs, kind, thresholds)
            assert metrics[f"{kind}_{name}"] == pytest.approx(want, abs=1e-9), (kind, name)
    assert 0 < metrics["segm_mAP"] < 1
    assert "bbox_AP_large" not in metrics  # there is none


def test_perfect_detections_score_1_and_no_detections_0():
    truth, _ = world(1)
    outputs = []
    for picture in truth:
        things = [t for t in picture.instances if not t.crowd]
        x, y, w, h = torch.tensor([t.bbox for t in things]).view(-1, 4).T
        masks = coco_masks.decode([t.segmentation for t in things], SIZE, SIZE)
        outputs.append(
            {
                "boxes": torch.stack([x, y, x + w, y + h], 1).float(),
                "labels": torch.tensor([t.label for t in things], dtype=torch.int64),
                "scores": torch.ones(len(things)),
                "masks": torch.from_numpy(masks)[:, None].float(),
            }
        )
    task = Detection(truth, CLASSES)
    found = [found_in(p.id, o) for p, o in zip(truth, outputs, strict=True)]
    assert task.metrics(found)["bbox_mAP"] == task.metrics(found)["segm_mAP"] == 1
    none = [found_in(p.id, {k: v[:0] for k, v in outputs[0].items()}) for p in truth]
    assert task.metrics(none)["bbox_mAP"] == task.metrics([])["segm_mAP"] == 0


def test_the_size_of_a_detection_is_its_mask_for_segm_and_its_box_for_bbox():
    """What is found wrongly counts among the small if its area is small."""
    masks = np.zeros((2, 64, 64), np.uint8)
    masks[0, :10, :10] = 1
    masks[1, 20:, 20:22] = masks[1, 20:22, 20:] = 1  # a corner: small, in a box that is not
    thing = Instance((0, 0, 10, 10), 1, 100.0, False, coco_masks.encode(masks[:1])[0])
    output = {
        "boxes": torch.tensor([[0.0, 0, 10, 10], [20.0, 20, 64, 64]]),
        "labels": torch.tensor([1, 1]),
        "scores": torch.tensor([0.5, 0.9]),
        "masks": torch.from_numpy(masks)[:, None].float(),
    }
    metrics = Detection([CocoImage(3, None, 64, 64, [thing])], 2).metrics([found_in(3, output)])
    for name in ("bbox_mAP", "segm_mAP", "segm_AP_small"):
        assert metrics[name] == pytest.approx(0.5)
    assert metrics["bbox_AP_small"] == pytest.approx(1)


def test_with_goals_the_metric_is_the_smallest_share_of_a_goal():
    truth, outputs = world(2)
    found = [found_in(p.id, o) for p, o in zip(truth, outputs, strict=True)]
    plain = Detection(truth, CLASSES)
    assert plain.metric == "bbox_mAP"
    bbox, segm = (plain.metrics(found)[name] for name in ("bbox_mAP", "segm_mAP"))
    both = Detection(truth, CLASSES, bbox_goal=bbox / 2, segm_goal=segm)
    assert both.metric == "goals_met"
    assert both.metrics(found)["goals_met"] == pytest.approx(1)
    assert both.metrics(found)["bbox_mAP"] == bbox
    one = Detection(truth, CLASSES, segm_goal=0.5)
    assert one.metrics(found)["goals_met"] == pytest.approx(segm / 0.5)


def test_true_and_found_objects_are_drawn_and_named():
    mask = np.zeros((32, 32), np.uint8)
    mask[4:12, 4:12] = 1
    there = Instance((4, 4, 8, 8), 2, 64.0, False, coco_masks.encode(mask[None])[0])
    found = {
        "boxes": torch.tensor([[20.0, 20, 28, 28], [1.0, 1, 5, 5]]),
        "labels": torch.tensor([1, 2]),
        "scores": torch.tensor([0.9, 0.4]),
        "masks": torch.from_numpy(np.stack([np.rot90(mask, 2)] * 2))[:, None].float(),
    }
    looks = ImageDisplay((0.0,) * 3, (1.0,) * 3, ("nothing", "cat", "dog"))
    task = Detection([CocoImage(3, None, 32, 32, [there])], 3, looks=looks)
    batch = ([torch.zeros(3, 32, 32)] * 3, [{"image_id": torch.tensor(3)}] * 3)
    shown = task.show(lambda images: [found], batch, 2)
    assert len(shown) == 2
    assert shown[0].caption == "found (magenta): cat 0.90; there (yellow): dog"
    picture = shown[0].image
    assert picture.shape == (256, 256, 3)  # eight times as large
    assert tuple(picture[33, 60]) == TRUE
    assert tuple(picture[160, 180]) == FOUND
    assert tuple(picture[64, 64]) == tuple(picture[8, 30]) == (0, 0, 0)
    nothing = {k: v[:0] for k, v in found.items()}
    assert "found (magenta): nothing" in task.show(lambda images: [nothing], batch, 1)[0].caption


# ---- configurations ----


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["kfac.fisher=mc"], "kfac.fisher=mc does not fit task=detection"),
        (["kfac.fisher=type2"], "use kfac.fisher=empirical"),
        (["data=digits"], "for task=detection choose data=coco"),
        (["task=classification"], "model=maskrcnn_tiny is for task=detection"),
        (["data.max_size=0"], "data.max_size=0"),
        (["model.box_samples=3"], "model.box_samples=3"),
    ],
)
def test_choices_that_do_not_fit_detection_are_refused(overrides, said):
    with pytest.raises(UsageError) as refused:
        compose.load(["model=maskrcnn_tiny", *overrides])
    assert said in str(refused.value)


def test_without_kfac_any_fisher_is_accepted():
    compose.load(["model=maskrcnn_tiny", "kfac=none", "kfac.fisher=mc"])


def test_kfac_covers_the_heads_by_default(demo, tmp_path):
    def covered(*options):
        trainer = trainer_of(tmp_path, f"data.root={demo}", *options, base=TINY)
        names = [layer.name for layer in trainer.kfac.report().layers]
        trainer.kfac.detach()
        return names

    assert len(covered()) == 7
    assert all(name.startswith("roi_heads.") for name in covered("kfac=mem_opt"))
    more = covered("kfac.skip=[Norm]")
    assert {name.split(".")[0] for name in more} == {"backbone", "rpn", "roi_heads"}


def test_a_plan_needs_no_data():
    found = dry_run.trace(compose.load([*TINY, "trainer.batch_size=6"]), world_size=2)
    assert found.shape == (3, 64, 80)
    assert found.step_flops > 2 * found.forward_flops > 0
    big = compose.load(["model=maskrcnn_resnet50_fpn", "kfac.max_dim=16384"])
    found = dry_run.trace(big, world_size=2)
    specs = {layer.name: layer.spec for layer in found.report.layers}
    assert specs["roi_heads.box_head.fc6"].a_dim == 256 * 49 + 1
    assert len(specs) == 9
    assert 40e6 < found.parameters < 50e6


def test_the_outline_is_what_a_step_computes(demo):
    config = compose.load([*TINY, f"data.root={demo}"])
    data = config.data.build(config.task.name)
    torch.manual_seed(0)
    model = config.model.build(data.shape, data.num_classes, "detection")
    rows = {}

    def note(module, x, y):
        if isinstance(y, torch.Tensor):
            rows.setdefault(module, tuple(y.shape[1:]))

    for module in model.modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_hook(note)
    images = torch.rand(2, 3, 64, 64)
    model.outline(images).backward()
    assert all(p.grad is not None for p in model.parameters())
    outline = dict(rows)
    rows.clear()
    boxes = torch.tensor([[5.0, 5, 30, 30]])
    target = {"boxes": boxes, "labels": torch.tensor([1])}
    masks = torch.ones(1, 64, 64, dtype=torch.uint8)
    model.train()(list(images), [target | {"masks": masks}] * 2)
    assert rows == outline


# ---- runs ----


@pytest.mark.slow
def test_a_network_learns_the_demo(demo, tmp_path):
    options = (f"data.root={demo}", "trainer.max_steps=16", "optimizer=adam", "optimizer.lr=0.003")
    _, path = train(tmp_path, *options, "kfac=none", "trainer.log_freq=1", base=TINY)
    losses = [e.loss for e in of_kind(path, Trained)]
    assert sum(losses[-4:]) / 4 < 0.75 * losses[0]
    metrics = of_kind(path, Evaluated)[-1].metrics
    assert 0 < metrics["bbox_mAP"] < metrics["bbox_AP50"] < 1
    assert "segm_mAP" in metrics


def test_a_step_in_half_precision(demo, tmp_path):
    options = (f"data.root={demo}", "trainer.max_steps=2", "trainer.eval_freq=9")
    status, path = train(tmp_path, *options, "trainer.precision=bf16", base=TINY)
    assert status == "finished"
    assert of_kind(path, Trained)[-1].dropped_statistics == 0


def test_an_interrupted_run_ends_with_the_same_weights(demo, tmp_path):
    options = (f"data.root={demo}", "kfac=comm_opt", "trainer.max_steps=5", "trainer.eval_freq=9")
    _, straight = train(tmp_path, *options, "run_id=straight", base=TINY)
    with before_step(4, terminate):  # of 2 steps an epoch: in the middle of one
        train(tmp_path, *options, "run_id=stopped", base=TINY)
    _, path = train(tmp_path, *options, "run_id=stopped", base=TINY)
    assert end(path).weights_sha256 == end(straight).weights_sha256


def evaluate_here(root, folder):
    trainer = trainer_of(folder, f"data.root={root}", "kfac=none", base=TINY, backend=here())
    return evaluated(trainer)


def evaluate_sharded(root, folder):
    backend = FSDP2(Ranks(CPU, TorchCollective()))
    return evaluated(
        trainer_of(folder, f"data.root={root}", "kfac=none", base=TINY, backend=backend)
    )


@pytest.mark.slow
@pytest.mark.ranks
def test_metrics_are_the_same_on_two_ranks(demo, tmp_path):
    trainer = trainer_of(tmp_path, f"data.root={demo}", "kfac=none", base=TINY)
    alone = evaluated(trainer)
    assert alone["bbox_mAP"] > 0, "the first weights find nothing"
    for metrics in run_ranks(2, evaluate_here, demo, tmp_path):
        assert metrics == alone
    for metrics in run_ranks(2, evaluate_sharded, demo, tmp_path):  # of 5 images, in lockstep
        assert metrics == alone


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rank_without_an_image_takes_part(demo, tmp_path):
    """9 images in batches of 4: the third batch of an epoch has one, and rank 0 none."""
    options = (f"data.root={demo}", "trainer.drop_last=false", "trainer.max_steps=4", *TINY[4:])
    more = ("trainer.eval_freq=9", "optimizer.lr=0.001")
    results = run_ranks(2, train_here, tmp_path, (*options, *more), TINY)
    assert [status for status, *_ in results] == ["finished"] * 2
    assert results[0][2] == results[1][2]


def test_an_empty_part_of_a_batch_has_a_stand_in(demo, tmp_path):
    seen = []
    trainer = trainer_of(tmp_path, f"data.root={demo}", "trainer.accumulate=4", base=TINY)
    original = Update._forward

    def forward(self, model, part, share):
        loss, each = original(self, model, part, share)
        seen.append((share, model.training, torch.isfinite(loss).item()))
        return loss, each

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Update, "_forward", forward)
        batch = next(trainer._batches())
        three = tuple(part[:3] for part in batch)
        trainer._update.backward(three, 3)
    assert [share > 0 for share, *_ in seen].count(False) == 1
    assert all(training and finite for _, training, finite in seen)
    trainer.kfac.detach()
