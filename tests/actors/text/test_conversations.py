"""Every text of a conversation reaches the prompt, or the conversation is refused by the field that has the text."""

from __future__ import annotations

import json
import re
from contextlib import suppress

import pytest

from actors.text.chat_template import compile_template
from actors.text.conversations import ConversationTemplate
from protocol.errors import BadRequest, Overloaded, StartFailed
from protocol.messages.text import Rendering, Role, Turn
from protocol.messages.tools import Tool, ToolCall
from tests.rig.templates import (
    ALTERNATING,
    CHATML,
    GATHERING,
    LEADING,
    LISTS,
    NAMES,
    ONLY_LISTS,
    OVERWRITING,
    SEARCHING,
    STRICT,
    THOUGHTLESS,
    WITH_LAST_QUESTION,
)

SYSTEM, DEVELOPER, USER, ASSISTANT, TOOL = Role

A, B, C = "Never reveal ALPHA.", "Answer in BETA.", "Hi"


def template(source: str) -> ConversationTemplate:
    return ConversationTemplate.learned(compile_template(source, str), source, {})


def talk(*turns: tuple[Role, str | tuple[str, ...]]) -> list[Turn]:
    return [Turn(role, content, param=f"messages[{place}]") for place, (role, content) in enumerate(turns)]


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (CHATML, f"<system>{A}<system>{B}<user>{C}"),
        (STRICT, f"<system>{A}\n\n{B}<user>{C}"),
        (OVERWRITING, f"{A}\n\n{B}<user>{C}"),
        (GATHERING, f"{A};{B};<user>{C}"),
        (LEADING, f"# {A}\n\n{B}<user>{C}"),
    ],
)
def test_leading_instructions_are_merged_unless_a_template_renders_several(source: str, prompt: str) -> None:
    for first in (SYSTEM, DEVELOPER):
        for second in (SYSTEM, DEVELOPER):
            assert template(source).render(talk((first, A), (second, B), (USER, C))) == prompt


@pytest.mark.parametrize("instructions", [((SYSTEM, A),), ((SYSTEM, A), (DEVELOPER, B))])
@pytest.mark.parametrize(("question", "text"), [(C, C), ((C, "Go"), f"{C} Go")])
def test_instructions_that_a_template_renders_with_a_last_question_alone_stay_in_that_question(
    instructions: tuple[tuple[Role, str], ...], question: str | tuple[str, ...], text: str
) -> None:
    """An agent's every request but its first ends with a result, and its instructions count then, too."""
    serving, rendering = template(WITH_LAST_QUESTION), Rendering(tools=(Tool("f", "F.", '{"type": "object"}'),))
    asked = [*talk(*instructions, (USER, "Before"), (ASSISTANT, "Yes?")), *talk((USER, question))]
    called = Turn(ASSISTANT, "", calls=(ToolCall("a", "f", '{"x": 1}'),))
    whole = "\n\n".join(each for _, each in instructions)
    shown = f"[INST]Before[/INST]Yes?</s>[INST]{whole}\n\n{text}[/INST]"
    assert serving.render(asked) == shown
    for rest in (
        [called, Turn(TOOL, "Found it.", call_id="a")],
        [called, Turn(TOOL, "Found it.", call_id="a"), Turn(ASSISTANT, "So it is.")],
        [Turn(ASSISTANT, "So it")],
    ):
        assert serving.render([*asked, *rest]).startswith(shown)
    results = [called, Turn(TOOL, "Found it.", call_id="a")]
    assert serving.render([*asked, *results], rendering).startswith(f"{shown}[CALLS]")
    later = serving.render([*asked, *results, Turn(ASSISTANT, "So it is."), Turn(USER, "And?")])
    assert later.endswith(f"[INST]{whole}\n\nAnd?[/INST]")
    assert later.count(A) == 1


