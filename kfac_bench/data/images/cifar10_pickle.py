"""Reading the uint8 arrays of a pickle that may come from anyone.

A pickle is a program, which can import and call anything. This reader executes none of it: it knows
six names, and replaces each of them by a class that only stores its arguments.
"""

import io
import pickle
import pickletools

import numpy as np
from numpy.typing import NDArray


class _Array:
    """Replaces numpy.ndarray and its `_reconstruct`; stores the state without using it.

    numpy's own classes are not safe: ndarray.__setstate__ trusts a forged dtype, which turns raw
    bytes into object pointers. `__setstate__` and the slots also prevent a pickle from setting
    attributes on these classes.
    """

    __slots__ = ("state",)
    state: object

    def __init__(self, *arguments: object) -> None:
        self.state = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Buffered(_Array):
    """Replaces numpy's `_frombuffer(buffer, dtype, shape, order)` of pickle protocol 5."""

    __slots__ = ()

    def __init__(
        self, buffer: object, dtype: object, shape: object, order: object, *_: object
    ) -> None:
        self.state = (1, shape, dtype, order == "F", buffer)


class _DType:
    """Replaces numpy.dtype; stores only the type code, for example "u1"."""

    __slots__ = ("code",)

    def __init__(self, code: object = None, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        # The state has byte order and fields, which single bytes do not need.
        pass


_ALLOWED: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
    # numpy 1 (and the published archives) has numpy.core, numpy 2 has numpy._core.
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _Buffered,
    ("numpy._core.numeric", "_frombuffer"): _Buffered,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise ValueError(f"it asks for {f'{module}.{name}'!r}, which is not allowed") from None


def loads(content: bytes) -> object:
    """Unpickle plain containers, numbers, strings and arrays. Python 2 strings become bytes.

    Arrays become opaque objects, which `uint8_array` converts.

    Raises:
        ValueError: The pickle is damaged, or names something else. A forbidden name is not
            imported.
    """
    try:
        _check_memo(content)
        return _Unpickler(io.BytesIO(content), encoding="bytes").load()
    # By its documentation, pickle may raise any exception for damaged content.
    except Exception as error:
        raise ValueError(str(error) or type(error).__name__) from error


def _check_memo(content: bytes) -> None:
    """Refuse absurd memo numbers.

    Python's unpickler allocates a table as long as the largest number under which a pickle
    memorizes an object. A few bytes could thus allocate all memory.
    """
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            assert isinstance(argument, int)
            if not 0 <= argument <= len(content):
                raise ValueError(f"an object in it has the number {argument}")


def uint8_array(value: object) -> NDArray[np.uint8]:
    """Convert an array from the result of `loads`.

    Raises:
        ValueError: It is not a uint8 array, or its shape does not match its number of bytes.
    """
    match getattr(value, "state", None):
        case (_, tuple(shape), _DType(code="u1" | b"u1"), fortran, bytes() | bytearray() as raw):
            if not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"{shape} is not the shape of an array")
            array = np.frombuffer(raw, np.uint8)
            return array.reshape(shape, order="F" if fortran else "C")
    raise ValueError("an array of uint8 is missing")
