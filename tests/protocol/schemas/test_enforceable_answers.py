"""Answers under the schemas that engines get, by the grammar backend's own matcher, validate under the client's."""

from __future__ import annotations

import pytest

pytest.importorskip("xgrammar")  # it comes with an engine

from tests.rig.schema_answers import MANNERS, run


def test_no_answer_that_ends_fails_to_validate() -> None:
    trial = run(range(500, 530), 4)
    assert not trial.bad
    assert not trial.backend_refused
    assert trial.answers > 40


@pytest.mark.nightly
def test_no_answer_to_a_thousand_schemas_that_ends_fails_to_validate() -> None:
    trial = run(range(1000), len(MANNERS))
    assert not trial.bad
    assert not trial.backend_refused
    assert trial.refused.total() < 450
