"""Files that are written as a whole; what cannot be a file is one line."""

from pathlib import Path

import pytest

from kfac_bench.errors import UsageError
from kfac_bench.whole_files import around_marks, whole_file, write_text


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_the_old_file_alone(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("old")

    def fail():
        with whole_file(path) as temporary:
            temporary.write_text("half")
            assert path.read_text() == "old"
            raise error

    with pytest.raises(error):
        fail()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "old")]


def test_nothing_is_written_through_a_link(tmp_path):
    outside = tmp_path / "outside"
    (tmp_path / "file").symlink_to(outside)
    with whole_file(tmp_path / "file") as temporary:
        temporary.write_text("new")
    assert not outside.exists()
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_folder_is_no_file_to_write(name):
    with pytest.raises(UsageError, match=r"Name a file"):
        write_text(Path(name), "text")


def test_a_page_that_is_no_text_is_named(tmp_path):
    (tmp_path / "page.md").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"--into .*page\.md: is no text in UTF-8"):
        around_marks(tmp_path / "page.md", "<begin>", "<end>", "--into")
