"""Predictions of runs as an HTML page brings them along: bounded, and of the runs' own folders."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kfac_bench.record.events import Predicted
from kfac_bench.record.runs import Setting, plain, seed
from kfac_bench.training import predictions

MOST_PREDICTIONS, MOST_TEXT = 12, 2000
"""Of a run: examples, and characters of each one's text."""

MOST_PICTURE_BYTES = 24 * 2**20
"""Of all pictures on the page."""


class Album:
    """The predictions on one page; pictures only as long as they are not too much for it."""

    def __init__(self) -> None:
        self._left_bytes = MOST_PICTURE_BYTES

    def of(self, settings: Sequence[Setting]) -> list[dict[str, Any]]:
        """Those of each setting's first run that has any, its last ones."""
        found = []
        for setting in settings:
            for run in setting.runs:
                event = next((e for e in reversed(run.events) if isinstance(e, Predicted)), None)
                if event is None or not isinstance(event.items, list) or not event.items:
                    continue
                items = [x for x in event.items[:MOST_PREDICTIONS] if isinstance(x, dict)]
                found.append(
                    {
                        "optimizer": setting.optimizer,
                        "seed": seed(run),
                        "step": event.step,
                        "items": [self._item(run.path.parent, item) for item in items],
                    }
                )
                break
        return found

    def _item(self, directory: Path, item: dict[str, Any]) -> dict[str, Any]:
        content = predictions.read(directory, item.get("file"))
        if content is not None and len(content) <= self._left_bytes:
            self._left_bytes -= len(content)
            picture = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        else:
            picture = None
        text = item.get("text")
        lines = text[:MOST_TEXT].splitlines() if isinstance(text, str) else []
        return {
            "caption": plain(str(item.get("caption", ""))[:MOST_TEXT]),
            "picture": picture,
            "missing": picture is None and item.get("file") is not None,
            "text": "\n".join(plain(line) for line in lines),
        }
