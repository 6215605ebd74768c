"""Folders that cannot be used. The tests may run as root, which may use every folder."""

import errno
import os
from pathlib import Path


def deny_listing(monkeypatch, folder):
    """Let the listing of this folder fail, as if its permissions forbade the listing."""
    scan = os.scandir

    def scan_others(path="."):
        if str(path) == str(folder):  # it may be a descriptor
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_others)


def deny_entering(monkeypatch, folder):
    """Let each use of an entry of this folder fail, although the names can be listed."""

    def denied(call):
        def of_others(path, *given, **options):
            if isinstance(path, str | os.PathLike) and Path(path).parent == folder:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *given, **options)

        return of_others

    for name in ("lstat", "open", "stat"):
        monkeypatch.setattr(os, name, denied(getattr(os, name)))