def test_such_instructions_without_a_question_are_refused_by_their_field() -> None:
    with pytest.raises(BadRequest, match=r"leaves the text of messages\[0\] out") as caught:
        template(WITH_LAST_QUESTION).render(talk((SYSTEM, A), (ASSISTANT, B)))
    assert caught.value.param == "messages[0]"


LATER = talk((USER, "Hi"), (ASSISTANT, "Yes?"), (SYSTEM, B), (USER, "Go"))


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (CHATML, f"<user>Hi<assistant>Yes?<system>{B}<user>Go"),
        (OVERWRITING, f"{B}<user>Hi<assistant>Yes?<user>Go"),
        (GATHERING, f"{B};<user>Hi<assistant>Yes?<user>Go"),
    ],
)
def test_later_instructions_are_where_the_template_renders_them(source: str, prompt: str) -> None:
    assert template(source).render(LATER) == prompt


@pytest.mark.parametrize(
    ("source", "turns", "param", "reason"),
    [
        (STRICT, LATER, "messages[2]", "refuses this conversation: System message must be at the beginning"),
        (LEADING, LATER, "messages[2]", r"leaves the text of messages\[2\] out .*; send instructions at the beginning"),
        (
            OVERWRITING,
            talk((SYSTEM, A), (USER, C), (SYSTEM, B)),
            "messages[2]",
            r"leaves the text of messages\[0\] out .*, since messages\[2\] has instructions, too",
        ),
        (
            LEADING,
            talk((USER, "x"), (SYSTEM, "y"), (USER, "x y z")),
            "messages[1]",
            r"leaves the text of messages\[1\]",
        ),
        (LEADING, talk((USER, A), (SYSTEM, B), (USER, f"{A} {B}")), "messages[1]", r"leaves the text of messages\[1\]"),
        (ALTERNATING, talk((SYSTEM, A), (DEVELOPER, B), (USER, C)), "messages[0]", "System role not supported"),
        (ALTERNATING, talk((USER, A), (ASSISTANT, B), (ASSISTANT, C), (USER, A)), "messages[2]", "must alternate"),
        (ALTERNATING, talk((ASSISTANT, A), (USER, B), (USER, C)), "messages[0]", "must alternate"),
        (SEARCHING, talk((SYSTEM, A), (ASSISTANT, B)), None, "No user"),
    ],
)
def test_what_a_template_does_not_render_is_refused_by_its_field(
    source: str, turns: list[Turn], param: str | None, reason: str
) -> None:
    with pytest.raises(BadRequest, match=reason) as caught:
        template(source).render(turns)
    assert caught.value.param == param


PARTS = talk((SYSTEM, ("One.", "Two.")), (USER, ("The limit is 50.", "What is the limit?")))


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (CHATML, "<system>One. Two.<user>The limit is 50. What is the limit?"),
        (LISTS, "<system>One.\nTwo.<user>The limit is 50.\nWhat is the limit?"),
        (ONLY_LISTS, "<system>One. Two. <user>The limit is 50. What is the limit? "),
    ],
)
def test_parts_reach_a_template_that_takes_lists_and_are_joined_for_another(source: str, prompt: str) -> None:
    assert template(source).render(PARTS) == prompt


def test_a_template_that_takes_only_lists_gets_every_text_in_one() -> None:
    assert template(ONLY_LISTS).render(talk((USER, "Hi"))) == "<user>Hi "


def test_earlier_reasoning_may_be_left_out_and_nothing_else_of_an_answer() -> None:
    turns = talk((USER, "a"), (ASSISTANT, "<think>\nhm\n</think>\n\nb"), (USER, "c"))
    assert template(THOUGHTLESS).render(turns) == "<user>a<assistant>b<user>c"
    biased = CHATML.replace("m.content }}", "m.content if '!' not in m.content else '' }}")
    with pytest.raises(BadRequest, match=r"leaves the text of messages\[1\] out") as caught:
        template(biased).render(talk((USER, "a"), (ASSISTANT, "b!"), (USER, "c")))
    assert caught.value.param == "messages[1]"


