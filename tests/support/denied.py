"""Folders that cannot be listed. The tests may run as root, which may list every folder."""

import errno
import os


def deny_listing(monkeypatch, folder):
    """Let the listing of this folder fail, as if its permissions forbade the listing."""
    scan = os.scandir

    def scan_others(path="."):
        if os.fspath(path) == str(folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_others)
