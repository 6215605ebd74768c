"""kfac-data fetch: from a real server on this machine, and from Debian's package."""

import gzip
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from torchvision.datasets import MNIST, FashionMNIST

from kfac_bench.data.images import fetch_idx_images, idx_images
from tests.cli.test_kfac_data import run
from tests.data.images.test_idx_images import write_files

NAMES = idx_images.NAMES
FIRST = f"{NAMES[0]}.gz"


class Handler(BaseHTTPRequestHandler):
    """Serves the files of a folder, cut at `cut_at` bytes."""

    def do_GET(self):
        path = self.server.folder / self.path.lstrip("/")
        if not path.is_file():
            return self.send_error(404)
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        return self.wfile.write(content[: self.server.cut_at])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server of small files, whose MD5 stand for the published ones."""
    files = write_files(tmp_path / "served")
    names = [f"{name}.gz" for name in NAMES]
    md5 = [(name, hashlib.md5((files / name).read_bytes()).hexdigest()) for name in names]
    monkeypatch.setattr(FashionMNIST, "resources", md5)
    monkeypatch.setattr(idx_images, "DEBIAN", tmp_path / "none")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.folder, server.cut_at = files, None
    server.url = f"http://127.0.0.1:{server.server_address[1]}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def fetch(capsys, server, root):
    return run(capsys, "fetch", "fashion_mnist", root, "--url", server.url)


def one_line(result):
    code, _, err = result
    assert (code, len(err.splitlines())) == (2, 1)
    return err


def test_downloaded_files_can_be_read_and_are_not_downloaded_again(capsys, server, tmp_path):
    root = tmp_path / "new" / "data"
    code, out, _ = fetch(capsys, server, root)
    assert code == 0
    assert out.splitlines()[0] == f"{NAMES[0]}: downloaded from {server.url}{FIRST}"
    assert sorted(path.name for path in root.iterdir()) == sorted(f"{n}.gz" for n in NAMES)
    assert idx_images.load(root).train_size == 12
    server.folder = tmp_path / "gone"
    code, out, _ = fetch(capsys, server, root)
    assert (code, out.count("was there already")) == (0, 4)


def test_a_cut_download_leaves_nothing_and_is_repeated(capsys, server, tmp_path):
    server.cut_at = 100
    said = one_line(fetch(capsys, server, tmp_path / "data"))
    assert "the connection broke: its MD5 is wrong. Run the same command again" in said
    assert list((tmp_path / "data").iterdir()) == []
    server.cut_at = None
    assert fetch(capsys, server, tmp_path / "data")[0] == 0


@pytest.mark.parametrize("content", [b"", b"no gzip", gzip.compress(b"other", mtime=0)])
def test_wrong_content_is_refused(capsys, server, tmp_path, content):
    (server.folder / FIRST).write_bytes(content)
    said = one_line(fetch(capsys, server, tmp_path / "data"))
    assert f"{server.url}{FIRST}: is not the published file" in said
    assert "Use another --url" in said
    assert list((tmp_path / "data").iterdir()) == []


def test_a_download_has_a_limit(capsys, server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_idx_images, "MOST_DOWNLOAD_BYTES", 1000)
    assert "its MD5 is wrong" in one_line(fetch(capsys, server, tmp_path / "data"))


def test_a_file_of_the_user_is_never_replaced(capsys, server, tmp_path):
    (tmp_path / FIRST).write_bytes(b"my own")
    said = one_line(fetch(capsys, server, tmp_path))
    assert f"{tmp_path / FIRST} is damaged" in said
    assert (tmp_path / FIRST).read_bytes() == b"my own"


def test_each_failure_is_one_line(capsys, server, tmp_path):
    (server.folder / FIRST).unlink()
    said = one_line(fetch(capsys, server, tmp_path / "data"))
    assert f"{server.url}{FIRST}: the server answers 404 Not Found. Use another --url" in said
    (tmp_path / "file").write_text("")
    said = one_line(fetch(capsys, server, tmp_path / "file"))
    assert f"{tmp_path / 'file'}: cannot be written" in said
    for url in (f"file://{server.folder}", "ftp://a/b", "nonsense"):
        said = one_line(run(capsys, "fetch", "fashion_mnist", tmp_path / "data", "--url", url))
        assert "must be an address that begins with http:// or https://" in said
    for url in ("http://[", "http://a b", "http://", "http://a:x"):
        said = one_line(run(capsys, "fetch", "fashion_mnist", tmp_path / "data", "--url", url))
        assert f"{url.rstrip('/')}/{FIRST}: cannot be reached" in said


def test_an_unreachable_server_is_one_line(capsys, server, tmp_path):
    free = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    free.server_close()  # nobody listens at its port
    url = f"http://127.0.0.1:{free.server_address[1]}"
    said = one_line(run(capsys, "fetch", "fashion_mnist", tmp_path / "data", "--url", url))
    assert "cannot be reached ([Errno 111] Connection refused). Use another --url" in said


@pytest.mark.parametrize("packed", [True, False])
def test_the_files_of_an_installed_package_are_copied(
    capsys, server, tmp_path, monkeypatch, packed
):
    monkeypatch.setattr(idx_images, "DEBIAN", write_files(tmp_path / "debian", packed))
    monkeypatch.setattr(FashionMNIST, "mirrors", [server.url])
    (tmp_path / "debian" / (NAMES[3] + (".gz" if packed else ""))).unlink()
    code, out, _ = run(capsys, "fetch", "fashion_mnist", tmp_path / "data")
    assert (code, out.count("copied from"), out.count("downloaded from")) == (0, 3, 1)
    assert idx_images.load(tmp_path / "data").train_size == 12


def test_mnist_is_downloaded_too_and_never_copied_from_the_package(
    capsys, server, tmp_path, monkeypatch
):
    monkeypatch.setattr(idx_images, "DEBIAN", write_files(tmp_path / "debian"))
    monkeypatch.setattr(MNIST, "resources", FashionMNIST.resources)
    monkeypatch.setattr(MNIST, "mirrors", [server.url])
    code, out, _ = run(capsys, "fetch", "mnist", tmp_path / "data")
    assert (code, out.count("downloaded from")) == (0, 4)
    assert "kfac-train data=mnist data.root=" in out
