"""Tools, calls and results in chat templates of several ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import evolve

from actors.text.chat_template import compile_template
from actors.text.conversations import ConversationTemplate
from actors.text.template_tools import Ids, TextBeside, ToolFacts, with_calls_apart
from protocol.errors import BadRequest
from protocol.messages.text import Rendering, Role, Turn
from protocol.messages.tools import Tool, ToolCall
from tests.rig.templates import real_templates

HEAD = "{% if tools %}T:{% for tool in tools %}{{ tool | tojson }}{% endfor %}\n{% endif %}"
LOOP = "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
END = "{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
OBJECTS = (
    HEAD
    + LOOP
    + "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
    + END
)
TEXTS = OBJECTS.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments + '' }}")
NULL = OBJECTS.replace("m.tool_calls or []", "((m.tool_calls or []) if m.content is none else [])")
SHORT = OBJECTS.replace(
    "<{{ c.function.name }}",
    "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}<{{ c.function.name }}",
)
NAMED = OBJECTS.replace("<{{ c.function.name }} ", "<{{ c.id }} ")
SINGLE = OBJECTS.replace(
    "{% for c in", "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one') }}{% endif %}{% for c in"
)
WITHOUT_TEXT = OBJECTS.replace("{{ m.content or '' }}", "{{ '' if m.tool_calls else m.content or '' }}")
ALTERNATING = WITHOUT_TEXT.replace(
    "{{ m.role }}:",
    "{% if m.role == 'assistant' == loop.previtem.role %}{{ raise_exception('two') }}{% endif %}{{ m.role }}:",
)
NO_CALLS = HEAD + LOOP + END
NO_TOOLS = LOOP + END

CITY = '{"type":"object","properties":{"city":{"type":"string","description":"Its name."}}}'
TOOL = Tool("get_weather", "Tells the weather.", CITY)
CALLS = (ToolCall("call_1", "get_weather", '{"city": "Oslo \\"x\\""}'), ToolCall("call_2", "get_weather", "{}"))
TURNS = (
    Turn(Role.USER, "Weather?", param="messages[0]"),
    Turn(Role.ASSISTANT, "", param="messages[1]", calls=CALLS),
    Turn(Role.TOOL, "sunny", param="messages[2]", call_id="call_1"),
    Turn(Role.TOOL, "rainy", param="messages[3]", call_id="call_2"),
)
SHOWN = Rendering(tools=(TOOL,))


def learned(source: str) -> ConversationTemplate:
    return ConversationTemplate.learned(compile_template(source, str), source, {}, salt="1")


@pytest.mark.parametrize(
    ("source", "facts"),
    [
        (OBJECTS, ToolFacts(True, True, True, empty_content=None)),
        (TEXTS, ToolFacts(True, True, True, arguments_as_text=True, empty_content=None)),
        (NULL, ToolFacts(True, True, True, empty_content=None)),
        (SHORT, ToolFacts(True, True, True, empty_content=None, ids=Ids.SHORT)),
        (NAMED, ToolFacts(True, True, True, empty_content=None, ids=Ids.NAMED)),
        (SINGLE, ToolFacts(True, True, False, empty_content=None)),
        (NO_CALLS, ToolFacts(True)),
        (NO_TOOLS, ToolFacts()),
    ],
    ids=["objects", "texts", "null", "short", "named", "single", "no_calls", "no_tools"],
)
def test_what_a_template_takes_is_learned(source: str, facts: ToolFacts) -> None:
    assert learned(source).tools == facts


@pytest.mark.parametrize("source", [OBJECTS, TEXTS, NULL, SHORT, NAMED, SINGLE])
def test_tools_calls_and_results_reach_the_prompt(source: str) -> None:
    prompt = learned(source).render(TURNS, SHOWN)
    assert prompt.startswith('T:{"type": "function", "function": {"name": "get_weather", "description": "Tells')
    assert '{"city": "Oslo \\"x\\""}' in prompt
    assert prompt.index("Oslo") < prompt.index("sunny") < prompt.index("rainy")
    assert prompt.count("get_weather") >= 3
    assert prompt.endswith("A:")


def test_ids_as_a_template_takes_them() -> None:
    assert "functions.get_weather:1 {}" in learned(NAMED).render(TURNS, SHOWN)
    assert "(functions.get_weather:0)" in learned(NAMED).render(TURNS, SHOWN)
    assert "(call_1)" in learned(OBJECTS).render(TURNS, SHOWN)
    facts = learned(SHORT).tools
    assert len(facts.call_id("call_1", "f", 0)) == 9
    assert facts.call_id("call_1", "f", 0) != facts.call_id("call_2", "f", 1)


ONE = ToolFacts(True, True, several_calls=False)
SAID = (TURNS[0], evolve(TURNS[1], content="Let me see."), *TURNS[2:], Turn(Role.USER, "Thanks"))


def test_a_template_of_one_call_an_answer_gets_several_one_after_the_other() -> None:
    assert [turn.content or turn.calls[0].id for turn in with_calls_apart(TURNS, ONE)] == [
        *("Weather?", "call_1", "sunny", "call_2", "rainy")
    ]
    assert [turn.content for turn in with_calls_apart(SAID, ONE)] == [
        *("Weather?", "Let me see.", "sunny", "", "rainy", "Thanks")
    ]


def test_every_result_stays_behind_its_call() -> None:
    assert [turn.content for turn in with_calls_apart((TURNS[0], TURNS[1], TURNS[3]), ONE)] == [
        *("Weather?", "", "", "rainy")
    ]
    again = evolve(TURNS[2], content="still sunny")
    assert [turn.content for turn in with_calls_apart((*TURNS, again), ONE)] == [
        *("Weather?", "", "sunny", "still sunny", "", "rainy")
    ]
    # The ids of a client may repeat themselves.
    later = (TURNS[0], TURNS[1], evolve(TURNS[2], content="cold"), evolve(TURNS[3], content="warm"))
    assert [turn.content for turn in with_calls_apart((*TURNS, *later), ONE)] == [
        *("Weather?", "", "sunny", "", "rainy", "Weather?", "", "cold", "", "warm")
    ]


@pytest.mark.parametrize(
    ("source", "beside", "prompt"),
    [
        (OBJECTS, TextBeside.KEPT, "assistant:Let me see.<get_weather"),
        (WITHOUT_TEXT, TextBeside.APART, "assistant:Let me see.assistant:<get_weather"),
        (ALTERNATING, TextBeside.LEFT_OUT, "user:Weather?assistant:<get_weather"),
    ],
    ids=["kept", "apart", "left out"],
)
def test_a_text_beside_calls_reaches_the_prompt_as_the_template_takes_it(
    source: str, beside: TextBeside, prompt: str
) -> None:
    template = learned(source)
    assert template.tools.text_beside is beside
    assert prompt in template.render(SAID[:-1], SHOWN)


@pytest.mark.parametrize(
    ("source", "turns", "rendering", "param", "sentence"),
    [
        (NO_TOOLS, TURNS[:1], SHOWN, "tools", "shows no tools"),
        (NO_CALLS, TURNS, SHOWN, "messages[1]", "no place for calls"),
        (NO_TOOLS, TURNS, Rendering(), "messages[1]", "no place for calls"),
    ],
)
def test_what_a_template_cannot_show_is_refused(
    source: str, turns: tuple[Turn, ...], rendering: Rendering, param: str, sentence: str
) -> None:
    with pytest.raises(BadRequest, match=sentence) as refused:
        learned(source).render(turns, rendering)
    assert refused.value.param == param


def test_a_result_that_a_template_leaves_out_is_refused() -> None:
    source = OBJECTS.replace(LOOP, "{% for m in messages %}{{ m.role }}:{{ (m.content or '')[:600] }}")
    long = (*TURNS[:2], evolve(TURNS[2], content="sunny " * 200), TURNS[3])
    with pytest.raises(BadRequest) as refused:
        learned(source).render(long, SHOWN)
    assert refused.value.param == "messages[2]"


@pytest.mark.skipif(not real_templates(), reason="ESPALIER_TEMPLATES names no folder of templates")
@pytest.mark.parametrize("path", real_templates(), ids=lambda path: path.stem)
def test_real_templates_with_tools_show_them_all(path: Path) -> None:
    template = learned_or_skipped(path)
    prompt = template.render((Turn(Role.SYSTEM, "Be kind to whoever asks."), *TURNS), SHOWN)
    assert "Tells the weather." in prompt
    assert "Be kind to whoever asks." in prompt
    assert prompt.index("Oslo") < prompt.index("sunny") < prompt.index("rainy")


def learned_or_skipped(path: Path) -> ConversationTemplate:
    source, specials = path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"}
    for_tools = path.stem.endswith("tool_use")
    try:
        template = ConversationTemplate.learned(
            compile_template(source, str), source, specials, salt="1", for_tools=for_tools
        )
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"it renders no plain conversation: {error}")
    if not template.tools.shows_calls:
        pytest.skip("it has no place for calls")
    return template


def test_parameters_keep_their_order() -> None:
    tool = Tool("f", None, json.dumps({"type": "object", "properties": {"b": {}, "a": {}}}))
    prompt = learned(OBJECTS).render(TURNS[:1], Rendering(tools=(tool,)))
    assert prompt.index('"b"') < prompt.index('"a"')
