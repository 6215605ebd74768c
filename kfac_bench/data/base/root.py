"""The folder that a dataset is read from."""

from pathlib import Path

from kfac_bench.config.data import DataConfig
from kfac_bench.data.demo import demo_folder
from kfac_bench.errors import UsageError


def root_of(config: DataConfig) -> Path:
    """Return ``data.root``; with ``data.root=demo`` make the demo dataset first, if need be.

    Raises :class:`UsageError` if ``data.root`` is not set.
    """
    if config.root is None:
        raise UsageError(
            f"data={config.name} is read from disk: set data.root=FOLDER (data.root=demo: a demo)"
        )
    return demo_folder.folder(config.name) if config.root == "demo" else Path(config.root)
