"""The inputs of all stages: a model's text side, a text that it tokenises, and requests as clients send them."""

from __future__ import annotations

import json
from pathlib import Path

from attrs import frozen

from actors.text.model import TextModel, load
from bench.rig.node import ROOT
from bench.rig.prompts import STORY_PROMPT, WORDS
from protocol.messages.generation import Generate, Sampling
from protocol.messages.text import Role, Turn
from protocol.model_folder import FILES
from protocol.token_ids import TokenIds

TINY = ROOT / "examples" / "tiny"
REQUEST_ID = "0123456789abcdef0123456789abcdef"
TOKENS_MAX = 128


@frozen
class Subject:
    """A model and its tokens of an English text."""

    model: TextModel
    ids: TokenIds
    prompt_ids: TokenIds


def subject(folder: Path = TINY) -> Subject:
    """Read a model's folder; raises a node's own error for an unusable one."""
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    model = load(files, strftime=lambda form: form, salt="")
    return Subject(model, model.encode_text(WORDS * 4, special=False), model.encode(TURNS))


TURNS = (Turn(Role.SYSTEM, "You are a helpful assistant."), Turn(Role.USER, STORY_PROMPT))
CHAT_BODY = json.dumps(
    {
        "model": "tiny",
        "messages": [{"role": turn.role.value, "content": turn.text} for turn in TURNS],
        "max_tokens": TOKENS_MAX,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
).encode()
CREATE_EVENT = json.dumps(
    {
        "type": "response.create",
        "model": "tiny",
        "instructions": TURNS[0].content,
        "input": TURNS[1].content,
        "max_output_tokens": TOKENS_MAX,
        "temperature": 0.0,
        "store": False,
    }
)
REQUEST_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:8000\r\naccept: application/json\r\n"
    b"accept-encoding: gzip, deflate\r\nconnection: keep-alive\r\ncontent-type: application/json\r\n"
    b"user-agent: OpenAI/Python 2.8.1\r\nx-stainless-lang: python\r\nx-stainless-async: false\r\n"
    b"authorization: Bearer none\r\ncontent-length: %d\r\n\r\n" % len(CHAT_BODY)
)


def generate(tokens: TokenIds) -> Generate:
    """Return what a worker is asked for a prompt of these tokens."""
    return Generate(f"{REQUEST_ID}-0", tokens, Sampling(tokens_max=TOKENS_MAX, temperature=0.0))
