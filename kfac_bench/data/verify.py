"""``kfac-data verify``: finds missing and damaged files of a dataset before a run needs them."""

from pathlib import Path

from kfac_bench.config.registry import DATASETS, options_class
from kfac_bench.data.base.unreadable import Unreadable
from kfac_bench.data.files import FilesConfig
from kfac_bench.errors import UsageError


def verify(root: Path) -> tuple[str, list[Unreadable]]:
    """Read every file of the dataset in `root`.

    Returns:
        The name of the dataset and what it has, in words; and its faults.

    Raises:
        UsageError: The folder does not exist, has an unknown layout, or nothing in it can be used.
    """
    if not root.exists():
        raise UsageError(f"{root}: no such folder")
    known = {name: options_class("data", name) for name in DATASETS}
    # A folder has one layout; if it has several, the first one in the table counts.
    for name, dataset in known.items():
        if issubclass(dataset, FilesConfig) and dataset.is_at(root):
            content, faults = dataset.scan(root)
            return f"{name}: {content}", faults
    names = ", ".join(name for name, dataset in known.items() if issubclass(dataset, FilesConfig))
    raise UsageError(
        f"{root} has the layout of no known dataset ({names}). "
        "kfac-data make-demo writes an example of each layout"
    )
