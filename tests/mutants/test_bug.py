"""The table of planted bugs can be read, and a row is stale unless its text is in the file once."""

from __future__ import annotations

from tests.mutants.bug import Bug, bugs

ROW = Bug("Wrong order", "file.py", "two changes places with one", (), "one\n    two", "two\n    one")


def test_the_table_is_a_list_of_classes_with_at_most_150_rows() -> None:
    rows = list(bugs())
    assert 0 < len(rows) <= 150, "leave out a bug of the same class"
    assert all(row.kind and row.path.endswith(".py") and row.name and row.old != row.new for row in rows)
    assert len({row.name for row in rows}) == len(rows)


def test_a_bug_is_planted_where_its_text_is_once() -> None:
    assert ROW.planted_in("if True:\n    one\n    two\n") == "if True:\n    two\n    one\n"


def test_a_row_is_stale_where_its_text_is_gone_or_there_twice_or_the_bug_does_not_compile() -> None:
    assert ROW.planted_in("if True:\n    one\n") is None
    assert ROW.planted_in("if True:\n    one\n    two\n    one\n    two\n") is None
    assert ROW.planted_in("one\n    two") is None
