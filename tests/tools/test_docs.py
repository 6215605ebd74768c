"""The code in docs/preconditioner.md runs, block after block, and its links lead somewhere."""

import re

import torch

from tests.support import ROOT

DOCS = ROOT / "docs"
GUIDE = (DOCS / "preconditioner.md").read_text()


def test_the_guide_runs():
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert len(blocks) == 9
    torch.manual_seed(0)
    namespace = {}
    for block in blocks:
        before = namespace.get("preconditioner")
        exec(compile(block, "docs/preconditioner.md", "exec"), namespace)
        after = namespace["preconditioner"]
        assert after is not before or after.steps > 2
    assert namespace["preconditioner"].report().layers[0].name == "0"
    assert not namespace["preconditioner"].report().skipped


def test_links_lead_somewhere():
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_page_about_problems_shows_the_example():
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "problem.md").read_text(), re.DOTALL)
    assert block == (ROOT / "examples/problems/digits.py").read_text()
