"""Downloading one file over HTTP. A download that broke is continued by the next attempt.

The caller checks the content: a server or a proxy may send anything.
"""

import http.client
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from kfac_bench.counted import counted
from kfac_bench.errors import UsageError

TIMEOUT_S = 30
CHUNK_BYTES = 1 << 16
NOTHING_LEFT = 416
"""Status of a server that is asked for bytes after the end of a file."""


def check_url(url: str) -> None:
    """Raise `UsageError` if `url` is no address of a web server.

    urllib opens local files too (file://), which no address of a server may do.
    """
    try:
        parts = urlsplit(url)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_web = False
    if not is_web or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError(f"{url}: must be an address that begins with http:// or https://")


def download(url: str, partial: Path, most_bytes: int) -> None:
    """Download `url` to `partial`. If `partial` has a beginning already, get only the rest.

    Args:
        url: Address of the file.
        partial: Where the file is written. After a broken connection it stays for the next attempt.
        most_bytes: Largest size that is allowed.

    Raises:
        UsageError: The server cannot be reached or refuses, the connection breaks, or the file is
            too large.
        OSError: `partial` cannot be written.
    """
    done = partial.stat().st_size if partial.exists() else 0
    response = _open(url, done)
    if response is None:
        return
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            done = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            partial.unlink()
            raise UsageError(f"{url}: the server sent another part. Run the same command again")
        with partial.open("r+b" if done else "wb") as file:
            file.seek(done)
            while chunk := _read(response, url, done):
                done += file.write(chunk)
                if done > most_bytes:
                    partial.unlink()
                    raise UsageError(f"{url}: has more than {most_bytes:,} bytes: another file")
    if response.length:
        raise _cut(url, done)


def _open(url: str, done: int) -> http.client.HTTPResponse | None:
    """Return the answer of the server, or None if all bytes are there already."""
    headers = {"Range": f"bytes={done}-"} if done else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 (check_url has checked)
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(  # noqa: S310
            request, timeout=TIMEOUT_S
        )
    except urllib.error.HTTPError as error:
        error.close()
        if done and error.code == NOTHING_LEFT:
            return None
        raise UsageError(f"{url}: the server answers {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UsageError(f"{url}: cannot be reached ({reason})") from None
    return response


def _read(response: http.client.HTTPResponse, url: str, done: int) -> bytes:
    try:
        return response.read(CHUNK_BYTES)
    except (OSError, http.client.HTTPException):
        raise _cut(url, done) from None


def _cut(url: str, done: int) -> UsageError:
    return UsageError(
        f"{url}: the connection broke after {counted(done, 'byte')}. "
        "Run the same command again to continue"
    )
