"""A model's texts are cut only behind a token that its trial texts agree with."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from actors.text import model as text_model
from actors.text.trials import hard_texts, trial_conversations
from tests.actors.test_processor import CONTENTS
from tests.rig.gateway import TINY, load_with_fixed_clock

TOKENIZER = json.loads(CONTENTS["tokenizer.json"])


def contents(**flags: Any) -> dict[str, bytes]:
    added = [{**token, **flags} for token in TOKENIZER["added_tokens"]]
    return {**CONTENTS, "tokenizer.json": json.dumps({**TOKENIZER, "added_tokens": added}).encode()}


def test_the_boundary_is_the_one_that_the_template_writes_most_often() -> None:
    assert TINY.boundary is not None
    rendered = trial_conversations(TINY.template)
    assert len(rendered) >= 2
    counts = {
        token["content"]: sum(map(str.count, rendered, [token["content"]] * 9)) for token in TOKENIZER["added_tokens"]
    }
    assert counts[TINY.boundary.text] == max(counts.values()) > 0
    assert TINY.tokenizer.token_to_id(TINY.boundary.text) == TINY.boundary.token


def test_tokens_that_are_words_alone_are_no_boundaries() -> None:
    assert load_with_fixed_clock(contents(single_word=True)).boundary is None


def test_a_template_without_special_tokens_has_none() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert load_with_fixed_clock(CONTENTS, template).boundary is None


def test_a_wrong_boundary_is_found_when_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A token that must stand alone is none before a letter, so a text may not be cut behind it."""
    monkeypatch.setattr(text_model, "boundaries", lambda _: {"<|im_start|>": 1})
    with caplog.at_level(logging.WARNING):
        assert load_with_fixed_clock(contents(single_word=True)).boundary is None
    assert [getattr(record, "boundary", None) for record in caplog.records] == ["<|im_start|>"]


def test_hard_texts_have_each_token_whole_and_in_halves() -> None:
    texts = list(hard_texts(["<|cut|>"]))
    assert any("<|cut|><|cut|>" in text for text in texts)
    assert any("<|cut|>" in text and "<|c" in text.replace("<|cut|>", "") for text in texts)
