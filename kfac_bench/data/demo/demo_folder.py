"""Demo datasets in published layouts: made by `kfac-data make-demo`, and by `data.root=demo`."""

import hashlib
import os
import shutil
import tempfile
from importlib import import_module
from pathlib import Path

from kfac_bench.errors import UsageError

DEMOS = {
    "imagenet": "kfac_bench.data.demo.demo_images:make_imagenet",
    "shards": "kfac_bench.data.demo.demo_images:make_shards",
    "cifar10": "kfac_bench.data.demo.demo_digits:make_cifar10",
    "fashion_mnist": "kfac_bench.data.demo.demo_digits:make_fashion_mnist",
    "lgg": "kfac_bench.data.demo.demo_images:make_lgg",
    "coco": "kfac_bench.data.demo.demo_images:make_coco",
    "squad": "kfac_bench.data.demo.demo_language:make_squad",
    "text": "kfac_bench.data.demo.demo_language:make_text",
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
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kfac_bench"
    final = cache / f"demo-{demo}-{digest[:8]}"
    try:
        if not final.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=f"{final.name}-") as scratch:
                make(demo, Path(scratch) / "made")
                _move(Path(scratch) / "made", final)
    except OSError as error:
        raise UsageError(f"data.root=demo: {final} cannot be written ({error.strerror})") from None
    return final


def _move(made: Path, final: Path) -> None:
    """Move a complete demo into place, unless another rank was faster."""
    try:
        made.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(made)
