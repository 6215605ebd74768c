"""Files of torch that may come from somebody else: what to check before torch.load reads them.

torch.load with weights_only runs no code. But a small file can unpack to gigabytes, or hold a key
of a dictionary whose hash takes for ever. Checkpoints and readers of weights call these checks.
"""

import pickletools
import zipfile
from typing import Any, BinaryIO

import torch

MOST_WORK = 200_000_000
"""Most entries that reading a pickle may visit, an entry counted once for each container in it.

A state of ours with 100,000 tensors has about 25,000,000.
"""

_ZIP = b"PK\x03\x04"
"""The first bytes by which torch recognizes its zip files. Otherwise it reads the old format."""
_OLD_PICKLES = 5
"""Number of pickles at the start of a file in torch's old format. Plain bytes follow."""
_MAKES_BYTES = frozenset({"builtins bytearray", "__builtin__ bytearray", "_codecs encode"})
"""Calls that torch allows in a pickle and that weights do not need. They make as many bytes as the
pickle says."""
_FILLS = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})


def check_archive(content: BinaryIO) -> None:
    """Check a zip file before torch reads it, and move back to its start.

    Raises:
        ValueError: The file is no zip file, unpacks to more bytes than it has, or has a pickle that
            would take too long to read.
    """
    size = content.seek(0, 2)
    content.seek(0)
    try:
        if content.read(len(_ZIP)) != _ZIP:
            raise ValueError("it is no zip file: it begins with other bytes")
        content.seek(0)
        with zipfile.ZipFile(content) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        # torch.save compresses nothing.
        if unpacked > size:
            raise ValueError(f"it has {size} bytes and unpacks to {unpacked} bytes")
        content.seek(0)
        # torch's own reader: zipfile could find another member in a file that was made on purpose.
        program = torch._C.PyTorchFileReader(content).get_record("data.pkl")
    except (zipfile.BadZipFile, RuntimeError, OverflowError, OSError) as error:
        raise ValueError(f"it is no zip file: {error}") from None
    finally:
        content.seek(0)
    check_pickle(program)


def check_weights(content: BinaryIO) -> None:
    """Check a file of weights before torch reads it: a zip file, or a file in the old format.

    Raises:
        ValueError: As `check_archive`.
    """
    is_zip = content.read(len(_ZIP)) == _ZIP
    content.seek(0)
    if is_zip:
        check_archive(content)
        return
    try:
        for _ in range(_OLD_PICKLES):
            check_pickle(content)
    finally:
        content.seek(0)


def check_pickle(program: bytes | BinaryIO) -> None:
    """Check how much work reading a pickle is, without running it.

    Python computes the hash of a dictionary's key. A tuple that holds a tuple twice, which holds a
    tuple twice, and so on, takes 2^levels steps.

    Raises:
        ValueError: The pickle is damaged, makes bytes, or has more work than `MOST_WORK`.
    """
    # For each object a list with its number of entries, inner ones included. A filled container
    # changes the number in this list, so that the memo has it too. None is a mark.
    stack: list[list[int] | None] = []
    memo: dict[Any, list[int] | None] = {}
    work = 0
    try:
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if argument is None else argument] = stack[-1]
                continue
            if opcode.name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
                continue
            if opcode.name == "MARK":
                stack.append(None)
                continue
            if opcode.name == "GLOBAL" and argument in _MAKES_BYTES:
                raise ValueError(f"it holds no tensors alone, but calls {argument}")
            needed = len(opcode.stack_before)
            if pickletools.markobject in opcode.stack_before:
                needed = opcode.stack_before.index(pickletools.markobject)
                needed += stack[::-1].index(None) + 1
            if needed > len(stack):
                raise IndexError("it takes more than it has")
            parts = [part for part in stack[len(stack) - needed :] if part is not None]
            del stack[len(stack) - needed :]
            entries = sum(part[0] for part in parts)
            work += entries
            if work > MOST_WORK:
                raise ValueError(f"it has more than {MOST_WORK:,} entries to read")
            made = [1 + entries]
            if opcode.name in _FILLS:
                made = parts[0]
                made[0] = entries
            stack += [made] * len(opcode.stack_after)
    except (IndexError, KeyError, RecursionError) as error:
        raise ValueError(f"its pickle is damaged ({error})") from None
