"""The bodies that the installed `openai` client sends, without a server."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx2
from openai import APIStatusError, OpenAI


def sent_body(ask: Callable[[OpenAI], object]) -> bytes:
    """Return the body of the one request that `ask` makes with a client."""
    bodies: list[bytes] = []

    def refuse(request: httpx2.Request) -> httpx2.Response:
        bodies.append(request.read())
        return httpx2.Response(400, json={"error": {"message": "this is no server"}})

    http_client = httpx2.Client(transport=httpx2.MockTransport(refuse))
    with OpenAI(base_url="http://a.example/v1", api_key="none", max_retries=0, http_client=http_client) as client:
        try:
            ask(client)
        except APIStatusError as error:
            assert error.status_code == 400  # noqa: PT017  # nothing else is expected of this transport
    [body] = bodies
    assert isinstance(json.loads(body), dict)
    return body
