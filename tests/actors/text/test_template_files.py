"""The chat template is found wherever transformers finds it, and a file that has none is refused by the key that names it."""

from __future__ import annotations

import json

import pytest

from actors.text.template_files import BadTemplate, own_template, template_of

NAMED = [{"name": "default", "template": "plain"}, {"name": "rag", "template": "with documents"}]


def files(**templates: object) -> dict[str, bytes]:
    """Return files by the first word of their names, with a chat template each."""
    names = {"jinja": "chat_template.jinja", "legacy": "chat_template.json"}
    contents = {names.get(word, f"{word}_config.json"): template for word, template in templates.items()}
    return {
        name: str(template).encode() if name.endswith(".jinja") else json.dumps({"chat_template": template}).encode()
        for name, template in contents.items()
    }


@pytest.mark.parametrize(
    ("contents", "wanted"),
    [
        (files(jinja="a"), "a"),
        (files(tokenizer="a"), "a"),
        (files(legacy="a"), "a"),
        (files(processor="a"), "a"),
        (files(tokenizer=NAMED), "plain"),
        (files(tokenizer={"default": "plain", "rag": "with documents"}), "plain"),
        (files(jinja="a", tokenizer="b", legacy="c"), "a"),
        (files(tokenizer="b", legacy="c"), "b"),
        # with a processor, whose own files come first
        (files(jinja="a", tokenizer="b", legacy="c", processor="d"), "d"),
        (files(jinja="a", tokenizer="b", legacy="c", preprocessor=None), "c"),
        (files(jinja="a", tokenizer="b", preprocessor=None), "a"),
        (files(tokenizer="b", processor=None), "b"),
    ],
)
def test_the_template_is_the_one_that_transformers_uses(contents: dict[str, bytes], wanted: str) -> None:
    assert own_template(contents, None) == wanted


def test_a_name_chooses_among_several_templates() -> None:
    assert own_template(files(tokenizer=NAMED), "rag") == "with documents"
    assert own_template(files(jinja="a", tokenizer=NAMED), "rag") == "with documents"
    assert own_template(files(jinja="a", tokenizer=NAMED), "default") == "a"
    assert template_of(json.dumps({"chat_template": NAMED}), "rag") == "with documents"


@pytest.mark.parametrize(
    ("contents", "name", "at", "reason"),
    [
        ({}, None, "folder", "has no chat template: name one with the model's `template`"),
        (files(tokenizer=None, legacy=None), None, "folder", "has no chat template"),
        ({"chat_template.jinja": b"\xff"}, None, "folder", "cannot be read: chat_template.jinja: "),
        ({"chat_template.json": b"{"}, None, "folder", "cannot be read: chat_template.json: "),
        (
            files(tokenizer=NAMED),
            "tool_use",
            "name",
            "named 'tool_use'; there are 'default' in .*, 'rag' in tokenizer_",
        ),
        (
            files(tokenizer=NAMED[1:]),
            None,
            "name",
            "several chat templates none is named 'default': choose .* 'rag' in",
        ),
    ],
)
def test_a_folder_without_such_a_template_is_refused(
    contents: dict[str, bytes], name: str | None, at: str, reason: str
) -> None:
    with pytest.raises(BadTemplate, match=reason) as caught:
        own_template(contents, name)
    assert caught.value.at == at


@pytest.mark.parametrize("text", ["{{ messages }}", "{%- for m in messages %}{% endfor %}", "a", "[", ""])
def test_a_file_of_an_operator_is_a_template_as_it_is(text: str) -> None:
    assert template_of(text, None) == text


@pytest.mark.parametrize(
    ("text", "name", "at", "reason"),
    [
        ('{"name": "x", "sep_style": "CHATML"}', None, "file", "is JSON without `chat_template`"),
        ("[]", None, "file", "is JSON without `chat_template`"),
        ('{"chat_template": 1}', None, "file", "is JSON without `chat_template`"),
        ("{{ messages }}", "rag", "name", "has one chat template, .* none is named 'rag'"),
        ('{"chat_template": "{{ messages }}"}', "rag", "name", "no chat template is named 'rag'"),
    ],
)
def test_a_file_of_an_operator_without_a_template_is_refused(text: str, name: str | None, at: str, reason: str) -> None:
    with pytest.raises(BadTemplate, match=reason) as caught:
        template_of(text, name)
    assert caught.value.at == at
