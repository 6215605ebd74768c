"""Predictions of a run for people to look at: ``RUN/predictions/step-<n>/``.

Pictures are PNG files, ``captions.txt`` beside them says what is seen. The event of the run names
them relative to the run directory.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:  # pages of runs are made without torch
    from torch import nn

    from kfac_bench.data.base.batch import Batch
    from kfac_bench.record.events import PredictedItem
    from kfac_bench.tasks.prediction import Picture, Prediction
    from kfac_bench.tasks.task import Task

POOL = 256
"""Of so many examples those to be shown are chosen, if as many fit in an evaluation batch."""

MOST_BYTES, MOST_SIDE = 2 * 2**20, 2048
"""Of a picture that is read: more is none of ours."""

_NAME = re.compile(r"predictions/step-[0-9]{1,20}/[0-9]{1,6}\.png")


def choose(task: Task, model: nn.Module, batches: Iterable[Batch], count: int) -> list[Prediction]:
    """At most ``count`` examples of the first batches, as the task shows them."""
    from kfac_bench.data.base.batch import size

    shown: list[Prediction] = []
    seen = 0
    for batch in filter(size, batches):  # none is left where all were unreadable
        shown += task.show(model, batch, count - len(shown))
        seen += size(batch)
        if len(shown) >= count or seen >= max(POOL, count):
            break
    return shown


def write(
    directory: Path, step: int, shown: Sequence[Prediction]
) -> tuple[list[PredictedItem], str | None]:
    """Write the pictures of ``step`` below the run's ``directory``.

    Returns the items of the event, and what went wrong, if anything did: from there on items have
    no file. What is shown is not worth a run.
    """
    folder = Path("predictions") / f"step-{step}"
    items: list[PredictedItem] = []
    complaint = None
    for number, prediction in enumerate(shown):
        file = None
        if prediction.image is not None and complaint is None:
            file = str(folder / f"{number:02d}.png")
            complaint = _keep(directory / file, _png(prediction.image))
        kept = file if complaint is None else None
        items.append({"caption": prediction.caption, "file": kept, "text": prediction.text})
    if complaint is None:
        lines = "\n\n".join(_described(number, item) for number, item in enumerate(items))
        content = f"{lines}\n".encode("utf-8", "backslashreplace")
        complaint = _keep(directory / folder / "captions.txt", content)
    return items, complaint


def read(directory: Path, name: object) -> bytes | None:
    """The PNG file that an item of an event file names, from below ``directory`` alone.

    None if it is missing, no picture of ours (another name or format, too large) or not really
    there (a link): the event file may be somebody else's.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    try:
        path = directory.resolve(strict=True) / name
        if path.resolve(strict=True) != path or not path.is_file():
            return None
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            return None
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if max(image.size) > MOST_SIDE:
                return None
            image.load()
    except Exception:  # a damaged file makes Pillow raise nearly anything
        return None
    return content


def _png(picture: Picture) -> bytes:
    content = io.BytesIO()
    Image.fromarray(picture).save(content, "PNG")
    return content.getvalue()


def _keep(path: Path, content: bytes) -> str | None:
    """Write the whole file or none; what went wrong."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        return f"{path} cannot be written: {error.strerror}"
    return None


def _described(number: int, item: PredictedItem) -> str:
    return "\n".join([f"{number:02d}  {item['caption']}", *(item["text"] or "").splitlines()])
