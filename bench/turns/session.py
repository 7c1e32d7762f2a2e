"""An agent's session as pure data: the history that it begins with, what each turn adds, and a request's body.

The assistant's messages are the session's own, not the server's answers: so every server gets the same conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from attrs import define, field, frozen

from bench.load.messages import Api
from bench.turns.text import SourceText

SYSTEM_SHARE = 0.15  # of the tokens of the first turn
CALL_SHARE = 0.1  # of a turn's new tokens, what the assistant says; the rest is the result, or the user's text
USER_EVERY = 5  # turns; the others call a tool
MESSAGES_A_TURN = 2
TOOL = {
    "name": "read_file",
    "description": "Read a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "why": {"type": "string"}}},
}


@frozen
class Said:
    """One message: an assistant's with a `call` calls a tool, and a tool's answers the call of that id."""

    role: str
    text: str
    call: str = ""


@define(eq=False)
class Session:
    """One growing conversation of so many tokens and messages at first, and of `new_tokens` more each turn."""

    source: SourceText
    tokens: int
    messages: int
    new_tokens: int
    said: list[Said] = field(init=False, factory=list)
    _turn: int = field(init=False, default=0)

    def begin(self) -> Sequence[Said]:
        """Write the history of the first turn, and return it: a system prompt, a question, and turns."""
        system = round(self.tokens * SYSTEM_SHARE)
        turns = max(0, self.messages - MESSAGES_A_TURN) // MESSAGES_A_TURN
        each = (self.tokens - system) // (turns + 1)
        self.said = [Said("system", self.source.take(system)), Said("user", self.source.take(each))]
        for _ in range(turns):
            self._add(each)
        return self.said

    def grow(self) -> Sequence[Said]:
        """Add a turn, and return its messages."""
        return self._add(self.new_tokens)

    def _add(self, tokens: int) -> Sequence[Said]:
        self._turn += 1
        spoken = max(1, round(tokens * CALL_SHARE))
        text, rest = self.source.take(spoken), self.source.take(max(1, tokens - spoken))
        if self._turn % USER_EVERY == 0:
            added = [Said("assistant", text), Said("user", rest)]
        else:
            call = f"call_{self._turn:06}"
            added = [Said("assistant", text, call), Said("tool", rest, call)]
        self.said += added
        return added


def body(api: Api, model: str, said: Sequence[Said], output_tokens: int, previous: str | None = None) -> bytes:
    """Return the JSON body of a request: the whole conversation, or what is new behind a `previous` response."""
    fields: dict[str, object] = {"model": model, "temperature": 0.0, "ignore_eos": True}
    if api == "chat":
        messages = [_chat_message(each) for each in said]
        fields |= {"messages": messages, "max_tokens": output_tokens, "stream_options": {"include_usage": True}}
        fields |= {"tools": [{"type": "function", "function": TOOL}]}
    else:
        items = [item for each in said for item in _items(each)]
        fields |= {"input": items, "max_output_tokens": output_tokens, "store": False}
        fields |= {"tools": [{"type": "function", **TOOL}]}
        if previous is not None:
            fields |= {"previous_response_id": previous}
    fields |= {"type": "response.create"} if api == "responses-ws" else {"stream": True}
    return msgspec.json.encode(fields)


def _arguments(said: Said) -> str:
    return msgspec.json.encode({"path": said.call, "why": said.text}).decode()


def _chat_message(said: Said) -> dict[str, object]:
    if not said.call:
        return {"role": said.role, "content": said.text}
    if said.role == "tool":
        return {"role": said.role, "tool_call_id": said.call, "content": said.text}
    function = {"name": TOOL["name"], "arguments": _arguments(said)}
    return {
        "role": said.role,
        "content": None,
        "tool_calls": [{"id": said.call, "type": "function", "function": function}],
    }


def _items(said: Said) -> Iterator[dict[str, object]]:
    if not said.call:
        yield {"type": "message", "role": said.role, "content": said.text}
    elif said.role == "tool":
        yield {"type": "function_call_output", "call_id": said.call, "output": said.text}
    else:
        yield {"type": "function_call", "call_id": said.call, "name": TOOL["name"], "arguments": _arguments(said)}
