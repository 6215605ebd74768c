"""Text files that commands write: what cannot be a file is one line."""

from pathlib import Path

import pytest

from kfac_bench.errors import UsageError
from kfac_bench.record.text_file import around_marks, write_text


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_folder_is_no_file_to_write(name):
    with pytest.raises(UsageError, match=r"Name a file"):
        write_text(Path(name), "text")


def test_a_page_that_is_no_text_is_named(tmp_path):
    (tmp_path / "page.md").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"--into .*page\.md: is no text in UTF-8"):
        around_marks(tmp_path / "page.md", "<begin>", "<end>", "--into")
