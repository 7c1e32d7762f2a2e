"""The JSON objects of which events and bodies of Responses are made: the response and its usage.

A response repeats the fields of its request. Stock WebSocket clients accept messages of at most 1 MiB, so that fields
without a limit of their own are left out if they are long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from protocol.dialects.responses.tools import echo, echoed_choice, left_out
from protocol.dialects.weight_versions import version_fields
from protocol.messages.generation import Usage
from protocol.weight_versions import WeightVersions

if TYPE_CHECKING:
    from protocol.dialects.formats import TextFormat
    from protocol.dialects.responses.requests import Create, CreateHttp

    AnyCreate: TypeAlias = Create | CreateHttp

INSTRUCTIONS_ECHOED_MAX = 1024
FORMAT_ECHOED_MAX = 16 * 1024


def response_id(request_id: str) -> str:
    """Return the `id` of the response to a request."""
    return f"resp_{request_id}"


def response_object(
    create: AnyCreate,
    name: str,
    created_at: int,
    status: str,
    output: Sequence[object],
    usage: Usage | None,
    versions: WeightVersions = (),
) -> dict[str, object]:
    """Return a response with this id, computed by these versions of the weights."""
    short = create.instructions is not None and len(create.instructions) <= INSTRUCTIONS_ECHOED_MAX
    return {
        "id": name,
        "object": "response",
        "created_at": created_at,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": create.instructions if short else None,
        "max_output_tokens": create.max_output_tokens,
        "metadata": create.metadata or {},
        "model": create.model,
        "output": output,
        "parallel_tool_calls": create.parallel_tool_calls is not False,
        "previous_response_id": create.previous_response_id,
        "reasoning": {"effort": create.effort, "summary": None},
        "safety_identifier": create.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": create.temperature,
        "text": {"format": _format(create.format)},
        "tool_choice": echoed_choice(create.tool_choice),
        "tools": echo(create.tools),
        "top_logprobs": create.top_logprobs or 0,
        "top_p": create.top_p,
        "truncation": create.truncation or "disabled",
        "usage": None if usage is None else usage_object(usage),
        "user": create.user,
        **_left_out(create),
        **version_fields(versions),
    }


def _left_out(create: AnyCreate) -> dict[str, object]:
    names = left_out(create.tools or ())
    return {"left_out_tools": names} if names else {}


def _format(wanted: TextFormat | None) -> dict[str, object]:
    if wanted is None or wanted.schema is None:
        return {"type": "text" if wanted is None else wanted.type}
    short = len(wanted.schema.text) + len(wanted.description or "") <= FORMAT_ECHOED_MAX
    return {
        "type": wanted.type,
        "name": wanted.name,
        "description": wanted.description if short else None,
        "schema": msgspec.Raw(wanted.schema.text.encode() if short else b"{}"),
        "strict": wanted.strict,
    }


def usage_object(usage: Usage) -> dict[str, object]:
    """Return the tokens of a request."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
