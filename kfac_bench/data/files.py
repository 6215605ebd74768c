"""The base class of the options of datasets that are read from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.data import DataConfig
from kfac_bench.data.demo import demo_folder
from kfac_bench.errors import UsageError
from kfac_bench.output import counted

if TYPE_CHECKING:
    from kfac_bench.data.base.unreadable import Unreadable


@dataclass
class FilesConfig(DataConfig):
    """A dataset that is read from the folder `data.root`."""

    reads_folder: ClassVar[bool] = True
    demo: ClassVar[str] = ""
    """Name in :data:`demo_folder.DEMOS`; empty: the name of the dataset."""

    def folder(self) -> Path:
        """Return ``data.root``; with ``data.root=demo`` make the demo first, if need be.

        Raises:
            UsageError: ``data.root`` is not set, or the demo cannot be written.
        """
        if self.root is None:
            raise UsageError(
                f"data={self.name} is read from disk: set data.root=FOLDER "
                "(data.root=demo makes a small demo)"
            )
        return (
            demo_folder.folder(self.demo or self.name) if self.root == "demo" else Path(self.root)
        )

    @classmethod
    def is_at(cls, root: Path) -> bool:
        """Return whether the folder has this dataset's layout."""
        raise NotImplementedError

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        """Read every file, for ``kfac-data verify``.

        Returns:
            What the folder has, in words, and its faults.

        Raises:
            UsageError: Nothing in the folder can be used.
        """
        raise NotImplementedError


def by_split(counts: Mapping[str, int], noun: str) -> str:
    """Return the number of examples of each split, in words."""
    return ", ".join(f"{counted(n, noun)} in {split}" for split, n in counts.items())
