"""Mask R-CNN: its losses in every mode, its heads' factors against autograd, box by box."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torchvision.models import resnet50
from torchvision.models.detection import roi_heads
from torchvision.ops import FrozenBatchNorm2d, roi_align

from kfac_bench.core import KFAC
from kfac_bench.errors import UsageError
from kfac_bench.models.maskrcnn import maskrcnn_resnet50_fpn, maskrcnn_tiny
from kfac_bench.tasks.detection import LOSSES, Detection
from tests.support import slow_keys
from tests.support.distributed import run_ranks

HEADS = ("Norm", r"^backbone\.", r"^rpn\.", "ConvTranspose")
CLASSES = 4
TASK = Detection([], CLASSES)


def tiny(samples=8, dtype=torch.float32):
    torch.manual_seed(0)
    model = maskrcnn_tiny(CLASSES, 64, 64, box_samples=samples, width=8, representation=6)
    return model.to(dtype)


def batch(things, dtype=torch.float32, size=64):
    """An image per number of things: square ones, in places of their own."""
    generator = torch.Generator().manual_seed(3)
    images, targets = [], []
    for number, count in enumerate(things):
        images.append(torch.rand(3, size, size - 8 * number, generator=generator, dtype=dtype))
        corner = torch.rand(count, 2, generator=generator, dtype=dtype) * 25
        side = 10 + torch.rand(count, 2, generator=generator, dtype=dtype) * 15
        boxes = torch.cat([corner, corner + side], 1)
        masks = torch.zeros(count, size, size - 8 * number, dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
            mask[y1:y2, x1:x2] = 1
        labels = torch.arange(count) % (CLASSES - 1) + 1
        targets.append({"boxes": boxes, "labels": labels, "masks": masks})
    return images, targets


class Seen:
    """What torchvision's losses of the heads were given, and the boxes' features."""

    def __init__(self, monkeypatch, model):
        self.box, self.mask = {}, {}
        box, mask = roi_heads.fastrcnn_loss, roi_heads.maskrcnn_loss

        def of_boxes(logits, deltas, labels, targets):
            self.box |= {"labels": torch.cat(labels), "targets": torch.cat(targets)}
            self.per_image = [len(x) for x in labels]
            return box(logits, deltas, labels, targets)

        def of_masks(logits, proposals, gt_masks, gt_labels, matched):
            pairs = zip(gt_labels, matched, strict=True)
            self.mask["labels"] = torch.cat([labels[i] for labels, i in pairs])
            each = zip(gt_masks, proposals, matched, strict=True)
            self.mask["targets"] = torch.cat([cropped(m, p, i) for m, p, i in each])
            return mask(logits, proposals, gt_masks, gt_labels, matched)

        monkeypatch.setattr(roi_heads, "fastrcnn_loss", of_boxes)
        monkeypatch.setattr(roi_heads, "maskrcnn_loss", of_masks)
        heads = model.roi_heads
        for where, head in ((self.box, heads.box_head), (self.mask, heads.mask_head)):
            head.register_forward_pre_hook(lambda _, x, where=where: where.update(x=x[0].detach()))


def cropped(masks, boxes, matched):
    """A thing's mask inside of a box, 28 x 28."""
    rois = torch.cat([matched[:, None].to(boxes), boxes], 1)
    return roi_align(masks[:, None].to(boxes), rois, 28, 1.0)[:, 0]


def by_hand(model, seen):
    """A and G by layer, float64: of each box's own loss, one box at a time, by autograd."""
    heads, rows = model.roi_heads, {}

    def add(head, layers, x, loss):
        kept = {}

        def keep(name, x, y):
            kept[name] = (x.detach(), y)
            return y.clone()  # for the activation works in place

        handles = [
            layer.register_forward_hook(lambda _, x, y, name=name: keep(name, x[0], y))
            for name, layer in layers.items()
        ]
        value = loss(head(x))
        names = list(kept)
        grads = torch.autograd.grad(value, [kept[n][1] for n in names], allow_unused=True)
        for handle in handles:
            handle.remove()
        for name, g in zip(names, grads, strict=True):
            layer, (a, y) = layers[name], kept[name]
            g = torch.zeros_like(y) if g is None else g
            if isinstance(layer, nn.Conv2d):
                a = F.unfold(a, layer.kernel_size, padding=layer.padding)[0].T
                g = g[0].flatten(1).T
            a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1)
            rows.setdefault(name, []).append((a, g))

    boxes = {
        "roi_heads.box_head.fc6": heads.box_head.fc6,
        "roi_heads.box_head.fc7": heads.box_head.fc7,
        "roi_heads.box_predictor.cls_score": heads.box_predictor.cls_score,
        "roi_heads.box_predictor.bbox_pred": heads.box_predictor.bbox_pred,
    }
    masks = {
        "roi_heads.mask_head.0.0": heads.mask_head[0][0],
        "roi_heads.mask_head.1.0": heads.mask_head[1][0],
        "roi_heads.mask_predictor.mask_fcn_logits": heads.mask_predictor.mask_fcn_logits,
    }
    for x, label, target in zip(*(seen.box[k] for k in ("x", "labels", "targets")), strict=True):

        def box_loss(features, label=label, target=target):
            logits, deltas = heads.box_predictor(features)
            loss = -logits.log_softmax(1)[0, label]
            if label == 0:
                return loss
            error = (deltas.view(-1, 4)[label] - target).abs()
            return loss + torch.where(error < 1 / 9, 4.5 * error**2, error - 1 / 18).sum()

        add(heads.box_head, boxes, x[None], box_loss)
    for x, label, target in zip(*(seen.mask[k] for k in ("x", "labels", "targets")), strict=True):

        def mask_loss(features, label=label, target=target):
            p = heads.mask_predictor(features)[0, label].sigmoid()
            return -(target * p.log() + (1 - target) * (1 - p).log()).mean()

        add(heads.mask_head, masks, x[None], mask_loss)
    return {
        name: (
            sum(a.T @ a for a, _ in each) / sum(len(a) for a, _ in each),
            sum(g.T @ g for _, g in each) / len(each),
        )
        for name, each in rows.items()
    }


