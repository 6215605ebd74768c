"""Reading arrays out of a pickle that may come from anyone: nothing in it is executed."""

import io
import pickle  # only as the base of an unpickler that can build nothing
import pickletools

import numpy as np
from numpy.typing import NDArray


class _Array:
    """Stands for numpy.ndarray and its `_reconstruct`; keeps what the pickle says, unread.

    numpy itself is no safe stand-in: ndarray.__setstate__ believes a forged dtype, which makes
    raw bytes into object pointers. `__setstate__` and the slots also keep a pickle from setting
    attributes on these classes.
    """

    __slots__ = ("state",)
    state: object

    def __init__(self, *arguments: object) -> None:
        self.state = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Buffered(_Array):
    """Stands for numpy's `_frombuffer(buffer, dtype, shape, order)`, pickle protocol 5."""

    __slots__ = ()

    def __init__(
        self, buffer: object, dtype: object, shape: object, order: object, *_: object
    ) -> None:
        self.state = (1, shape, dtype, order == "F", buffer)


class _DType:
    """Stands for numpy.dtype; only its type code, as "u1", is kept."""

    __slots__ = ("code",)

    def __init__(self, code: object = None, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass  # byte order and fields: meaningless for bytes, the only type read here


_ALLOWED: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
    ("numpy.core.multiarray", "_reconstruct"): _Array,  # numpy 1, and the published archives
    ("numpy._core.multiarray", "_reconstruct"): _Array,  # numpy 2
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
    """Unpickle plain containers, numbers, strings and arrays; Python 2 strings become bytes.

    Arrays come back as opaque stand-ins for `uint8_array`. Raises ValueError, whose message
    says why, on anything else: a forbidden name (before it is imported) or a damaged pickle.
    """
    try:
        _check_memo(content)
        return _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # the documentation of pickle: any exception may come out
        raise ValueError(str(error) or type(error).__name__) from error


def _check_memo(content: bytes) -> None:
    """Python's own reader makes a table as long as the largest number an object is kept under."""
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            assert isinstance(argument, int)
            if not 0 <= argument <= len(content):
                raise ValueError(f"an object in it has the number {argument}")


def uint8_array(value: object) -> NDArray[np.uint8]:
    """Turn a stand-in from `loads` into the uint8 array that was pickled.

    Raises ValueError if it is not an array of uint8 whose shape and bytes agree.
    """
    match getattr(value, "state", None):
        case (_, tuple(shape), _DType(code="u1" | b"u1"), fortran, bytes() | bytearray() as raw):
            if not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"{shape} is no shape of an array")
            array = np.frombuffer(raw, np.uint8)
            return array.reshape(shape, order="F" if fortran else "C")
    raise ValueError("an array of uint8 is missing")
