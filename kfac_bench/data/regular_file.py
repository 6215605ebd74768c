"""Files of datasets must be regular: reading a FIFO or a device could last forever."""

import errno
from pathlib import Path


def regular(path: Path) -> Path:
    """Return the path, if it is a regular file or a link to one, or if nothing is there.

    Raises:
        OSError: It is a FIFO, a device or a socket.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path
