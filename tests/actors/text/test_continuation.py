"""Prompts that end with the text of an assistant's message, equal to transformers' own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from actors.text.chat_template import compile_template
from actors.text.conversations import ConversationTemplate
from protocol.errors import BadRequest
from protocol.messages.text import Rendering, Role, Turn
from protocol.messages.tools import ToolCall
from tests.rig import templates
from tests.rig.templates import real_templates
from tests.rig.tool_model import TEMPLATE

CONTINUES = Rendering(continues=True, begins_answer=False)
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
TRIMMING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>\n{% endfor %}"
THOUGHTLESS = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}"
QUESTION = Turn(Role.USER, "Hello", param="messages[0]")
TEXTS = ("I th", "I th ", "I th\n\n", " I", "", "two\nlines", "Hello")


def template(source: str) -> ConversationTemplate:
    return ConversationTemplate.learned(compile_template(source, time.strftime), source, SPECIALS)


def ours(source: str, text: str, rendering: Rendering = CONTINUES) -> str:
    return template(source).render([QUESTION, Turn(Role.ASSISTANT, text, param="messages[1]")], rendering)


def theirs(source: str, text: str, *, continues: bool = True) -> str:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": text}]
    render: Any = render_jinja_template  # its types do not allow variables
    [prompt], _ = render(
        [messages], chat_template=source, continue_final_message=continues, add_generation_prompt=False, **SPECIALS
    )
    return str(prompt)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("source", [templates.PLAIN, templates.ON_BY_DEFAULT, TRIMMING])
def test_a_continued_message_is_rendered_as_transformers_does(source: str, text: str) -> None:
    assert ours(source, text) == theirs(source, text)


def test_the_prompt_ends_where_the_text_does() -> None:
    assert ours(templates.PLAIN, "I th ").endswith("<|im_start|>assistant\nI th ")
    assert ours(TRIMMING, "I th ") == "<user>Hello<end>\n<assistant>I th"


def test_a_prompt_without_the_beginning_of_an_answer() -> None:
    without = Rendering(begins_answer=False)
    assert ours(templates.PLAIN, "Hi", without) == theirs(templates.PLAIN, "Hi", continues=False)
    assert ours(templates.PLAIN, "Hi", without).endswith("Hi<|im_end|>\n")
    assert ours(templates.PLAIN, "Hi", Rendering()).endswith("Hi<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_changes_the_message_is_refused() -> None:
    assert ours(THOUGHTLESS, "plain").endswith("<assistant>plain")
    with pytest.raises(BadRequest, match="so that no answer can go on") as raised:
        ours(THOUGHTLESS, "<think>deep</think>plain")
    assert raised.value.param == "continue_final_message"


@pytest.mark.parametrize("text", ["I look.", ""])
def test_a_message_that_calls_a_tool_is_refused(text: str) -> None:
    """Its call was left out of the prompt, or the refusal was an error of Python."""
    call = ToolCall("1", "get_weather", "{}")
    turns = [QUESTION, Turn(Role.ASSISTANT, text, calls=(call,), param="messages[1]")]
    with pytest.raises(BadRequest, match="no text goes on behind a call") as raised:
        template(TEMPLATE.read_text()).render(turns, CONTINUES)
    assert raised.value.param == "continue_final_message"


def test_the_last_text_of_several_parts_is_continued() -> None:
    turns = [QUESTION, Turn(Role.ASSISTANT, ("one", "two"), param="messages[1]")]
    assert template(templates.PLAIN).render(turns, CONTINUES).endswith("assistant\none two")


@pytest.mark.parametrize("file", real_templates(), ids=lambda file: file.stem)
def test_real_templates_continue_as_transformers_does(file: Path) -> None:
    source = file.read_text()
    try:
        compiled = template(source)
    except Exception as error:  # noqa: BLE001  # it needs tools, and is refused when a model is loaded
        pytest.skip(str(error))
    for text in ("I think therefore I am, and so", "I think therefore I am, and so \n"):
        turns = [QUESTION, Turn(Role.ASSISTANT, text, param="messages[1]")]
        try:
            expected = theirs(source, text)
        except Exception:  # noqa: BLE001  # what transformers refuses is refused
            with pytest.raises(BadRequest):
                compiled.render(turns, CONTINUES)
        else:
            assert compiled.render(turns, CONTINUES) == expected
