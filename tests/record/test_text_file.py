"""Text files that commands write: what cannot be a file is one line."""

from pathlib import Path

import pytest

from kfac_bench.errors import UsageError
from kfac_bench.record.text_file import write_text


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_folder_is_no_file_to_write(name):
    with pytest.raises(UsageError, match=r"Name a file"):
        write_text(Path(name), "text")
