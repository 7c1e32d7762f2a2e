"""Tests mirror the rooms, so that the path of a product file gives the path of its tests."""

from __future__ import annotations

from pathlib import Path

from tests.repository.mirror import PRODUCT, RUN_BY_HAND, TESTED_BY, TESTS, found_tests, product_file_of
from tests.repository.sources import ROOT, refuse

OF_A_ROOM = {Path("tests/protocol/test_pins.py")}  # about a room as a whole
ROWS = {Path(path) for paths in (*TESTED_BY.values(), RUN_BY_HAND) for path in paths}


def test_a_test_file_begins_with_the_name_of_a_product_file_in_the_mirrored_folder() -> None:
    strange = [test for test in TESTS if test not in OF_A_ROOM and product_file_of(test) is None]
    refuse(f"{test}: name it after the file that it tests: test_FILE.py or test_FILE_TOPIC.py" for test in strange)


def test_every_product_file_has_tests_or_a_row_and_not_both() -> None:
    found = {path for path in PRODUCT if found_tests(path)}
    why = "write tests/FOLDER/test_FILE.py, or add a row to tests/repository/mirror.py"
    refuse(f"{path} has no tests: {why}" for path in PRODUCT - found - ROWS)
    refuse(f"{path} needs no row in tests/repository/mirror.py" for path in ROWS & found)
    refuse(f"{path} has a row in tests/repository/mirror.py, and is gone" for path in ROWS - PRODUCT)


def test_every_row_names_tests_that_exist() -> None:
    assert [name for name in TESTED_BY if not (ROOT / "tests" / name).exists()] == []
