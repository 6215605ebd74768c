"""The predictions on an HTML page: limited in size, and only from the folders of the runs."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kfac_bench.record.events import Predicted
from kfac_bench.record.runs import Setting, plain, seed
from kfac_bench.training import predictions

MOST_PREDICTIONS, MOST_TEXT = 12, 2000
"""Limits per run: the number of examples, and the characters of each example's text."""

MOST_PICTURE_BYTES = 24 * 2**20
"""Limit for all pictures on the page."""


class Album:
    """The predictions on one page. After the limit of bytes it shows captions without pictures."""

    def __init__(self) -> None:
        self._left_bytes = MOST_PICTURE_BYTES

    def of(self, settings: Sequence[Setting]) -> list[dict[str, Any]]:
        """Return the last predictions of each setting's first run that has predictions."""
        return [found for setting in settings for found in self._of_setting(setting)]

    def _of_setting(self, setting: Setting) -> list[dict[str, Any]]:
        for run in setting.runs:
            event = next((e for e in reversed(run.events) if isinstance(e, Predicted)), None)
            # Event files are not trusted: any JSON value may stand where a list belongs.
            if event is None or not isinstance(event.items, list) or not event.items:
                continue
            items = [x for x in event.items[:MOST_PREDICTIONS] if isinstance(x, dict)]
            prediction = {
                "optimizer": setting.optimizer,
                "seed": seed(run),
                "step": event.step,
                "items": [self._item(run.path.parent, item) for item in items],
            }
            return [prediction]
        return []

    def _item(self, directory: Path, item: dict[str, Any]) -> dict[str, Any]:
        content = predictions.read(directory, item.get("file"))
        # predictions.read returns None for a file outside of the run's folder.
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
