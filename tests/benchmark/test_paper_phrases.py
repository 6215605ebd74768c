"""What the files of the papers' rows quote is printed there: the phrases are in a list."""

import functools
import re
from pathlib import Path

import pytest
import yaml

from kfac_bench.benchmark import schema, suite
from kfac_bench.config import compose

PHRASES = yaml.safe_load(Path(__file__).with_name("paper_phrases.yaml").read_text())
"""By section, what it prints."""
KNOWN = {phrase.lower() for phrases in PHRASES.values() for phrase in phrases}
FILES = sorted(
    path
    for path in compose.CONF_DIR.glob("experiment/*/*.yaml")
    if path.parent.name.startswith(("fig", "table", "sec", "kaisa", "squad"))
) + sorted(compose.CONF_DIR.glob("recipe/*.yaml"))


def quoted(text):
    """Return the phrases between double quotes, in one line and in small letters."""
    return [" ".join(phrase.split()).lower() for phrase in re.findall(r'"([^"]+)"', text)]


def comments(path):
    """Return the whole-line comments of a file as one text."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("#")]
    return " ".join(line.lstrip("# ") for line in lines)


@functools.cache
def notes(name):
    """Return all notes of a row."""
    row = schema.load(name)
    parts = (row, *row.profiles.values(), *row.computed)
    return [note for part in parts for note in part.notes]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_quotations_in_experiments_and_recipes_are_in_the_list(path):
    text = comments(path)
    assert text.count('"') % 2 == 0
    assert [phrase for phrase in quoted(text) if phrase not in KNOWN] == []


@pytest.mark.parametrize("name", suite.ORDER)
def test_quotations_in_rows_are_in_the_list(name):
    found = [phrase for note in notes(name) for phrase in quoted(note)]
    assert [phrase for phrase in found if phrase not in KNOWN] == []


def test_the_list_has_short_phrases_that_are_quoted():
    texts = [comments(path) for path in FILES]
    texts += [note for name in suite.ORDER for note in notes(name)]
    used = {phrase for text in texts for phrase in quoted(text)}
    assert sorted(KNOWN - used) == []
    assert all(len(phrase.split()) <= 12 for phrase in KNOWN)
    assert all(re.fullmatch(r"TPDS 2022, (\d(\.\d)+|Table \d)", section) for section in PHRASES)


@pytest.mark.parametrize("phrase", ["the text says", "the text has", "the paper says"])
def test_a_file_names_the_section_or_the_released_code(phrase):
    """Such words hide where a setting comes from."""
    texts = [comments(path) for path in FILES]
    texts += [note for name in suite.ORDER for note in notes(name)]
    assert [text for text in texts if phrase in text.lower()] == []
