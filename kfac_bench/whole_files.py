"""Files that are written as a whole.

Every file that replaces another file is written with :func:`whole_file`.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kfac_bench.errors import UsageError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to. At the end of the block, the file there becomes `path`.

    At any time, a reader sees the whole old file or the whole new file. If the block raises an
    error, `path` stays as it is. Several processes may write the same file: the last one wins.
    """
    # Processes on two hosts may have one pid, and nobody can put a link under an unknown name.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_text(path: Path, text: str, name: str = "", *, make_folder: bool = False) -> None:
    """Write `text` to `path` as a :func:`whole_file`.

    Args:
        path: The file to write.
        text: All of its content.
        name: What an error message calls the file, such as ``--out plan.json``; default: its path.
        make_folder: Whether to create the folder of the file.

    Raises:
        UsageError: The file cannot be written.
    """
    if not path.name:  # "." or "/", or an empty word, which is "." as a path
        raise UsageError(f"{name or path}: cannot be written (it is a folder). Name a file")
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            # A device such as /dev/stdout takes the text itself. A rename would replace the device.
            path.write_text(text, encoding="utf-8")
            return
        with whole_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{name or path}: cannot be written ({error.strerror})") from None


def around_marks(page: Path, begin: str, end: str, option: str) -> tuple[str, str]:
    """Return the text of a page before and after two marks; all between them is made by a command.

    Args:
        page: The page.
        begin: The mark where the made text begins.
        end: The mark where it ends.
        option: The option that named the page, for messages.

    Raises:
        UsageError: The page cannot be read, or it lacks a mark.
    """
    try:
        old = page.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option} {page}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UsageError(f"{option} {page}: is no text in UTF-8. Name another page") from None
    before, found, rest = old.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise UsageError(f"{option} {page}: add the lines {begin} and {end}")
    return before, after
