"""A refusal lists all mistakes of a body: those in one field, and those between fields."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.dialects import chat, completions, responses, tokens
from protocol.dialects.request_body import LISTED_MAX
from protocol.errors import RequestError
from tests.rig.dialects import parse_event

PNG = "data:image/png;base64,iVBORw0KGgo="
IMAGE = {"type": "image_url", "image_url": {"url": PNG}}

# Independent mistakes: no two share a field, whether wrong or only read by the check. Each has its fields and its path.
SHARED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 3}, "temperature"),
    ({"top_k": "all"}, "top_k"),
    ({"seed": 0.5}, "seed"),
    ({"stop": [""]}, "stop[0]"),
    ({"bogus": 1}, "bogus"),
    ({"user": 5}, "user"),
]
CHAT = [
    *SHARED,
    ({"model": None}, "model"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"regex": "a", "response_format": {"type": "text", "bogus": 1}}, "response_format.bogus"),
    ({"store": True}, "store"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"messages": [{"role": "user", "content": None}, {"role": "user", "content": "Hi"}]},
     "messages[0].content"),
]  # fmt: skip
COMPLETION = [
    *SHARED,
    ({"model": 5}, "model"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"suffix": "end"}, "suffix"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"regex": "a", "ebnf": "b"}, "ebnf"),
]
RESPONSE = [
    *SHARED,
    ({"model": {}}, "model"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"max_output_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": PNG}]}]}, "input[0].content[0]"),
    ({"truncation": "always"}, "truncation"),
]
TOKENIZE: list[tuple[dict[str, Any], str]] = [
    ({"model": ""}, "model"),
    ({"prompt": "x", "messages": [{"role": "user", "content": "Hi"}]}, "messages"),
    ({"return_token_strs": True}, "return_token_strs"),
    ({"bogus": 1}, "bogus"),
]
Table = tuple[Callable[[Any], object], dict[str, Any], list[tuple[dict[str, Any], str]]]
TABLES: dict[str, Table] = {
    "chat": (chat.parse, {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}, CHAT),
    "completions": (completions.parse, {"model": "m", "prompt": "Hi"}, COMPLETION),
    "posted": (responses.parse_http, {"model": "m", "input": "Hi"}, RESPONSE),
    "socket": (parse_event, {"type": "response.create", "model": "m", "input": "Hi"}, RESPONSE),
    "tokenize": (tokens.parse_tokenize, {"prompt": "Hi"}, TOKENIZE),
}


@pytest.mark.parametrize("dialect", TABLES)
@given(data=st.data())
def test_every_independent_mistake_is_listed(dialect: str, data: st.DataObject) -> None:
    parse, base, table = TABLES[dialect]
    rows = data.draw(
        st.lists(st.sampled_from(table), min_size=1, max_size=LISTED_MAX - 1, unique_by=lambda row: row[1])
    )
    body = dict(base)
    for fields, _ in rows:
        body |= fields
    with pytest.raises(RequestError) as raised:
        parse(json.dumps(body))
    sentences = str(raised.value).split("; ")
    for _, path in rows:
        assert any(sentence.startswith(f"{path}: ") for sentence in sentences), (path, sentences)


PAIRS = {"regex": "a", "ebnf": "b", "structural_tag": "{}", "min_tokens": 3}
BOTH_ENDS = {"continue_final_message": True, "add_generation_prompt": True}


@pytest.mark.parametrize(
    ("dialect", "fields", "paths"),
    [
        ("chat", {"messages": [{"role": "user"}], **BOTH_ENDS}, ["messages[0].content", "continue_final_message"]),
        ("posted", {"input": 5, **BOTH_ENDS}, ["input", "continue_final_message"]),
        ("tokenize", {"prompt": None, "messages": [{"role": "user"}], **BOTH_ENDS},
         ["messages[0].content", "continue_final_message"]),
        ("chat", {"continue_final_message": True, "add_generation_prompt": 5},
         ["add_generation_prompt", "continue_final_message"]),
        ("chat", {"response_format": {"type": "x"}, **PAIRS},
         ["response_format.type", "ebnf", "structural_tag", "min_tokens"]),
        ("posted", {"text": {"format": {"type": "x"}}, **PAIRS},
         ["text.format.type", "ebnf", "structural_tag", "min_tokens"]),
        ("completions", {**PAIRS, "regex": 5}, ["regex", "structural_tag", "min_tokens"]),
    ],
)  # fmt: skip
def test_a_pair_is_checked_beside_a_field_that_is_not_of_it(
    dialect: str, fields: dict[str, Any], paths: list[str]
) -> None:
    parse, base, _ = TABLES[dialect]
    with pytest.raises(RequestError) as raised:
        parse(json.dumps(base | fields))
    assert re.findall(r"(?:^|; )([\w.\[\]]+): ", str(raised.value)) == paths


@pytest.mark.parametrize("dialect", TABLES)
def test_each_mistake_of_the_table_is_the_only_one_where_it_stands_alone(dialect: str) -> None:
    parse, base, table = TABLES[dialect]
    for fields, path in table:
        with pytest.raises(RequestError) as raised:
            parse(json.dumps(base | fields))
        assert raised.value.param == path
        assert re.findall(r"(?:^|; )([\w.\[\]]+): ", str(raised.value)) == [path]
