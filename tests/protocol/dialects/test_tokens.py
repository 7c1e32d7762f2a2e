import json
from typing import Any

import pytest

from protocol.dialects import tokens
from protocol.dialects.answer_builder import AnswerBody
from protocol.dialects.tokens import (
    detokenized,
    parse_detokenize,
    parse_tokenize,
    to_detokenize,
    to_tokenize,
    tokenized,
)
from protocol.errors import BadRequest, Unsupported
from protocol.messages.text import Detokenize, Detokenized, Role, Tokenize, Tokenized, Turn
from protocol.token_ids import TokenIds
from tests.rig.dialects import check_refused

USER = {"role": "user", "content": "Hi"}
SEEN = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a.example/cat.png"}}]}


def tokenize(**fields: Any) -> Tokenize:
    return to_tokenize(parse_tokenize(json.dumps(fields).encode()))


def detokenize(**fields: Any) -> Detokenize:
    return to_detokenize(parse_detokenize(json.dumps(fields).encode()))


def whole(body: AnswerBody) -> bytes:
    size, data = body.size, b"".join(body.pieces())
    assert size == len(data)
    return data


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "Hi"}, Tokenize(text="Hi")),
        ({"model": "m", "prompt": ""}, Tokenize(text="")),
        ({"prompt": "Hi", "add_special_tokens": False}, Tokenize(text="Hi", special=False)),
        ({"prompt": "Hi", "add_special_tokens": True, "tools": None}, Tokenize(text="Hi", special=True)),
        ({"messages": [USER]}, Tokenize(turns=(Turn(Role.USER, "Hi"),))),
        ({"messages": [USER], "add_special_tokens": False, "add_generation_prompt": True},
         Tokenize(turns=(Turn(Role.USER, "Hi"),), special=False)),
    ],
)  # fmt: skip
def test_a_text_or_a_conversation_is_tokenized(fields: dict[str, Any], expected: Tokenize) -> None:
    got = tokenize(**fields)
    assert (got.text, got.turns) == (expected.text, expected.turns)
    if not got.turns:
        assert got.special == expected.special


@pytest.mark.parametrize(
    ("kind", "param", "fields"),
    [
        (BadRequest, "prompt", {}),
        (BadRequest, "messages", {"prompt": "x", "messages": [USER]}),
        (BadRequest, "prompt", {"prompt": ["a", "b"]}),
        (BadRequest, "messages", {"messages": []}),
        (BadRequest, "model", {"model": "", "prompt": "x"}),
        (Unsupported, "add_special_tokens", {"messages": [USER], "add_special_tokens": True}),
        (BadRequest, "continue_final_message", {"messages": [USER], "continue_final_message": True}),
        (BadRequest, "continue_final_message", {"prompt": "x", "continue_final_message": True}),
        (BadRequest, "reasoning_effort", {"prompt": "x", "reasoning_effort": "low"}),
        (BadRequest, "chat_template_kwargs", {"prompt": "x", "chat_template_kwargs": {"a": 1}}),
        (Unsupported, "tools[0].type", {"messages": [USER], "tools": [{"type": "mcp"}]}),
        (BadRequest, "tools", {"prompt": "Hi", "tools": [{"type": "function", "function": {"name": "f"}}]}),
        (Unsupported, "messages[1].content", {"messages": [USER, SEEN, SEEN]}),
        (Unsupported, "return_token_strs", {"prompt": "x", "return_token_strs": True}),
    ],
)
def test_an_invalid_tokenize_request_is_refused_by_its_field(
    kind: type[BadRequest], param: str, fields: dict[str, Any]
) -> None:
    check_refused(parse_tokenize, fields, kind, param)


@pytest.mark.parametrize(
    ("kind", "param", "fields"),
    [
        (BadRequest, "tokens", {}),
        (BadRequest, "tokens", {"tokens": []}),
        (BadRequest, "tokens[0]", {"tokens": [-1]}),
        (BadRequest, "tokens[1]", {"tokens": [1, True]}),
        (Unsupported, "skip_special_tokens", {"tokens": [1], "skip_special_tokens": True}),
    ],
)
def test_an_invalid_detokenize_request_is_refused_by_its_field(
    kind: type[BadRequest] | type[Unsupported], param: str, fields: dict[str, Any]
) -> None:
    check_refused(parse_detokenize, fields, kind, param)


def test_token_ids_are_read_and_written() -> None:
    assert detokenize(tokens=[0, 2**31 - 1], model="m").ids == (0, 2**31 - 1)
    expected = {"tokens": [3, 1, 2], "count": 3, "max_model_len": 2048}
    assert json.loads(whole(tokenized(Tokenized(TokenIds.of([3, 1, 2]), 2048)))) == expected
    assert json.loads(whole(tokenized(Tokenized(TokenIds(), 2048))))["tokens"] == []
    assert json.loads(whole(detokenized(Detokenized("é\0")))) == {"text": "é\0", "prompt": "é\0"}


def test_long_answers_are_encoded_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    build, sizes = AnswerBody.from_parts, list[int]()

    def recorded(parts: list[bytes | bytearray]) -> AnswerBody:
        sizes.extend(map(len, parts))
        return build(parts)

    monkeypatch.setattr(AnswerBody, "from_parts", recorded)
    ids, text = list(range(50_000)), '\né"x🙂' * 50_000
    assert json.loads(whole(tokenized(Tokenized(TokenIds.of(ids), 1))))["tokens"] == ids
    assert json.loads(whole(detokenized(Detokenized(text)))) == {"text": text, "prompt": text}
    assert max(sizes) <= 4 * 64 * 1024, "a character has at most four bytes"
    steps = -(-50_000 // tokens.IDS_A_STEP) + 2 * -(-250_000 // tokens.CHARACTERS_A_STEP)
    assert sum(size > 64 for size in sizes) == steps, "what stands between them is shorter"
