"""Demo datasets in published layouts: made by `kfac-data make-demo`, and by `data.root=demo`."""

import hashlib
from functools import partial
from importlib import import_module
from pathlib import Path

from kfac_bench.data.base.files import cache_folder, made_once
from kfac_bench.errors import UsageError

DEMOS = {
    "imagenet": "kfac_bench.data.demo.demo_images:make_imagenet",
    "shards": "kfac_bench.data.demo.demo_images:make_shards",
    "cifar10": "kfac_bench.data.demo.demo_digits:make_cifar10",
    "cifar100": "kfac_bench.data.demo.demo_digits:make_cifar100",
    "fashion_mnist": "kfac_bench.data.demo.demo_digits:make_idx_images",
    "lgg": "kfac_bench.data.demo.demo_images:make_lgg",
    "coco": "kfac_bench.data.demo.demo_images:make_coco",
    "parquet": "kfac_bench.data.demo.demo_tables:make_images",
    "squad": "kfac_bench.data.demo.demo_language:make_squad",
    "text": "kfac_bench.data.demo.demo_language:make_text",
    "text_parquet": "kfac_bench.data.demo.demo_tables:make_text",
}
"""Import paths of the functions that write the demos into a folder."""


def make(demo: str, root: Path) -> None:
    """Write a demo into `root`. Raise UsageError if a dataset is there already."""
    module, _, function = DEMOS[demo].partition(":")
    getattr(import_module(module), function)(root)


def folder(demo: str) -> Path:
    """Return the folder of a demo in the user's cache; make the demo if it is not there.

    Raises:
        UsageError: There is no such demo, or the cache cannot be written.
    """
    if demo not in DEMOS:
        raise UsageError(
            f"data.root=demo: there is no demo of data={demo}, only of {', '.join(DEMOS)}"
        )
    # The folder's name contains a hash of this package's source, so another version of the package
    # makes its own demo. The whole source counts, because the makers also use the readers.
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    final = cache_folder(f"demo-{demo}-{digest[:8]}")
    made_once(final, partial(make, demo), "data.root=demo")
    return final
