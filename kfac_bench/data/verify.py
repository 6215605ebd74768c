"""``kfac-data verify``: what is missing or damaged in a data set, before hours are spent on it."""

from collections.abc import Mapping
from pathlib import Path

from kfac_bench.counted import counted
from kfac_bench.data.images import cifar10, coco_annotations, lgg
from kfac_bench.data.language import masked_text, squad, text_shards
from kfac_bench.errors import UsageError

LAYOUTS = {
    "imagefolder": "train/<class>/<image>.JPEG and val/<class>/<image>.JPEG",
    "shards": "train-<number>.tar and val-<number>.tar of <key>.jpg and <key>.cls",
    "lgg": lgg.LAYOUT,
    "coco": coco_annotations.LAYOUT,
    "text": text_shards.LAYOUT,
    "squad": squad.LAYOUT,
    "cifar10": "cifar-10-batches-bin, cifar-10-batches-py, or one of their archives",
}


def verify(root: Path) -> tuple[str, list[tuple[Path, str]]]:
    """Read every file of the data set in `root`: what there is, and (file, fault) of bad ones.

    Raises UsageError where nothing of it can be used.
    """
    if not root.exists():
        raise UsageError(f"{root}: no such folder")
    if (root / "annotations").is_dir():
        from kfac_bench.data.images import coco_dataset

        counts, unreadable = coco_dataset.scan(root)
        return f"coco: {_by_split(counts, 'image')}", [(Path(x.path), x.reason) for x in unreadable]
    if (root / "train").is_dir() or (root / "val").is_dir():
        from kfac_bench.data.images import imagefolder  # torchvision, which the others do without

        counts, faults = imagefolder.scan(root)
        return f"imagefolder: {_by_split(counts, 'image')}", faults
    if any(root.glob("train-*.tar")) or any(root.glob("val-*.tar")):
        from kfac_bench.data.images import tar_shards  # torchvision too

        counts, faults = tar_shards.scan(root)
        return f"shards: {_by_split(counts, 'good image')}", faults
    if any(any((root / place).glob("TCGA_*")) for place in lgg.PLACES):
        volumes, faults = lgg.scan(root)
        slices = sum(len(volume.slices) for volume in volumes)
        found = f"{counted(slices, 'good slice')} in {counted(len(volumes), 'volume')}"
        return f"lgg: {found}", faults
    if text_shards.lengths(root):
        return masked_text.scan(root)
    if any((root / name).exists() for name in squad.FILES.values()):
        return squad.scan(root)
    if root.is_file() or any(root.glob("cifar-10-*")):
        data = cifar10.load(root)
        return f"cifar10: {data.train_size} images to train on, {data.eval_size} to evaluate", []
    expected = "; ".join(f"{name}: {layout}" for name, layout in LAYOUTS.items())
    raise UsageError(f"{root} has the layout of no known data set ({expected})")


def _by_split(counts: Mapping[str, int], noun: str) -> str:
    return ", ".join(f"{counted(n, noun)} in {split}" for split, n in counts.items())
