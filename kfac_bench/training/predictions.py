"""Predictions of a run, for people to look at: `RUN/predictions/step-<n>/`.

Pictures are PNG files; `captions.txt` describes them. The run's event names the files relative to
the run directory. The trainer writes them here, and pages and dashboards read them here.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from kfac_bench.errors import UsageError
from kfac_bench.record.own_files import refuse_special
from kfac_bench.whole_files import whole_file

# Reports and dashboards read pictures without torch.
if TYPE_CHECKING:
    from torch import nn

    from kfac_bench.data.base.batch import Batch
    from kfac_bench.record.events import PredictedItem
    from kfac_bench.tasks.task import Picture, Prediction, Task

POOL = 256
"""Number of examples from which a task chooses what to show, if an evaluation batch holds them."""

MOST_BYTES, MOST_SIDE = 2 * 2**20, 2048
"""Largest file and largest side in pixels of a picture to read. A run writes smaller ones."""

_NAME = re.compile(r"predictions/step-[0-9]{1,20}/[0-9]{1,6}\.png")


def choose(task: Task, model: nn.Module, batches: Iterable[Batch], count: int) -> list[Prediction]:
    """Return at most `count` examples of the first batches, as the task shows them."""
    from kfac_bench.data.base.batch import size

    shown: list[Prediction] = []
    seen = 0
    # A batch is empty if none of its examples could be read.
    for batch in filter(size, batches):
        shown += task.show(model, batch, count - len(shown))
        seen += size(batch)
        if len(shown) >= count or seen >= max(POOL, count):
            break
    return shown


def write(
    directory: Path, step: int, shown: Sequence[Prediction]
) -> tuple[list[PredictedItem], str | None]:
    """Write the pictures of `step` below the run's `directory`.

    A failure does not end the run: the remaining items have no file.

    Returns:
        The items of the run's event, and a complaint if a file could not be written.
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
    """Return the PNG file that an item of an event file names, from below `directory` alone.

    The event file may come from somebody else. The answer is therefore None for every file that a
    run does not write: one with another name or format, one that is too large, or a link.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    try:
        path = directory.resolve(strict=True) / name
        # The two paths differ if any part of the path is a link.
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
    except Exception:
        # Pillow raises nearly any exception type for a damaged file.
        return None
    return content


def _png(picture: Picture) -> bytes:
    content = io.BytesIO()
    Image.fromarray(picture).save(content, "PNG")
    return content.getvalue()


def _keep(path: Path, content: bytes) -> str | None:
    """Write the file as a whole, and return the problem if that fails.

    The run directory may come from somebody else, so links below it are never followed.
    """
    try:
        # The outer folder comes first: the inner one would be made behind a link.
        for folder in (path.parent.parent, path.parent):
            refuse_special(folder, folder=True)
            folder.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            temporary.write_bytes(content)
    except UsageError as error:
        return str(error)
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return None


def _described(number: int, item: PredictedItem) -> str:
    return "\n".join([f"{number:02d}  {item['caption']}", *(item["text"] or "").splitlines()])
