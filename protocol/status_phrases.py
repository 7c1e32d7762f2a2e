"""The reason phrases of HTTP statuses as RFC 9110 has them: before 3.13 Python has those of earlier RFCs for some."""

from __future__ import annotations

from http import HTTPStatus

RENAMED = {
    413: "Content Too Large",
    414: "URI Too Long",
    416: "Range Not Satisfiable",
    422: "Unprocessable Content",
}


def phrase(status: int) -> str:
    """Return the reason phrase of a status, the same on every Python."""
    return RENAMED.get(status) or HTTPStatus(status).phrase