def one_step(model, some, **options):
    """Loss and factors by (layer, factor) of a step with K-FAC."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, optimizer, skip=HEADS, factor_update_freq=1, update_freq=1, **options)
    model.train()
    loss, _ = TASK.forward(model, some)
    loss.backward()
    kfac.step()
    store = kfac._executor.store
    factors = {key: store.factor(key).clone() for key in store.factors}
    weights = {key: float(store.weights[key]) for key in factors}
    kfac.detach()
    return loss, factors, weights


@pytest.mark.parametrize("things", [(3,), (1, 4), (0, 2)])
def test_factors_of_the_heads_are_means_over_boxes(monkeypatch, things):
    torch.set_default_dtype(torch.float64)
    try:
        model = tiny(dtype=torch.float64)
        seen = Seen(monkeypatch, model)
        _, factors, _ = one_step(model, batch(things, torch.float64))
    finally:
        torch.set_default_dtype(torch.float32)
    boxes, things_seen = len(seen.box["labels"]), len(seen.mask["labels"])
    assert boxes == sum(seen.per_image)
    assert 0 < things_seen == int((seen.box["labels"] > 0).sum()) < boxes
    wanted = by_hand(model, seen)
    assert {name for name, _ in factors} == set(wanted)
    for name, (a, g) in wanted.items():
        torch.testing.assert_close(factors[name, "A"][0], a, rtol=1e-9, atol=1e-12, msg=name)
        torch.testing.assert_close(factors[name, "G"][0], g, rtol=1e-8, atol=1e-14, msg=name)


def test_images_may_have_different_numbers_of_boxes(monkeypatch):
    model = tiny(samples=64)
    model.rpn._post_nms_top_n["training"] = 12  # few proposals, so that all are taken
    seen = Seen(monkeypatch, model)
    one_step(model, batch((1, 6)))
    assert len(set(seen.per_image)) == 2


def test_a_step_without_objects_leaves_the_factors_of_the_mask_head_alone():
    model, some = tiny(), batch((2,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, optimizer, skip=HEADS, factor_update_freq=1, update_freq=1)
    weights = []
    for things in ((0,), (2,), (0, 0)):
        model.train()
        model.zero_grad()
        loss, each = TASK.forward(model, batch(things))
        loss.backward()
        kfac.step()
        assert torch.isfinite(loss)
        assert (each[LOSSES.index("loss_mask")] == 0) == (sum(things) == 0)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
        store = kfac._executor.store
        names = ("roi_heads.mask_head.0.0", "roi_heads.box_head.fc6")
        weights.append([float(store.weights[name, "G"]) for name in names])
    assert weights == [[0, 1], [1, pytest.approx(1.95)], [1, pytest.approx(0.95 * 1.95 + 1)]]
    assert kfac.dropped_statistics == 0
    assert some is not None
    kfac.detach()


def on_a_rank():
    """Rank 0 has an image with one thing, rank 1 one with four; messages are in float32."""
    rank = torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        model = tiny()
        seen = Seen(patch, model)
        images, targets = batch((1, 4))
        _, factors, _ = one_step(model, (images[rank:][:1], targets[rank:][:1]))
        for where in (seen.box, seen.mask):
            where.update((k, v.double()) for k, v in where.items() if v.is_floating_point())
        counts = [len(where["labels"]) for where in (seen.box, seen.mask)]
        return by_hand(model.double(), seen), *counts, factors


@pytest.mark.ranks
def test_over_ranks_factors_are_means_over_all_boxes():
    (one, boxes, things, factors), (two, boxes_2, things_2, factors_2) = run_ranks(2, on_a_rank)
    assert things < things_2
    for name in one:
        n, m = (things, things_2) if "mask" in name else (boxes, boxes_2)
        for i, factor in enumerate("AG"):
            want = (n * one[name][i] + m * two[name][i]) / (n + m)
            got = factors[name, factor][0]
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5 * want.abs().max())
            assert torch.equal(factors[name, factor], factors_2[name, factor])


def test_the_deconvolution_is_left_to_the_optimizer():
    model = tiny()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), skip=HEADS)
    report = str(kfac.report())
    kfac.detach()
    assert "conv5_mask" in report
    assert "skip pattern 'ConvTranspose'" in report
    assert "7 layers" in report


# ---- losses and findings ----


def test_losses_equal_torchvisions_also_in_evaluation_mode():
    model, some = tiny(), batch((2, 3))
    modes = []
    model.backbone.body.stem.register_forward_hook(lambda m, x, y: modes.append(m.training))
    losses = {}
    for mode in (True, False):
        model.train(mode)
        torch.manual_seed(1)
        losses[mode], each = TASK.forward(model, some)
        assert losses[mode] == each.sum()
        assert (each > 0).all()
        assert all(m.training == mode for m in model.modules())
    assert losses[True] == losses[False]
    assert modes == [True, False]
    torch.manual_seed(1)
    parent = super(type(model.train()), model).forward(*some)
    assert losses[True].item() == pytest.approx(sum(x.item() for x in parent.values()), rel=1e-6)
    for mode in (True, False):
        found = model.train(mode)(some[0])
        assert [set(f) for f in found] == [{"boxes", "labels", "scores", "masks"}] * 2


def test_only_evaluation_images_are_resized():
    model, sizes = tiny(), []
    model.backbone.register_forward_pre_hook(lambda _, x: sizes.append(tuple(x[0].shape)))
    images, targets = batch((1,), size=32)
    model(images, targets)
    (found,) = model.eval()(images)
    assert sizes == [(1, 3, 32, 32), (1, 3, 64, 64)]
    assert found["masks"].shape[2:] == (32, 32)
    assert found["boxes"].max() <= 32


@pytest.mark.parametrize("overlap", [False, True])
def test_kfac_captures_nothing_in_evaluation_mode(overlap):
    model, some = tiny(), batch((2,))
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), skip=HEADS, overlap=overlap)
    TASK.forward(model.eval(), some)[0].backward()
    assert kfac._capture.pop() == {}
    TASK.forward(model.train(), some)[0].backward()
    assert len(kfac._capture.pop()) == 7
    kfac.detach()


# ---- the big one ----


def test_the_backbones_weights_are_read_from_files(tmp_path):
    torch.manual_seed(5)
    state = resnet50(weights=None).state_dict()
    torch.save(state, tmp_path / "r50.pth")
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "r50.safetensors")
    for name in ("r50.pth", "old.pth", "r50.safetensors"):
        model = maskrcnn_resnet50_fpn(91, 800, 1333, backbone_weights=str(tmp_path / name))
        body = model.backbone.body
        assert torch.equal(body.layer4[2].conv3.weight, state["layer4.2.conv3.weight"])
        assert torch.equal(body.bn1.weight, state["bn1.weight"])
        frozen = {n.split(".")[0] for n, p in body.named_parameters() if not p.requires_grad}
        assert frozen == {"conv1", "layer1"}
        assert isinstance(body.layer3[0].bn2, FrozenBatchNorm2d)
    assert model.transform.min_size == (800,)
    del model


class Code:
    def __reduce__(self):
        return print, ("this must not run",)


def test_files_without_weights_are_refused_in_one_line(tmp_path, capsys):
    bad = {
        "none.pth": None,
        "text.pth": b"no weights",
        "cut.safetensors": b"\x10\x00\x00",
        "empty.pth": b"",
        "key.pth": slow_keys.zipped(slow_keys.program()),
        "old_key.pth": slow_keys.in_old_format(slow_keys.program()),
    }
    for name, content in bad.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    torch.save(Code(), tmp_path / "code.pth")
    torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "other.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    for name in (*bad, "code.pth", "other.pth", "list.pth"):
        with pytest.raises(UsageError) as refused:
            maskrcnn_resnet50_fpn(5, 64, 64, backbone_weights=str(tmp_path / name))
        assert str(refused.value).startswith(f"model.backbone_weights={tmp_path / name}: ")
        assert "\n" not in str(refused.value)
    assert "must not run" not in capsys.readouterr().out


@pytest.mark.slow
def test_other_models_do_not_import_detection():
    code = (
        "import sys; from kfac_bench.config import compose;"
        "c = compose.load(['model=unet']); c.model.build((3, 32, 32), 1, 'segmentation');"
        "assert not [m for m in sys.modules if 'pycocotools' in m or 'detection' in m]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
