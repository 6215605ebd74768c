"""Reading compressed files that may come from anyone: what they unpack to is limited.

A few kilobytes of a hostile archive unpack to terabytes, which would fill the memory or run for
days.
"""

import io


class Unpacked(io.RawIOBase):
    """The unpacked content of a file, as a stream that ends with an error beyond a limit."""

    def __init__(self, packed: io.BufferedIOBase, most: int, why: str) -> None:
        """Wrap a stream that unpacks.

        Args:
            packed: The stream, such as that of `gzip.open`. Closing this object closes it too.
            most: Most bytes that may be read.
            why: The end of the error message, for example how large the file may be.
        """
        self._packed, self._most, self._why = packed, most, why
        self._count = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill a part of the buffer; see `io.RawIOBase`.

        Raises:
            OSError: The limit is exceeded.
        """
        content = self._packed.read(min(len(buffer), 1 << 20))
        self._count += len(content)
        if self._count > self._most:
            raise OSError(f"it unpacks to more than {self._most} bytes, {self._why}")
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        """Close the stream that unpacks, too."""
        self._packed.close()
        super().close()
