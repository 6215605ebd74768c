"""`kfac-data fetch`: copies or downloads the files of MNIST and Fashion-MNIST."""

import hashlib
import http.client
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from kfac_bench.data.images import idx_images
from kfac_bench.errors import UsageError
from kfac_bench.whole_files import whole_file

MOST_DOWNLOAD_BYTES = 32 * 2**20
"""More than the largest of the published files has."""
TIMEOUT_S = 30


def fetch(
    root: Path,
    url: str | None,
    say: Callable[[str], None],
    dataset: idx_images.IdxDataset = idx_images.FASHION_MNIST,
) -> None:
    """Put the four files into `root`, which is made if it does not exist, and read them.

    Args:
        root: The folder. Files of these names that it has already are kept.
        url: Address of a folder with the four .gz files. None: Debian's package if it is installed,
            else the address of the authors.
        say: Prints a line for each file.
        dataset: The dataset.

    Raises:
        UsageError: A file cannot be had or is damaged, or `root` cannot be written.
    """
    from torchvision import datasets

    published = getattr(datasets, dataset.published)
    if url is not None and not url.startswith(("http://", "https://")):
        raise UsageError(f"{url}: must be an address that begins with http:// or https://")
    try:
        root.mkdir(parents=True, exist_ok=True)
        for file, md5 in published.resources:
            name = file.removesuffix(".gz")
            installed = idx_images.path_of(idx_images.DEBIAN, name)
            if idx_images.path_of(root, name).exists():
                say(f"{name}: was there already")
            elif url is None and dataset == idx_images.FASHION_MNIST and installed.is_file():
                with whole_file(root / installed.name) as temporary:
                    shutil.copyfile(installed, temporary)
                say(f"{name}: copied from {installed}")
            else:
                address = f"{(url or published.mirrors[0]).rstrip('/')}/{file}"
                content = _download(address, md5, dataset)
                with whole_file(root / file) as temporary:
                    temporary.write_bytes(content)
                say(f"{name}: downloaded from {address}")
    except OSError as error:
        raise UsageError(f"{root}: cannot be written ({error.strerror or error})") from None
    idx_images.load(root, dataset=dataset)


def _download(address: str, md5: str, dataset: idx_images.IdxDataset) -> bytes:
    """Return a file of a web server.

    Raises:
        UsageError: The server cannot be reached, or the file is not the published one.
    """
    other_ways = "Use another --url"
    if dataset == idx_images.FASHION_MNIST:
        other_ways += ", or install Debian's package dataset-fashion-mnist"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as response:  # noqa: S310 (checked)
            content: bytes = response.read(MOST_DOWNLOAD_BYTES)
    except urllib.error.HTTPError as error:
        error.close()
        raise UsageError(
            f"{address}: the server answers {error.code} {error.reason}. {other_ways}"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UsageError(f"{address}: cannot be reached ({reason}). {other_ways}") from None
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise UsageError(
            f"{address}: is not the published file, or the connection broke: its MD5 is wrong. "
            f"Run the same command again. {other_ways}"
        )
    return content
