"""The chat template is found wherever transformers finds it, and a file that has none is refused by the key that names it."""

from __future__ import annotations

import json

import pytest

from actors.text.template_files import TITLE, BadTemplate, TemplateSource, own_templates, templates_of

NAMED = [{"name": "default", "template": "plain"}, {"name": "rag", "template": "with documents"}]
WITH_TOOLS = [*NAMED, {"name": "tool_use", "template": "with tools"}]
FURTHER = {f"additional_chat_templates/{name}.jinja": name.encode() for name in ("rag", "tool_use")}


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
    assert own_templates(contents, None) == [TemplateSource(wanted)]


def default(text: str) -> TemplateSource:
    return TemplateSource(text, f"{TITLE} 'default'")


def tool_use(text: str) -> TemplateSource:
    return TemplateSource(text, f"{TITLE} 'tool_use'", for_tools=True)


@pytest.mark.parametrize(
    ("contents", "wanted"),
    [
        (files(tokenizer=WITH_TOOLS), [default("plain"), tool_use("with tools")]),
        (files(tokenizer={"tool_use": "a", "default": "b"}), [default("b"), tool_use("a")]),
        (files(jinja="a") | FURTHER, [default("a"), tool_use("tool_use")]),
        (files(jinja="a", tokenizer=WITH_TOOLS) | FURTHER, [default("a"), tool_use("tool_use")]),
        (files(tokenizer="a") | FURTHER, [default("a"), tool_use("tool_use")]),
        (files(jinja="a", tokenizer=WITH_TOOLS), [TemplateSource("a")]),
    ],
)
def test_the_template_for_tools_is_found_beside_the_default_wherever_that_is(
    contents: dict[str, bytes], wanted: list[TemplateSource]
) -> None:
    assert own_templates(contents, None) == wanted


def test_a_file_of_an_operator_may_have_a_template_for_tools() -> None:
    text = json.dumps({"chat_template": WITH_TOOLS})
    assert templates_of(text, None) == [default("plain"), tool_use("with tools")]


@pytest.mark.parametrize("name", ["default", "rag", "tool_use"])
def test_a_named_template_is_for_all_requests(name: str) -> None:
    texts = {each["name"]: each["template"] for each in WITH_TOOLS}
    assert own_templates(files(tokenizer=WITH_TOOLS), name) == [TemplateSource(texts[name])]
    assert templates_of(json.dumps({"chat_template": WITH_TOOLS}), name) == [TemplateSource(texts[name])]
    contents = files(jinja="default") | FURTHER
    assert own_templates(contents, name) == [TemplateSource(name)]


def test_a_name_chooses_among_several_templates() -> None:
    with_documents = [TemplateSource("with documents")]
    assert own_templates(files(tokenizer=NAMED), "rag") == with_documents
    assert own_templates(files(jinja="a", tokenizer=NAMED), "rag") == with_documents
    assert own_templates(files(jinja="a", tokenizer=NAMED), "default") == [TemplateSource("a")]
    assert templates_of(json.dumps({"chat_template": NAMED}), "rag") == with_documents


@pytest.mark.parametrize(
    ("contents", "name", "at", "reason"),
    [
        ({}, None, "folder", "has no chat template: name one with the model's `template`"),
        (files(tokenizer=None, legacy=None), None, "folder", "has no chat template"),
        ({"chat_template.jinja": b"\xff"}, None, "folder", "cannot be read: chat_template.jinja: "),
        ({"chat_template.json": b"{"}, None, "folder", "cannot be read: chat_template.json: "),
        (
            {**files(jinja="a"), "additional_chat_templates/x.jinja": b"\xff"},
            None,
            "folder",
            "cannot be read: additional_chat_templates/x.jinja: ",
        ),
        (
            files(jinja="a") | FURTHER,
            "x",
            "name",
            "'default' in .*, 'rag' in additional_chat_templates/rag.jinja, 'tool_",
        ),
        (FURTHER, None, "name", "none is named 'default': choose .* 'rag' in"),
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
        own_templates(contents, name)
    assert caught.value.at == at


@pytest.mark.parametrize("text", ["{{ messages }}", "{%- for m in messages %}{% endfor %}", "a", "[", ""])
def test_a_file_of_an_operator_is_a_template_as_it_is(text: str) -> None:
    assert templates_of(text, None) == [TemplateSource(text)]


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
        templates_of(text, name)
    assert caught.value.at == at
