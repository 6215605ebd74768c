"""Demo sets in real layouts: made by ``kfac-data make-demo``, and by ``data.root=demo``."""

import hashlib
import os
import shutil
import tempfile
from importlib import import_module
from pathlib import Path

from kfac_bench.errors import UsageError

LAYOUTS = {
    "imagenet": "demo_imagenet",
    "shards": "demo_shards",
    "cifar10": "demo_cifar10",
    "lgg": "demo_lgg",
    "coco": "demo_coco",
    "squad": "demo_squad",
    "text": "demo_text",
}
"""By name, the module whose ``make(root)`` writes it."""

_LAYOUT_OF = {
    **{name: name for name in ("shards", "cifar10", "lgg", "coco", "squad", "text")},
    "imagefolder": "imagenet",
}
"""By the name of the data set that reads it."""


def make(layout: str, root: Path) -> None:
    """Write the demo; raises :class:`UsageError` where there is something in its place."""
    import_module(f"kfac_bench.data.demo.{LAYOUTS[layout]}").make(root)


def folder(data: str) -> Path:
    """Where the demo of a data set lies: in the user's cache, made there when first asked for.

    Its name depends on this package's source: another version makes its own. Raises
    :class:`UsageError` for data without a demo, or if the cache cannot be written.
    """
    layout = _LAYOUT_OF.get(data)
    if layout is None:
        raise UsageError(
            f"data.root=demo: there is no demo of data={data}, only of {', '.join(_LAYOUT_OF)}"
        )
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))  # makers use much of this package
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kfac_bench"
    place = cache / f"demo-{layout}-{digest[:8]}"
    try:
        if not place.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=f"{place.name}-") as scratch:
                make(layout, Path(scratch) / "made")
                _move(Path(scratch) / "made", place)
    except OSError as error:
        raise UsageError(f"data.root=demo: {place} cannot be written ({error.strerror})") from None
    return place


def _move(made: Path, place: Path) -> None:
    """At once or not at all; another rank's copy, if that was faster, is as good."""
    try:
        made.rename(place)
    except OSError:
        if not place.is_dir():
            raise
        shutil.rmtree(made)