def test_a_text_that_a_template_changes_is_not_lost() -> None:
    changing = template(CHATML.replace("m.content", "m.content | replace('/no_think', '') | upper"))
    assert changing.render(talk((USER, "Hi /no_think there"))) == "<user>HI  THERE"


def test_a_name_is_rendered_where_a_template_reads_it() -> None:
    turns = [Turn(USER, "Hi", name="bob"), Turn(ASSISTANT, "Yes?")]
    assert template(NAMES).render(turns) == "<bob>Hi<assistant>Yes?"
    assert template(CHATML).render(turns) == "<user>Hi<assistant>Yes?"


def test_no_client_decides_by_a_name_or_reasoning_what_is_refused_to_another() -> None:
    source = """
{%- for m in messages %}
    {%- if loop.first or m.role != 'system' %}<{{ m.name or m.role }}>{{ m.reasoning_content }}{{ m.content }}{% endif %}
{%- endfor %}"""

    def turns(said: str, later: str, *, name: str = "", reasoning: str = "") -> list[Turn]:
        return [
            Turn(USER, "a", name=name),
            Turn(ASSISTANT, "b", reasoning=reasoning),
            Turn(SYSTEM, said, param="messages[2]"),
            Turn(USER, later),
        ]

    for kind in ("name", "reasoning"):
        shared = ConversationTemplate.learned(compile_template(source, str), source, {}, salt="4711")
        for guess in ("90417{:06}83526", "90417471{:06}83526", "904174711{:06}83526"):
            # Also one who guesses the salt serves himself alone.
            with suppress(BadRequest):
                shared.render(turns("y", "y x", **{kind: guess.format(2)}))
        with pytest.raises(BadRequest) as caught:
            shared.render(turns("2", "2 1", **{kind: "bob"}))
        assert caught.value.param == "messages[2]"


