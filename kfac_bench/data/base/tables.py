"""Tables of Parquet and Arrow files: the files of a folder by split, and cells by row.

Runs read rows in any order. For one row of a Parquet file, a whole group of rows would have to be
unpacked. So the used columns of a Parquet file are copied once to an Arrow file in the user's
cache. Arrow files are mapped into memory, and their rows are read where they are.
"""

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from kfac_bench.config.option_table import did_you_mean
from kfac_bench.data.base.dataset import of_files
from kfac_bench.data.base.files import cache_folder, one_at_a_time, regular
from kfac_bench.errors import (
    MissingPackageError,
    UsageError,
    one_line,
    shortage,
    unusable_path,
)
from kfac_bench.whole_files import whole_file

ENDINGS = (".parquet", ".arrow", ".feather")
STATE = "state.json"
"""File beside the Arrow files that `datasets.save_to_disk` writes. It names them."""
WORDS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation",
    "val": "validation", "dev": "validation", "test": "test", "testing": "test",
}  # fmt: skip
"""Names of folders that `datasets` wrote, and the split that they mean."""
FILE_WORDS = WORDS | {"eval": "test", "evaluation": "test"}
"""Words in the names of all other files, and the split that they mean on Hugging Face's hub."""
_NUMBERED = re.compile(r"(?!data-)(.+)-\d{5}-of-\d{5}(-[0-9a-f]{16})?")
"""A numbered file of a hub. Its name begins with the split, and older names end with a hash."""
HELD_OUT = ("validation", "test")
"""Splits that can be the evaluation set, the preferred one first."""
ROWS = 64
"""Rows that are copied at a time."""
MOST_RATIO = 200
"""Largest ratio of unpacked size to size of a Parquet file. Texts unpack to 3 to 10 times."""
MOST_BYTES = 256 * 2**20
"""Bytes that a small file may unpack to, whatever the ratio."""


