"""Tables of results as Markdown."""

from kfac_bench.report.tables import Link, Table, escape_markdown


def test_a_table_as_markdown():
    table = Table(
        "A | B",
        ["name", "seconds", "note"],
        [[Link("x|y", "runs/a b"), 1.23456, "a *b*"], ["<b>", float("inf"), None]],
        ["one\nline"],
    )
    assert table.markdown() == (
        "**A \\| B**\n\n"
        "| name | seconds | note |\n"
        "| --- | ---: | --- |\n"
        "| [x\\|y](<runs/a b>) | 1.235 | a \\*b\\* |\n"
        "| &lt;b> | inf | \u2013 |\n\n"
        "* one line\n"
    )


def test_marks_inside_of_words_stay():
    assert escape_markdown("batch_size __init__ _x_ ~~y~~") == (
        r"batch_size \_\_init\_\_ \_x\_ \~\~y\~\~"
    )


def test_whole_numbers_are_grouped_and_links_are_escaped():
    table = Table("t", ["n"], [[12345], [Link("l", "x>)\n[y](z")]])
    assert "| 12,345 |" in table.markdown()
    assert "[l](<x)[y](z>)" in table.markdown()