def test_a_verdict_about_answers_without_reasoning_is_none_about_answers_with_it() -> None:
    either = template(
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.reasoning_content %}{{ m.reasoning_content }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert either.render(talk((USER, "a"), (ASSISTANT, "b"), (USER, "c"))) == "<user>a<assistant>b<user>c"
    with pytest.raises(BadRequest) as caught:
        either.render(
            [Turn(USER, "a"), Turn(ASSISTANT, "b", param="messages[1]", reasoning="I think b"), Turn(USER, "c")]
        )
    assert caught.value.param == "messages[1]"


@pytest.mark.parametrize("window", ["[-10:]", "[-14:]"])
def test_a_window_over_a_long_conversation_hides_no_message(window: str) -> None:
    last = template(CHATML.replace("in messages", f"in messages{window}"))
    turns = talk(*[((USER, ASSISTANT)[place % 2], ("yes", "ok")[place % 2]) for place in range(41)])
    assert last.render(turns[:7]).count("<") == 7
    for count in (15, 19, 21, 41):
        with pytest.raises(BadRequest) as caught:
            last.render(turns[:count])
        assert caught.value.param == "messages[0]"


def test_an_answer_without_its_reasoning_is_found_without_a_second_rendering() -> None:
    calls = list[int]()
    source = THOUGHTLESS + "{{ strftime_now('') }}"

    def strftime(form: str) -> str:
        calls.append(1)
        return form

    counted = ConversationTemplate.learned(compile_template(source, strftime), source, {})
    calls.clear()
    long = "An answer of more than some characters."
    for turn in range(3):
        counted.render(talk((USER, long), (ASSISTANT, f"<think>\nhm {turn}\n</think>\n\n{long}"), (USER, long)))
    assert len(calls) == 3


def test_a_template_that_refuses_sentinels_serves_what_is_in_its_prompt() -> None:
    source = (
        "{% for m in messages %}{% if '9' in m.content %}{{ raise_exception('digits') }}{% endif %}"
        "{% if loop.last or m.content != 'no' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    )
    shy = ConversationTemplate(compile_template(source, str))
    assert shy.render(talk((USER, "a"), (ASSISTANT, "b"), (USER, "c"))) == "<user>a<assistant>b<user>c"
    with pytest.raises(BadRequest) as caught:
        shy.render(talk((USER, "no"), (ASSISTANT, "b"), (USER, "c")))
    assert caught.value.param == "messages[0]"


def test_a_templates_sentence_is_cut_to_a_line() -> None:
    source = CHATML + "{% if messages[0].content == '?' %}{{ raise_exception('no\\n' * 9999) }}{% endif %}"
    with pytest.raises(BadRequest) as caught:
        template(source).render(talk((USER, "?")))
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_a_server_without_memory_does_not_blame_the_client() -> None:
    def strftime(form: str) -> str:
        if form == "full":
            raise MemoryError
        return form

    source = CHATML + "{% if messages[0].content == '?' %}{{ strftime_now('full') }}{% endif %}"
    full = ConversationTemplate.learned(compile_template(source, strftime), source, {})
    with pytest.raises(Overloaded, match="too little memory"):
        full.render(talk((USER, "?")))


COUNTING = """
{%- for m in messages %}
    {%- set ns = namespace(n=0) %}
    {%- for k in messages %}{% if k.role == 'user' %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}
    {{- '<' + m.role + '>' + m.content }}
{%- endfor %}"""


def test_a_quadratic_template_renders_once_and_is_held_to_a_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.text.template_cost.RENDERING_STEPS_MAX", 1_500_000)
    calls = list[int]()

    def strftime(form: str) -> str:
        calls.append(1)
        return form

    source = COUNTING + "{{ strftime_now('') }}"
    slow = ConversationTemplate.learned(compile_template(source, strftime), source, {})
    turns = talk(*[((USER, ASSISTANT)[place % 2], "yes") for place in range(900)])
    for count, renderings in ((100, 2), (650, 1)):
        calls.clear()
        assert slow.render(turns[:count]).count("<") == count
        assert len(calls) == renderings
    with pytest.raises(BadRequest, match="it takes more than 1500000 steps; send fewer or shorter messages") as caught:
        slow.render(turns)
    assert caught.value.param is None


def test_long_tools_are_named_where_a_template_takes_too_many_steps_with_them() -> None:
    source = CHATML + (
        "{% for t in tools or [] %}{{ t|tojson }}{% for key in t.function.parameters.many or [] %}"
        "{% for other in range(1000) %}{{ key.x }}{% endfor %}{% endfor %}{% endfor %}"
    )
    slow = template(source)
    many = Tool("f", parameters=json.dumps({"many": [{"x": ""}] * 1000}))
    assert slow.render(talk((USER, "Hi")), Rendering(tools=(Tool("f"),)))
    with pytest.raises(BadRequest, match="steps; send fewer or shorter messages or tools"):
        slow.render(talk((USER, "Hi")), Rendering(tools=(many,)))


def test_no_class_of_this_server_is_named_to_a_client() -> None:
    for expression in (
        "messages[9].x",
        "messages[0].x.y",
        "'a' + messages",
        "'a' + messages[0]",
        "tojson(messages, x=1)",
        "strftime_now()",
        "range(99) + 'a'",
    ):
        source = CHATML + "{% if messages[0].content == '?' %}{{ " + expression + " }}{% endif %}"
        with pytest.raises(BadRequest, match="refuses this conversation") as caught:
            template(source).render(talk((USER, "?")))
        assert not re.search(r"actors|Counted|Watched|lambda|locals", str(caught.value))


@pytest.mark.parametrize("source", ["Some text.", "{{ 1 + 1 }}", "{% for m in messages %}{{ m.role }}{% endfor %}"])
def test_a_file_that_renders_no_text_is_no_template(source: str) -> None:
    with pytest.raises(StartFailed, match="is no chat template"):
        template(source)
