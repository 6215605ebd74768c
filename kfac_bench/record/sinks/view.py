"""What all loggers share: the run that they show, and files whose failure ends no training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kfac_bench.config import LoggerConfig
from kfac_bench.record.events import Event


def _say_nothing(line: str) -> None: ...


@dataclass(frozen=True)
class ShownRun:
    """A run as a logger needs to know it.

    ``config`` has all options and the environment. ``metric`` is the main validation metric.
    ``say`` prints a line.
    """

    directory: Path
    run_id: str = ""
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    config: Mapping[str, Any] = field(default_factory=dict)
    metric: str = "loss"
    higher_is_better: bool = False
    say: Callable[[str], None] = _say_nothing


class FileView:
    """A view in files of the run directory.

    A failure, such as a full disk, is printed once; it ends the view but not the training.
    """

    name: str

    def __init__(self, run: ShownRun) -> None:
        self._run = run
        self._is_broken = False

    def write(self, event: Event) -> None:
        """Show the event."""
        self._guard(lambda: self._write(event))

    def close(self) -> None:
        """Close the files."""
        self._guard(self._close)

    def _write(self, event: Event) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def _guard(self, action: Callable[[], None]) -> None:
        if self._is_broken:
            return
        try:
            action()
        except Exception as error:
            self._is_broken = True
            self._run.say(f"{self.name} failed ({error}): training goes on without it")
