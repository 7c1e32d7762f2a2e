"""Reason phrases are the same on every Python."""

from __future__ import annotations

from http import HTTPStatus

import pytest

from protocol.status_phrases import phrase


@pytest.mark.parametrize(("status", "text"), [(200, "OK"), (413, "Content Too Large"), (422, "Unprocessable Content")])
def test_a_status_has_the_phrase_of_rfc_9110(status: int, text: str) -> None:
    assert phrase(status) == text


def test_no_other_phrase_is_an_earlier_one() -> None:
    earlier = ("Request Entity", "Requested", "Request-URI", "Unprocessable Entity")
    assert not [status for status in HTTPStatus if phrase(status).startswith(earlier)]
