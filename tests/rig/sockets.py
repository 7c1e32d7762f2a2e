"""Clients of a WebSocket of the gateway, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from protocol.dialects.responses import FINAL_EVENTS
from tests.rig.gateway import Client, Rig, gateway_client


def types(events: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [event["type"] for event in events]


def output_text(events: Iterable[Mapping[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


async def websocket_client(rig: Rig, **headers: str) -> Client:
    client = await rig.client()
    assert (await client.upgrade(**headers)).status == 101
    return client


@asynccontextmanager
async def gateway_websocket(receive_buffer: int | None = None, **fields: Any) -> AsyncIterator[tuple[Rig, Client]]:
    """Serve as `gateway_rig` does, and yield the client of a WebSocket as well."""
    async with gateway_client(receive_buffer, **fields) as (rig, client):
        assert (await client.upgrade()).status == 101
        yield rig, client


async def last_event(client: Client, event: object) -> dict[str, Any]:
    """Send an event, and return the last event of the response to it."""
    await client.say(event)
    return (await client.events())[-1]


async def error_code(client: Client, event: object) -> str:
    """Send an event, and return the code of the error that answers it."""
    await client.say(event)
    code: str = (await client.event())["error"]["code"]
    return code


async def collected(client: Client, responses: int) -> dict[Any, list[dict[str, Any]]]:
    """Read until so many responses have ended, and return their events by lane."""
    lanes: dict[Any, list[dict[str, Any]]] = {}
    while responses:
        event = await client.event()
        lanes.setdefault(event.get("stream_id"), []).append(event)
        responses -= event["type"] in FINAL_EVENTS
    return lanes


async def whole(client: Client, *requests: dict[str, Any]) -> dict[str, Any]:
    """Send requests one after the other, and return the last response."""
    for request in requests:
        last = await last_event(client, request)
    response: dict[str, Any] = last["response"]
    return response
