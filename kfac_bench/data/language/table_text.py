"""Text in a column of Parquet or Arrow files, for language models and for masked tokens.

The text is tokenized once, into a folder of the user's cache. For masked tokens the folder has the
layout of `text_shards`. For language models it has the vocabulary and windows of token ids.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kfac_bench.data.base import tables
from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import Data
from kfac_bench.data.base.files import cache_folder, made_once
from kfac_bench.data.base.in_memory import InMemory
from kfac_bench.data.language import masked_text, prepare, text_shards, wordpiece
from kfac_bench.data.language.documents import Document, is_unicode
from kfac_bench.errors import UsageError
from kfac_bench.output import say

TEXT = ("text", "content")
"""Names of columns that are used if the user names none, the preferred one first."""
ROWS = 256
"""Rows that are tokenized at a time."""
FORMAT = 1
"""Version of the folders in the cache; another version makes its own folders."""


@dataclass(frozen=True)
class TextTable:
    """The options that decide the tokens of a table; None: the usual column, split or vocabulary.

    Attributes:
        root: A file, or a folder of files; see `tables.find`.
        column: The column of the text.
        train_split: Split that is trained on.
        eval_split: Split for evaluation.
        eval_share: Share of the documents for evaluation if there is no such split.
        sequence_length: Tokens of an example.
        vocabulary_file: A vocab.txt. None: the one in `root`, or else a new vocabulary.
        vocabulary_size: Largest number of tokens of a new vocabulary.
    """

    root: Path
    column: str | None = None
    train_split: str = "train"
    eval_split: str | None = None
    eval_share: float = 0.01
    sequence_length: int = 128
    vocabulary_file: Path | None = None
    vocabulary_size: int = 30522


def load_windows(table: TextTable) -> Data:
    """Return windows of text: tokens int64 [n, L], and the next token of each [n, L].

    Windows do not overlap. The documents of a split follow each other, with [SEP] after each.

    Raises:
        UsageError: A column or split does not exist, a file is damaged, or a split has no window.
    """
    folder, notes = _made(table, "windows", _write_windows)
    splits = [_mapped(folder / f"{split}.npy") for split in text_shards.SPLITS]
    vocabulary = wordpiece.read(folder / text_shards.VOCABULARY)
    data = InMemory(
        "text_parquet",
        (splits[0],),
        (splits[1],),
        shape=(table.sequence_length,),
        num_classes=len(vocabulary),
        prepare=_shifted,
    )
    data.tokens, data.notes = vocabulary.tokens, notes
    return data


def load_masked(table: TextTable, workers: int, masked: float, max_predictions: int) -> Data:
    """Return examples with masked tokens; see `masked_text.Text`.

    Raises:
        UsageError: A column or split does not exist, a file is damaged, or a split has no example.
    """
    folder, notes = _made(table, "pairs", _write_pairs)
    data = masked_text.load(
        folder, table.sequence_length, workers, masked=masked, max_predictions=max_predictions
    )
    data.name, data.notes = "text_parquet", notes
    return data


def scan(root: Path) -> str:
    """Read all text. Return in words what the splits have. Raise UsageError as `load_windows`."""
    column, paths, held_out = _chosen(TextTable(root))
    found = list(_documents(column, paths, held_out))
    return (
        f"{len(found)} rows, {sum(not document.text.strip() for document in found)} of them empty"
    )


Source = Callable[[], Iterator[Document]]
Maker = Callable[[TextTable, Source, Path | None, Path], None]


def _made(table: TextTable, kind: str, make: Maker) -> tuple[Path, list[str]]:
    """Return the folder of the cache with the tokens, and a line about what was chosen."""
    column, paths, held_out = _chosen(table)
    vocabulary = table.vocabulary_file
    if vocabulary is None and (table.root / text_shards.VOCABULARY).is_file():
        vocabulary = table.root / text_shards.VOCABULARY
    parts = [str(FORMAT), column, str(held_out), str(table.sequence_length)]
    if held_out is None:
        parts.append(str(table.eval_share))
    parts += [text_shards.sha256(vocabulary) if vocabulary else str(table.vocabulary_size)]
    for path in (path for split in paths.values() for path in split):
        stat = path.stat()
        parts += [str(path.resolve()), str(stat.st_size), str(stat.st_mtime_ns)]
    digest = hashlib.sha256(os.fsencode("\0".join(parts))).hexdigest()
    source = partial(_documents, column, paths, held_out)

    def make_and_say(folder: Path) -> None:
        say(f"{table.root}: is tokenized once, into {final}")
        make(table, source, vocabulary, folder)

    final = cache_folder(f"{kind}-{digest[:16]}")
    made_once(final, make_and_say, str(table.root))
    evaluation = f"the split {held_out}" if held_out else f"{table.eval_share:g} of the documents"
    note = (
        f"{table.root}: text is in the column {column} (data.text_column). Training reads the "
        f"split {table.train_split}, evaluation {evaluation}"
    )
    return final, [note]


def _chosen(table: TextTable) -> tuple[str, dict[str, list[Path]], str | None]:
    """Return the column, the files of the used splits, and the split that is held out or None."""
    splits = tables.find(table.root)
    train, held_out = tables.pick(splits, table.root, table.train_split, table.eval_split)
    first = splits[train][0]
    schema = tables.columns(first)
    column = tables.choose(schema, table.column, TEXT, "data.text_column", first)
    kind = schema.field(column).type
    if str(kind) not in ("string", "large_string", "string_view"):
        raise UsageError(
            f"{first}: the column {column} has the type {kind}, but text is needed. Set "
            "data.text_column"
        )
    return column, {name: splits[name] for name in (train, held_out) if name}, held_out


def _documents(
    column: str, paths: dict[str, list[Path]], held_out: str | None
) -> Iterator[Document]:
    """Yield a document for each row.

    Raises:
        UsageError: A cell is no text. `_chosen` has checked the type of the first file alone.
    """
    for split, files in paths.items():
        is_held_out = None if held_out is None else split == held_out
        rows = tables.Columns(files, (column,))
        for number, text in enumerate(rows):
            where = rows.place(number)
            if not isinstance(text, str | None):
                raise UsageError(
                    f"{where}: the column {column} has an object of type {type(text).__name__}, "
                    "but text is needed. Set data.root to a folder of equal files"
                )
            if text is None or not is_unicode(text):
                yield Document(where, "", is_held_out)
            else:
                yield Document(where, text, is_held_out)


def _write_pairs(table: TextTable, source: Source, vocabulary: Path | None, folder: Path) -> None:
    prepare.prepare(
        source,
        folder,
        vocabulary_file=vocabulary,
        vocabulary_size=table.vocabulary_size,
        sequence_lengths=[table.sequence_length],
        eval_share=table.eval_share,
        about=str(table.root),
    )


def _write_windows(table: TextTable, source: Source, file: Path | None, folder: Path) -> None:
    folder.mkdir(parents=True)
    vocabulary = prepare.vocabulary_of(source, folder, file, table.vocabulary_size)
    tokenizer, end = wordpiece.tokenizer(vocabulary), vocabulary.special("[SEP]")
    tokens: dict[str, list[Tensor]] = {split: [] for split in text_shards.SPLITS}
    for block in _blocks(source()):
        encoded = tokenizer.encode_batch([each.text for each in block], add_special_tokens=False)
        for document, each in zip(block, encoded, strict=True):
            split = "eval" if prepare.is_held_out(document, table.eval_share) else "train"
            if each.ids:
                tokens[split].append(torch.tensor([*each.ids, end], dtype=torch.int32))
    length = table.sequence_length
    for split, parts in tokens.items():
        stream = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)
        if len(stream) <= length:
            raise UsageError(
                f"{table.root} has only {len(stream)} tokens for {split}, and a window has "
                f"{length + 1}. Add text, or set a smaller data.sequence_length"
            )
        np.save(folder / f"{split}.npy", stream.unfold(0, length + 1, length).numpy())


def _blocks(documents: Iterator[Document]) -> Iterator[Sequence[Document]]:
    block: list[Document] = []
    for document in documents:
        block.append(document)
        if len(block) == ROWS:
            yield block
            block = []
    yield block


def _mapped(file: Path) -> Tensor:
    # A private map: torch warns about arrays that cannot be changed.
    windows: Any = np.load(file, mmap_mode="c", allow_pickle=False)
    return torch.from_numpy(windows)


def _shifted(batch: Batch) -> Batch:
    windows = batch[0].long()
    return windows[:, :-1], windows[:, 1:]