def package() -> Any:
    """Return the package pyarrow with its modules; raise UsageError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise MissingPackageError("pyarrow", "Parquet and Arrow files") from None
    return pyarrow


# ---- the files of a folder


def is_at(root: Path) -> bool:
    """Return whether the path is a table, or a folder with tables in it or one folder below."""
    return next(_tables(root), None) is not None


def _tables(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield from [root] if root.suffix in ENDINGS else []
    for ending in ENDINGS:
        for pattern in (f"*{ending}", f"*/*{ending}"):
            # Spark writes folders with the names of files.
            yield from (path for path in root.glob(pattern) if not path.is_dir())


def find(root: Path) -> dict[str, list[Path]]:
    """Return the files of each split, in the order of their names.

    The split is the text before `-00000-of-00005` in the name of a file, or a word of `FILE_WORDS`
    in the name of the file or of its folder. Other files belong to `train`. Where `datasets` wrote
    a folder, the folder is the split, and only the files that its `state.json` names count: others
    are caches.

    Raises:
        UsageError: There is no such folder, it has no tables, `state.json` is damaged, or numbered
            files of one split lie in several folders, as those of several configurations do.
    """
    if not root.exists():
        raise UsageError(f"{root}: no such file or folder. Set data.root")
    folders = {path.parent for path in _tables(root)}
    named = {folder: _named(folder) for folder in folders if (folder / STATE).is_file()}
    splits: dict[str, list[Path]] = {}
    for path in sorted(_tables(root)):
        if root.is_file() or path.name in named.get(path.parent, {path.name}):
            splits.setdefault(_split(path, root), []).append(path)
    if not splits:
        raise UsageError(
            f"{root} has no files *{', *'.join(ENDINGS)}, and no folder in it has. Set data.root "
            "to the folder of such files"
        )
    for split, paths in splits.items():
        places = {path.parent.name for path in paths if _NUMBERED.fullmatch(path.stem)}
        if len(places) > 1:
            raise UsageError(
                f"{root}: the split {split} is in several folders ({', '.join(sorted(places))}), "
                "which may be other configurations of the dataset. Set data.root to one of them"
            )
    return splits


def _named(folder: Path) -> set[str]:
    try:
        files = json.loads(regular(folder / STATE).read_text(encoding="utf-8"))["_data_files"]
        return {str(file["filename"]) for file in files}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{folder / STATE}: names no data files ({one_line(error)})") from None


def _split(path: Path, root: Path) -> str:
    if root.is_file():
        return "train"
    name = path.parent.name
    # `DatasetDict.save_to_disk` writes a folder for each split.
    if path.parent != root and (path.parent / STATE).is_file():
        return WORDS.get(name.lower(), name)
    if match := _NUMBERED.fullmatch(path.stem):
        split = match[1]
        # In a name with a hash, a word such as `val` has always meant the split `validation`.
        return WORDS.get(split, split) if match[2] else split
    places = [path.stem, *([name] if path.parent != root else [])]
    # A number may follow a word, as in val2017.
    words = [word for place in places for word in re.split(r"[-_. 0-9]", place.lower())]
    return next((FILE_WORDS[word] for word in words if word in FILE_WORDS), "train")


def pick(
    splits: Mapping[str, Sequence[Path]], root: Path, train: str, evaluation: str | None
) -> tuple[str, str | None]:
    """Return the names of the two splits; None: evaluation takes a share of the training split.

    Raises:
        UsageError: A split that was asked for does not exist.
    """
    for option, name in (("train_split", train), ("eval_split", evaluation)):
        if name is not None and name not in splits:
            raise UsageError(
                f"{root} has no split {name}{did_you_mean(name, splits) or ';'} it has "
                f"{', '.join(splits)}. Set data.{option}"
            )
    if evaluation is None:
        evaluation = next((name for name in HELD_OUT if name in splits and name != train), None)
    return train, None if evaluation == train else evaluation


def shares(count: int, share: float) -> tuple[list[int], list[int]]:
    """Divide `count` rows by their index into rows for training and rows that are held out.

    The held-out rows are evenly spread, so each class of a sorted table loses the same share.
    """
    held_out = [i for i in range(count) if int((i + 1) * share) > int(i * share)]
    left = set(held_out)
    return [i for i in range(count) if i not in left], held_out


# ---- columns


def columns(path: Path) -> Any:
    """Return the `pyarrow.Schema` of a file; raise UsageError if it is damaged."""
    pyarrow = package()
    try:
        if path.suffix == ".parquet":
            schema = pyarrow.parquet.read_schema(regular(path), memory_map=True)
        else:
            with _reader(pyarrow, path) as reader:
                schema = reader.schema
        _ = schema.names  # raises ValueError if a name is not UTF-8
        return schema
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise _damaged(path, error) from None


def choose(schema: Any, wanted: str | None, usual: Sequence[str], option: str, path: Path) -> str:
    """Return the name of a column: `wanted`, or else the first of the `usual` ones that exists.

    Raises:
        UsageError: There is no such column.
    """
    if wanted is not None and wanted not in schema.names:
        meant = did_you_mean(wanted, schema.names) or ";"
        raise UsageError(
            f"{option}={wanted}: {path} has no such column{meant} its columns are "
            f"{_listed(schema.names)}"
        )
    chosen = wanted or next((name for name in usual if name in schema.names), None)
    if chosen is None:
        raise UsageError(
            f"{path} has no column {' or '.join(usual)}; its columns are {_listed(schema.names)}. "
            f"Set {option}"
        )
    return chosen


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more


def class_names(schema: Any, column: str) -> list[str]:
    """Return the names of the classes that `datasets` stored with a column of labels, or none."""
    try:
        info = json.loads((schema.metadata or {})[b"huggingface"])["info"]
        names = info["features"][column]["names"]
        return [str(name) for name in names] if isinstance(names, list) else []
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


class Columns:
    """Some columns of all files of a split, mapped into memory. A row has one index in all files.

    Args:
        paths: The files.
        names: The columns.

    Raises:
        UsageError: A file is damaged, or lacks a column.
    """

    def __init__(self, paths: Sequence[Path], names: Sequence[str]) -> None:
        self.paths, self.names = paths, names
        self._open()
        self._ends = list(accumulate(len(table) for table in self._tables))

    def __len__(self) -> int:
        return self._ends[-1]

    def _open(self) -> None:
        self._tables = [_table(path, self.names) for path in self.paths]

    def __getstate__(self) -> dict[str, Any]:
        # Each spawned worker maps the files into its own memory.
        return {"paths": self.paths, "names": self.names, "_ends": self._ends}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def all_of(self, name: str) -> Any:
        """Return a whole column, a `pyarrow.ChunkedArray`.

        Raises:
            UsageError: The column has another type in another file.
        """
        parts = [table[name] for table in self._tables]
        for path, part in zip(self.paths, parts, strict=True):
            if part.type != parts[0].type:
                raise UsageError(
                    f"{path}: the column {name} has the type {part.type}, but {parts[0].type} in "
                    f"{self.paths[0].name}. Set data.root to a folder of equal files"
                )
        chunks = [chunk for part in parts for chunk in part.chunks]
        return package().chunked_array(chunks, type=parts[0].type)

    def cell(self, name: str, row: int) -> Any:
        """Return a cell as a Python object."""
        file = bisect_right(self._ends, row)
        start = self._ends[file - 1] if file else 0
        return self._tables[file][name][row - start].as_py()

    def __iter__(self) -> Iterator[Any]:
        """Yield the cells of the first column, file after file."""
        for table in self._tables:
            for chunk in table[self.names[0]].chunks:
                yield from (cell.as_py() for cell in chunk)

    def place(self, row: int) -> str:
        """Return the file and the row in this file, for messages."""
        file = bisect_right(self._ends, row)
        return f"{self.paths[file]}:row {row - (self._ends[file - 1] if file else 0)}"

    def fingerprint_parts(self, root: Path) -> Iterator[bytes]:
        """Yield the names and sizes of the files, and the names of the columns."""
        yield from of_files(self.paths, root.parent if root.is_file() else root)
        yield "\n".join(self.names).encode()


def _table(path: Path, names: Sequence[str]) -> Any:
    """Return the columns of a file, mapped into memory and checked."""
    pyarrow = package()
    if missing := [name for name in names if name not in columns(path).names]:
        raise UsageError(
            f"{path} has no column {missing[0]}, which other files have. Set data.root to a folder "
            "of equal files"
        )
    try:
        if path.suffix != ".parquet":
            return _read(pyarrow, path, names)
        unpacked = _unpacked(pyarrow, path, names)
        try:
            return _read(pyarrow, unpacked, names)
        except (OSError, ValueError, KeyError, pyarrow.ArrowException):
            unpacked.unlink(missing_ok=True)  # a power cut can have damaged the copy
            return _read(pyarrow, _unpacked(pyarrow, path, names), names)
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        if shortage(error):
            raise
        raise _damaged(path, error) from None


def _read(pyarrow: Any, path: Path, names: Sequence[str]) -> Any:
    """Return these columns of an Arrow file, checked."""
    with _reader(pyarrow, path) as reader:
        table = reader.read_all().select(names)
    # A forged file could have offsets that lead out of its memory.
    table.validate(full=True)
    # Raises ValueError if a name inside a column is not UTF-8.
    table.slice(0, 1).to_pylist()
    return table


def _reader(pyarrow: Any, path: Path) -> Any:
    """Open an Arrow file of either format."""
    with regular(path).open("rb") as opened:
        is_file = opened.read(6) == b"ARROW1"
    mapped = pyarrow.memory_map(str(path))
    return pyarrow.ipc.open_file(mapped) if is_file else pyarrow.ipc.open_stream(mapped)


def _unpacked(pyarrow: Any, path: Path, names: Sequence[str]) -> Path:
    """Return the Arrow file with these columns of a Parquet file; write it if it is not there."""
    stat = path.stat()
    key = "\0".join([str(path.resolve()), str(stat.st_size), str(stat.st_mtime_ns), *names])
    unpacked = cache_folder("tables") / f"{hashlib.sha256(os.fsencode(key)).hexdigest()}.arrow"
    most = max(MOST_BYTES, MOST_RATIO * stat.st_size)
    try:
        with one_at_a_time(unpacked.parent):
            if unpacked.is_file():
                return unpacked
            with pyarrow.parquet.ParquetFile(path, memory_map=True) as parquet:
                batches = parquet.iter_batches(ROWS, columns=list(names), use_threads=False)
                schema = pyarrow.schema([parquet.schema_arrow.field(name) for name in names])
                with whole_file(unpacked) as temporary:
                    _copy(pyarrow, batches, schema, temporary, most)
    except OSError as error:
        if unusable_path(error) is None:
            raise
        raise UsageError(
            f"{unpacked.parent}: cannot be written ({error.strerror}). {path.name} is unpacked "
            "there: set XDG_CACHE_HOME to another folder"
        ) from None
    return unpacked


def _copy(pyarrow: Any, batches: Any, schema: Any, path: Path, most: int) -> None:
    count = 0
    with pyarrow.ipc.new_file(str(path), schema) as writer:
        for batch in batches:
            count += batch.nbytes
            if count > most:
                raise ValueError(f"it unpacks to more than {most} bytes")
            writer.write_batch(batch.select(schema.names))


def _damaged(path: Path, error: Exception) -> UsageError:
    reason = one_line(error)[:200]
    return UsageError(f"{path}: cannot be read as a table ({reason}). Repair or remove the file")
