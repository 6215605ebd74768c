"""What a shard may hold: an uncompressed zip file of plain tensors.

torch.load with weights_only runs no code, but it reads tensors that no checkpoint of ours has and
that training cannot use. A file from somebody else may hold such tensors on purpose.
"""

import pickletools
import zipfile
import zlib
from collections.abc import Iterable
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

MOST_LEVELS = 100
"""Most levels of containers in a shard. A state of ours has about 6."""
MOST_PARTS = 1_000_000
"""Most entries of all containers in a shard together."""
MOST_TUPLES = 20
"""Most levels of tuples in tuples in a shard. A state of ours has about 3."""

_MARK = -1


def check_archive(content: BinaryIO) -> None:
    """Check the zip file before torch reads it, and move back to its start.

    Raises:
        ValueError: The file is no zip file, unpacks to more bytes than it has, or has a pickle that
            would take too long to read.
    """
    size = content.seek(0, 2)
    content.seek(0)
    try:
        with zipfile.ZipFile(content) as archive:
            members = archive.infolist()
            unpacked = sum(member.file_size for member in members)
            # torch.save compresses nothing.
            if unpacked > size:
                raise ValueError(f"it has {size} bytes and unpacks to {unpacked} bytes")
            for member in members:
                if member.filename.endswith("data.pkl"):
                    _check_pickle(archive.read(member))
    # RuntimeError: a member has a password.
    except (zipfile.BadZipFile, zlib.error, RuntimeError, OverflowError, OSError) as error:
        raise ValueError(f"it is no zip file: {error}") from None
    finally:
        content.seek(0)


def _check_pickle(program: bytes) -> None:
    """Check how deep tuples of a pickle are nested, without running it.

    Python computes the hash of a dictionary's key. A tuple that holds a tuple twice, which holds a
    tuple twice, and so on, takes 2^levels steps.

    Raises:
        ValueError: The pickle is damaged, or tuples are nested too deeply.
    """
    stack: list[int] = []  # for each object the levels of tuples in it
    memo: dict[Any, int] = {}
    try:
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if argument is None else argument] = stack[-1]
                continue
            if opcode.name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
                continue
            needed = len(opcode.stack_before)
            if pickletools.markobject in opcode.stack_before:
                needed = opcode.stack_before.index(pickletools.markobject)
                needed += stack[::-1].index(_MARK) + 1
            parts = stack[len(stack) - needed :]
            del stack[len(stack) - needed :]
            levels = max(parts, default=0)
            if "TUPLE" in opcode.name:
                levels = max(levels, 0) + 1
            if levels > MOST_TUPLES:
                raise ValueError(f"it has more than {MOST_TUPLES} levels of tuples")
            stack += [_MARK if opcode.name == "MARK" else levels] * len(opcode.stack_after)
    except (IndexError, KeyError, RecursionError) as error:
        raise ValueError(f"its pickle is damaged ({error})") from None


def check_tensors(shard: Any) -> None:
    """Check that all tensors in nested containers are plain, and that the containers are small.

    Raises:
        ValueError: A tensor is sparse, quantized, complex or of another unusual kind, or several
            of its elements share one place in memory. The message names the tensor. Or a container
            occurs in itself or so often that no program could read all of it.
    """
    remaining: list[tuple[tuple[Any, ...], Any]] = [((), shard)]
    count = 0
    while remaining:
        keys, value = remaining.pop()
        count += 1
        if len(keys) > MOST_LEVELS or count > MOST_PARTS:
            raise ValueError(f"it has more than {MOST_LEVELS} levels or {MOST_PARTS} parts")
        if isinstance(value, Tensor):
            if oddity := _oddity(value):
                raise ValueError(f"{'.'.join(map(str, keys))} {oddity}")
        elif isinstance(value, dict | list | tuple):
            parts: Iterable[tuple[Any, Any]]
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            remaining += [((*keys, key), part) for key, part in parts]


def _oddity(x: Tensor) -> str | None:
    """Return why a tensor is not plain, as the rest of a sentence; None if it is plain."""
    if x.layout is not torch.strided:
        return f"is sparse ({x.layout})"
    if x.is_quantized:
        return f"is quantized ({x.dtype})"
    if x.is_complex():
        return f"is complex ({x.dtype})"
    if type(x) not in (Tensor, nn.Parameter) or x.is_nested or x.device.type != "cpu":
        return f"is no plain tensor ({type(x).__name__} on {x.device})"
    if _overlaps(x):
        return f"has the shape {list(x.shape)} with the strides {list(x.stride())}, which overlap"
    return None


def _overlaps(x: Tensor) -> bool:
    """Return whether two elements may share one place in memory, as after `expand`."""
    if x.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
