"""kfac-data fetch fashion_mnist: from a real server on this machine, and from Debian's package."""

import fcntl
import gzip
import hashlib
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kfac_bench.data.images import fashion_mnist, fetch_fashion_mnist
from tests.cli.test_kfac_data import run
from tests.data.images.test_fashion_mnist import write_files

FIRST = f"{fashion_mnist.NAMES[0]}.gz"


class Server(ThreadingHTTPServer):
    """Serves the files of a folder. `cut_at` ends each answer early, `ranges` is what was asked."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.cut_at, self.ranges = folder, None, []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        path = self.server.folder / self.path.lstrip("/")
        if not path.is_file():
            return self.send_error(404)
        content, asked = path.read_bytes(), self.headers["Range"]
        begin = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        self.server.ranges.append(begin)
        if asked and begin >= len(content):
            return self.send_error(416)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(content) - begin))
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        return self.wfile.write(content[begin : self.server.cut_at])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server of small files, whose hashes stand for the published ones."""
    files = write_files(tmp_path / "served")
    whole = {name: gzip.decompress((files / f"{name}.gz").read_bytes()) for name in NAMES}
    hashes = {n: (len(c), hashlib.sha256(c).hexdigest()) for n, c in whole.items()}
    monkeypatch.setattr(fetch_fashion_mnist, "CONTENT", hashes)
    monkeypatch.setattr(fashion_mnist, "DEBIAN", tmp_path / "none")
    server = Server(files)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


NAMES = fashion_mnist.NAMES


def fetch(capsys, server, root):
    return run(capsys, "fetch", "fashion_mnist", root, "--url", server.url)


def one_line(result):
    code, _, err = result
    assert (code, len(err.splitlines())) == (2, 1)
    return err


def test_two_commands_take_turns_in_one_folder(server, tmp_path):
    said, other = [], os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)

    def say(line):
        said.append(line)
        if "waits for another" in line:
            assert not list(tmp_path.glob("*ubyte.gz")), "it wrote beside the other command"
            os.close(other)

    fetch_fashion_mnist.fetch(tmp_path, server.url, say)
    assert "waits for another kfac-data fetch" in said[0]
    assert len(said) == 5


def test_downloaded_files_can_be_read_and_are_not_downloaded_again(capsys, server, tmp_path):
    root = tmp_path / "new" / "data"
    code, out, _ = fetch(capsys, server, root)
    assert code == 0
    assert out.splitlines()[0] == f"{NAMES[0]}: downloaded from {server.url}{FIRST}"
    assert sorted(path.name for path in root.iterdir()) == sorted(f"{n}.gz" for n in NAMES)
    assert fashion_mnist.load(root).train_size == 12
    server.folder = tmp_path / "gone"
    code, out, _ = fetch(capsys, server, root)
    assert (code, out.count("was there already")) == (0, 4)


def test_a_cut_download_is_continued(capsys, server, tmp_path):
    server.cut_at = 100
    said = one_line(fetch(capsys, server, tmp_path))
    assert "the connection broke after 100 bytes. Run the same command again to continue" in said
    assert not (tmp_path / FIRST).exists()
    server.cut_at = None
    assert fetch(capsys, server, tmp_path)[0] == 0
    assert server.ranges == [0, 100, 0, 0, 0]


def test_a_beginning_of_another_file_is_dropped(capsys, server, tmp_path):
    for size in (5, 10**6):
        (tmp_path / f".{FIRST}.partial").write_bytes(b"x" * size)
        assert fetch(capsys, server, tmp_path)[0] == 0
        assert fashion_mnist.load(tmp_path).train_size == 12
        (tmp_path / FIRST).unlink()


@pytest.mark.parametrize(
    "content", [b"", b"no gzip", gzip.compress(b"other", mtime=0), bytes(10**6)]
)
def test_wrong_content_is_refused_and_removed(capsys, server, tmp_path, content):
    (server.folder / FIRST).write_bytes(content)
    said = one_line(fetch(capsys, server, tmp_path / "data"))
    assert "SHA-256 is wrong. Use another --url" in said or "has more than" in said
    assert list((tmp_path / "data").iterdir()) == []


def test_a_file_of_the_user_is_never_replaced(capsys, server, tmp_path):
    (tmp_path / FIRST).write_bytes(b"my own")
    said = one_line(fetch(capsys, server, tmp_path))
    assert f"{tmp_path / FIRST}: is not the published file. Remove it" in said
    assert (tmp_path / FIRST).read_bytes() == b"my own"


def test_each_failure_is_one_line(capsys, server, tmp_path):
    (server.folder / FIRST).unlink()
    said = one_line(fetch(capsys, server, tmp_path / "data"))
    assert f"{server.url}{FIRST}: the server answers 404 Not Found. Use another --url" in said
    (tmp_path / "file").write_text("")
    said = one_line(fetch(capsys, server, tmp_path / "file"))
    assert f"{tmp_path / 'file'}: cannot be written" in said
    for url in (f"file://{server.folder}", "ftp://a/b", "nonsense", "http://[", "http://a b"):
        said = one_line(run(capsys, "fetch", "fashion_mnist", tmp_path / "data", "--url", url))
        assert "must be an address that begins with http:// or https://" in said


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
    monkeypatch.setattr(fashion_mnist, "DEBIAN", write_files(tmp_path / "debian", packed))
    monkeypatch.setattr(fetch_fashion_mnist, "URL", server.url)
    (tmp_path / "debian" / (NAMES[3] + (".gz" if packed else ""))).write_bytes(b"damaged")
    code, out, _ = run(capsys, "fetch", "fashion_mnist", tmp_path / "data")
    assert (code, out.count("copied from"), out.count("downloaded from")) == (0, 3, 1)
    assert fashion_mnist.load(tmp_path / "data").train_size == 12


def test_the_hashes_are_those_of_debian(capsys, tmp_path):
    if not fashion_mnist.DEBIAN.is_dir():
        pytest.skip("needs Debian's package dataset-fashion-mnist")
    code, out, _ = run(capsys, "fetch", "fashion_mnist", tmp_path)
    assert (code, out.count("copied from")) == (0, 4)
