"""docs/explanation/architecture.md and its picture name files that exist, and every department."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation" / "architecture.md").read_text()
PICTURE = (ROOT / "docs/explanation" / "architecture.svg").read_text()


def test_every_file_on_the_page_exists():
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert len(links) > 40
    for link in links:
        file = link.partition("#")[0]
        assert (ROOT / "docs/explanation" / file).exists(), link


def test_link_texts_are_the_ends_of_their_targets():
    for text, target in re.findall(r"\[([\w/]+(?:\.py|/))\]\(([^)]+)\)", PAGE):
        assert f"{target}/".endswith(f"/{text.rstrip('/')}/"), (text, target)


def test_every_file_in_the_picture_exists():
    files = re.findall(r">([\w/]+\.py)<", PICTURE)
    assert len(files) > 10
    for file in files:
        assert (ROOT / "kfac_bench" / "core" / file).is_file(), file


def test_every_department_is_on_the_page():
    for parent in (ROOT / "kfac_bench", ROOT / "kfac_bench" / "core"):
        for folder in parent.iterdir():
            if (folder / "__init__.py").exists():
                assert f"](../../{folder.relative_to(ROOT)})" in PAGE, folder
