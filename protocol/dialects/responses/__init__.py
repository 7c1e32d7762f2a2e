"""OpenAI's Responses, over WebSocket and over HTTP: `requests`, and the `events` or the `body` that answer them."""

from __future__ import annotations

from protocol.dialects.responses.body import Completion
from protocol.dialects.responses.events import FINAL_EVENTS, Events, error_event
from protocol.dialects.responses.objects import response_id
from protocol.dialects.responses.output import GivenAnswer
from protocol.dialects.responses.requests import (
    INCLUDABLE,
    INCLUDED_MAX,
    LOGPROBS,
    CancelResponse,
    Create,
    CreateHttp,
    parse_http,
    read_event,
    stream_id_of,
    to_respond,
    turns_with_answer,
)

__all__ = [
    "FINAL_EVENTS",
    "INCLUDABLE",
    "INCLUDED_MAX",
    "LOGPROBS",
    "CancelResponse",
    "Completion",
    "Create",
    "CreateHttp",
    "Events",
    "GivenAnswer",
    "error_event",
    "parse_http",
    "read_event",
    "response_id",
    "stream_id_of",
    "to_respond",
    "turns_with_answer",
]
