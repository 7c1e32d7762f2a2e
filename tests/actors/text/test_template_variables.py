"""The variables of chat templates: which a request may set, and how each family is asked for an effort."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from actors.text.chat_template import compile_template
from actors.text.conversations import ConversationTemplate
from actors.text.template_steps import STEPS_MAX
from actors.text.template_variables import EFFORTS
from protocol.errors import BadRequest
from protocol.messages.text import Rendering, Role, Turn
from tests.rig import templates
from tests.rig.templates import OFF, real_templates

HELLO = [Turn(Role.USER, "Hello", param="messages[0]")]


def template(source: str, **defaults: object) -> ConversationTemplate:
    return ConversationTemplate.learned(compile_template(source, str), source, {"bos_token": "<s>"}, defaults)


def prompt(source: str, effort: str | None = None, /, **variables: object) -> str:
    return template(source).render(HELLO, Rendering(variables, effort))


def refused(source: str, effort: str | None = None, /, **variables: object) -> tuple[str | None, str]:
    with pytest.raises(BadRequest) as raised:
        prompt(source, effort, **variables)
    return raised.value.param, str(raised.value)


# Names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (templates.PLAIN, set()),
        (templates.ON_BY_DEFAULT, {"enable_thinking"}),
        (templates.OFF_BY_DEFAULT, {"enable_thinking", "thinking"}),
        (templates.DOCUMENTS, {"documents"}),
        # set in one branch, and read in another
        ("{% if tools %}{% set a = 1 %}{% endif %}{{ a }}{{ b }}{{ messages[0].content }}", {"b"}),
        # read in a macro, whose body runs later
        ("{% macro f(x) %}{{ x }}{{ a }}{{ c }}{% endmacro %}{% set a = 1 %}{{ f(messages[0].content) }}", {"c"}),
        ("{% set x = x | default(1) %}{{ x }}{{ messages[0].content }}", {"x"}),
        ("{% for y in ys %}{{ y }}{{ loop.index }}{% endfor %}{{ messages[0].content }}", {"ys"}),
        ("{{ namespace(a=range(3)).a }}{{ strftime_now('%Y') }}{{ bos_token }}{{ messages[0].content }}", set()),
    ],
)
def test_the_names_that_a_template_reads_before_it_sets_them(source: str, names: set[str]) -> None:
    assert template(source).variables.names == names


def test_a_variable_changes_the_prompt() -> None:
    assert prompt(templates.ON_BY_DEFAULT, enable_thinking=False) == prompt(templates.ON_BY_DEFAULT) + OFF
    documents = [{"title": "A", "text": "x"}, {"title": "B", "text": "y"}]
    assert prompt(templates.DOCUMENTS, documents=documents).startswith("[A: x][B: y]<|im_start|>")


def test_a_variable_that_a_template_cannot_use_is_refused_by_its_name() -> None:
    for variables, param in (
        ({"documents": 5}, "chat_template_kwargs.documents"),
        ({"documents": 5, "note": 1}, "chat_template_kwargs"),
    ):
        found, sentence = refused(templates.DOCUMENTS + "{{ note }}", **variables)
        assert found == param
        assert sentence == "the model's chat template refuses this conversation: 'int' object is not iterable"
    strict = template(templates.ALTERNATING + "{{ note }}")
    with pytest.raises(BadRequest) as raised:
        strict.render([Turn(Role.SYSTEM, "Hi", param="messages[0]"), *HELLO], Rendering({"note": 1}))
    assert raised.value.param == "messages[0]"


@pytest.mark.parametrize("value", ["false", "off", 0, None, [False]])
def test_a_switch_takes_true_or_false_alone(value: object) -> None:
    for source, name in ((templates.ON_BY_DEFAULT, "enable_thinking"), (templates.OFF_BY_DEFAULT, "thinking")):
        param, sentence = refused(source, **{name: value})
        assert param == f"chat_template_kwargs.{name}"
        assert re.fullmatch(rf"chat_template_kwargs\.{name}: takes true or false alone, got .*", sentence)
        [(found, operators)] = template(source, **{name: value}).variables.mistakes().items()
        assert (found, operators) == (name, sentence.removeprefix(f"chat_template_kwargs.{name}: "))
    # In another template the same name may be that of anything.
    assert prompt(templates.PLAIN + "{{ thinking }}", thinking="aloud").endswith("aloud")


def test_names_that_a_template_does_not_read_are_refused_with_those_that_it_reads() -> None:
    param, sentence = refused(templates.OFF_BY_DEFAULT, enable_thinkng=False, note="y")
    assert param == "chat_template_kwargs.enable_thinkng"
    reads = "the model's chat template reads no such variable; it reads enable_thinking, thinking"
    assert sentence == f"chat_template_kwargs.enable_thinkng: {reads}; chat_template_kwargs.note: {reads}"
    assert "it reads none" in refused(templates.PLAIN, **{"a b": 1})[1]


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "raise_exception", "range"]
)
def test_reserved_names_are_refused(name: str) -> None:
    source = f"{{{{ {name} }}}}{{{{ range(1) }}}}{templates.PLAIN}".replace("{{ raise_exception }}", "")
    assert refused(source, **{name: []})[0] == f"chat_template_kwargs.{name}"


def test_iterations_over_lists_and_objects_of_a_client_are_counted() -> None:
    source = "{% for a in xs %}{% for b in xs %}{% endfor %}{% endfor %}" + templates.PLAIN
    for value in ([0] * 2000, {str(number): 0 for number in range(2000)}):
        assert f"more than {STEPS_MAX} steps" in refused(source, xs=value)[1]
    items = source.replace("b in xs", "b in xs.items()")
    assert f"more than {STEPS_MAX} steps" in refused(items, xs={str(number): 0 for number in range(2000)})[1]


# Efforts ----------------------------------------------------------------------------------

ON_AND_OFF = {"none": True, "minimal": True, **dict.fromkeys(("low", "medium", "high", "xhigh", "max"), False)}


@pytest.mark.parametrize("source", [templates.ON_BY_DEFAULT, templates.OFF_BY_DEFAULT])
def test_a_template_that_turns_thinking_on_and_off(source: str) -> None:
    assert {effort: prompt(source, effort).endswith(OFF) for effort in EFFORTS} == ON_AND_OFF


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (templates.WRITTEN, {"low": "low", "medium": "medium", "high": "high"}),
        (
            templates.STRICT_LEVELS,
            {"none": "no_think", "minimal": "no_think", "low": "low", "medium": "no_think", "high": "high"},
        ),
    ],
)
def test_a_template_with_levels_takes_those_that_it_distinguishes(source: str, written: Mapping[str, str]) -> None:
    for effort in EFFORTS:
        if effort in written:
            assert re.search(rf"\b{written[effort]}\b", prompt(source, effort))
        else:
            possible = ", ".join(effort for effort in EFFORTS if effort in written)
            assert refused(source, effort) == (
                "reasoning_effort",
                f'reasoning_effort: the model\'s chat template takes {possible} alone, got "{effort}"',
            )


def test_an_effort_whose_thought_is_empty_turns_thinking_off() -> None:
    source = templates.LEAST_IS_OFF
    assert "<|think|><|end|>" in prompt(source, "minimal")
    assert prompt(source, "none") == prompt(source, "minimal") == prompt(source, "low")
    assert prompt(source, "medium") == prompt(source, "high") == prompt(source)


def test_the_default_of_openais_apis_is_never_refused() -> None:
    levels = templates.STRICT_LEVELS.replace("default('no_think')", "default('high')")
    assert prompt(levels, "medium") == prompt(levels, "high") != prompt(levels, "none")
    assert prompt(levels, "medium", reasoning_effort="low") == prompt(levels, "low")


def test_a_level_without_a_word_is_the_thinking_as_such() -> None:
    source = templates.SWITCH_AND_LEVEL
    assert {effort: prompt(source, effort).endswith(OFF) for effort in EFFORTS} == ON_AND_OFF
    assert [effort for effort in EFFORTS if "Think hard." in prompt(source, effort)] == ["max"]


def test_a_template_without_efforts_takes_only_what_asks_for_nothing() -> None:
    for source, free in ((templates.PLAIN, ("none", "minimal", "medium")), (templates.ALWAYS, ("medium",))):
        for effort in EFFORTS:
            if effort in free:
                assert prompt(source, effort) == prompt(source)
            else:
                assert refused(source, effort)[1].endswith(f'has no effort of reasoning; leave it out, got "{effort}"')


def test_the_field_of_an_effort_is_named_as_the_client_did() -> None:
    with pytest.raises(BadRequest) as raised:
        template(templates.PLAIN).render(HELLO, Rendering(effort="high", effort_field="reasoning.effort"))
    assert raised.value.param == "reasoning.effort"


def test_variables_stand_over_an_effort_unless_they_contradict_it() -> None:
    source = templates.OFF_BY_DEFAULT
    assert prompt(source, "none", thinking=False).endswith(OFF)
    assert not prompt(source, "high", thinking=True).endswith(OFF)
    for effort, variables in (("none", {"thinking": True}), ("high", {"enable_thinking": False})):
        [name] = variables
        assert refused(source, effort, **variables) == (
            "reasoning_effort",
            f'reasoning_effort: "{effort}" contradicts chat_template_kwargs.{name}; send one',
        )
    assert refused(templates.WRITTEN, "low", reasoning_effort="high")[0] == "reasoning_effort"
    assert "Reasoning: wild" in prompt(templates.WRITTEN, reasoning_effort="wild")


def test_the_operators_values_stand_under_those_of_a_request() -> None:
    quiet = template(templates.OFF_BY_DEFAULT, thinking=False)
    assert quiet.render(HELLO).endswith(OFF)
    for rendering in (
        Rendering({"thinking": True}),
        Rendering({"enable_thinking": True}),
        Rendering(effort="low"),
    ):
        assert not quiet.render(HELLO, rendering).endswith(OFF)
    loud = template(templates.ON_BY_DEFAULT, enable_thinking=False)
    assert loud.render(HELLO).endswith(OFF)
    assert loud.variables.efforts == template(templates.ON_BY_DEFAULT).variables.efforts


def test_the_reasoning_of_an_earlier_answer_is_given_to_a_template_that_reads_it() -> None:
    turns = [*HELLO, Turn(Role.ASSISTANT, "Hi", reasoning="be kind")]
    assert template(templates.REASONING).render(turns) == "<user>Hello<assistant><think>be kind</think>Hi"
    assert "be kind" not in template(templates.PLAIN).render(turns)


# Real templates ---------------------------------------------------------------------------

SWITCHED = ("Qwen-Qwen3-0.6B", "Qwen3.5-4B", "GLM-4.6", "GLM-4.7-Flash", "deepseek-ai-DeepSeek-V3.1", "MiniMax-M3",
            "google-gemma-4-31B-it", "ByteDance-Seed-OSS", "Kimi-K3", "tencent-Hy3", "Cohere2MoE")  # fmt: skip
NEVER = ("meta-llama-Llama-3.1-8B-Instruct", "Qwen-Qwen2.5-7B-Instruct", "Qwen3-Coder", "google-gemma-2-2b-it")


@pytest.mark.skipif(not real_templates(), reason="ESPALIER_TEMPLATES names no folder of templates")
def test_real_templates_express_efforts() -> None:
    found = {file.stem: file.read_text() for file in real_templates()}
    for name in SWITCHED:
        if name in found:
            assert prompt(found[name], "none") != prompt(found[name], "high"), name
            assert prompt(found[name], "none") in (prompt(found[name], "minimal"), prompt(found[name])), name
    for name in NEVER:
        if name in found:
            assert prompt(found[name], "none") == prompt(found[name])
    for name, source in found.items():
        if "gpt-oss" in name:
            assert "Reasoning: low" in prompt(source, "low")
            assert refused(source, "none")[0] == "reasoning_effort"
