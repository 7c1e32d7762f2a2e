"""A model with a template for tools: each conversation is rendered, and its answer read, by the template that is for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve
from trio.testing import MockClock

from actors.text.formats.table import AnswerFormat
from actors.text.model import TextModel
from protocol.errors import BadRequest, StartFailed, Unsupported
from protocol.messages.generation import GrammarKind
from protocol.messages.text import CallPart, Reasoning, Rendering, Respond, Role, Tokenize, Turn
from protocol.messages.tools import Tool, ToolCall, ToolChoice
from tests.actors.test_processor import LIMITS, ask, respond, running, text
from tests.rig import templates
from tests.rig.gateway import CONTENTS_OF_TINY, TINY, Worker, ids, load_with_fixed_clock
from tests.rig.tools import FILE as SHOWING_FILE

ROOM = evolve(LIMITS, total_max=1000, prompt_max=1000)
TOOLS = Rendering(tools=(Tool("find", "Finds.", strict=True),))
LINE = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
ASKED = Turn(Role.USER, f"n={len(ids(LINE))}")
CALLED = [
    ASKED,
    Turn(Role.ASSISTANT, "", calls=(ToolCall("a", "find", '{"q": 1}'),)),
    Turn(Role.TOOL, "Found.", call_id="a"),
]
ENDING = f"<|im_start|>user\n{ASKED.content}<|im_end|>\n<|im_start|>assistant\n"
BOTH = {"default": templates.PLAIN, "tool_use": templates.FOR_TOOLS}


def listed(**sources: str) -> dict[str, bytes]:
    """Return the files of a model with these templates in the configuration of its tokenizer."""
    named = [{"name": name, "template": source} for name, source in sources.items()]
    files = {name: data for name, data in CONTENTS_OF_TINY.items() if name != "chat_template.jinja"}
    tokenizing = json.loads(CONTENTS_OF_TINY["tokenizer_config.json"]) | {"chat_template": named}
    return files | {"tokenizer_config.json": json.dumps(tokenizing).encode()}


def beside(**sources: str) -> dict[str, bytes]:
    """Return the files of a model with these templates in files of their own."""
    further = {f"additional_chat_templates/{name}.jinja": source.encode() for name, source in sources.items()}
    default = further.pop("additional_chat_templates/default.jinja")
    return CONTENTS_OF_TINY | further | {"chat_template.jinja": default}


MODEL = load_with_fixed_clock(listed(**BOTH))


async def answered(request: Respond, model: TextModel = MODEL) -> tuple[str, list[Any], Worker]:
    """Return the prompt of a request, the replies to it, and the worker that was asked."""
    worker = Worker()
    worker.line = LINE
    async with running(worker, model, ROOM) as address:
        replies, _ = await ask(address, request)
        rendered = Tokenize(request.turns, request.rendering)
        assert (await ask(address, rendered))[1].ids == worker.asked[0].tokens
    return TINY.decode(worker.asked[0].tokens), replies, worker


@pytest.mark.parametrize("files", [listed(**BOTH), beside(**BOTH)])
async def test_tools_are_shown_by_the_template_for_tools_and_calls_read_by_its_format(
    files: dict[str, bytes], autojump_clock: MockClock
) -> None:
    model = load_with_fixed_clock(files)
    prompt, replies, worker = await answered(respond(turns=[ASKED], rendering=TOOLS), model)
    assert prompt.startswith('<|im_start|>system\n<tools> {"name": "find", "description": "Finds.", "parameters"')
    assert prompt.endswith(f"</tools><|im_end|>\n{ENDING}")
    assert [reply.name for reply in replies if isinstance(reply, CallPart)] == ["find"]
    assert worker.asked[0].sampling.grammar is not None, "its strict tool has a grammar of that format"
    prompt, replies, _ = await answered(respond(turns=[ASKED]), model)
    assert prompt == ENDING
    assert text(replies) == LINE, "the default template shows no format of calls"


async def test_a_choice_of_a_tool_is_held_to_the_format_of_the_template_for_tools(autojump_clock: MockClock) -> None:
    request = respond(turns=[ASKED], rendering=TOOLS, tool_choice=ToolChoice(required=True))
    _, replies, worker = await answered(request)
    grammar = worker.asked[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.STRUCTURAL_TAG
    assert [json.loads(reply.arguments) for reply in replies if isinstance(reply, CallPart)] == [{}]


@pytest.mark.parametrize("turns", [CALLED, [*CALLED, Turn(Role.ASSISTANT, "It is found."), ASKED]])
async def test_calls_of_the_history_are_rendered_where_no_tools_are_offered_any_more(
    turns: list[Turn], autojump_clock: MockClock
) -> None:
    prompt, replies, _ = await answered(respond(turns=turns))
    assert prompt.startswith("<|im_start|>system\n<tools> </tools><|im_end|>\n")
    assert '<tool_call>\n{"name": "find", "arguments": {"q": 1}}\n</tool_call>' in prompt
    assert "<tool_response>\nFound.\n</tool_response>" in prompt
    assert not any(isinstance(reply, CallPart) for reply in replies), "it may call none"


async def test_a_default_that_renders_calls_keeps_those_of_the_history(autojump_clock: MockClock) -> None:
    """This is what transformers does, which looks at the tools of a request alone."""
    model = load_with_fixed_clock(listed(default=SHOWING_FILE.read_text(), tool_use=templates.FOR_TOOLS))
    assert model.template.tools.shows_calls
    prompt, _, _ = await answered(respond(turns=CALLED), model)
    assert "<tool_call>" in prompt
    assert "<tools>" not in prompt


async def test_a_named_template_renders_all_requests(autojump_clock: MockClock) -> None:
    named = load_with_fixed_clock(listed(**BOTH), template_name="default")
    assert named.tool_use is None
    async with running(Worker(), named, ROOM) as address:
        with pytest.raises(Unsupported, match="no known format of calls"):
            await ask(address, respond(turns=[ASKED], rendering=TOOLS))


async def test_reasoning_is_that_of_the_template_for_the_request(autojump_clock: MockClock) -> None:
    thinks = templates.FOR_TOOLS.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif") + "{# </think> #}"
    model = load_with_fixed_clock(listed(default=templates.PLAIN, tool_use=thinks))
    assert model.answers == AnswerFormat()
    assert model.tool_use is not None
    assert model.tool_use.answers == AnswerFormat("hermes", "think")
    prompt, replies, _ = await answered(
        respond(turns=[ASKED], rendering=evolve(TOOLS, tools=(Tool("find", "x"),))), model
    )
    assert prompt.endswith("<think>")
    assert any(isinstance(reply, Reasoning) for reply in replies)
    _, replies, _ = await answered(respond(turns=[ASKED]), model)
    assert not any(isinstance(reply, Reasoning) for reply in replies)


async def test_a_refusal_names_the_template(autojump_clock: MockClock) -> None:
    strict = "{% if messages[-1].content == 'no' %}{{ raise_exception('not no') }}{% endif %}"
    both = {name: strict + source for name, source in BOTH.items()}
    async with running(Worker(), load_with_fixed_clock(listed(**both)), ROOM) as address:
        for rendering, name in ((Rendering(), "default"), (TOOLS, "tool_use")):
            with pytest.raises(BadRequest, match=f"^the model's chat template '{name}' refuses this .*: not no$"):
                await ask(address, respond("no", rendering=rendering))
            unknown = evolve(rendering, variables={"style": "x"})
            with pytest.raises(BadRequest, match=f"chat template '{name}' reads no such variable"):
                await ask(address, respond("x", rendering=unknown))


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("default", "{{ raise_exception('No.') }}", "chat template 'default' renders no plain conversation .No."),
        ("tool_use", "{{ raise_exception('No.') }}", "chat template 'tool_use' renders no plain conversation .No."),
        ("tool_use", "{% if %}", "chat template 'tool_use' cannot be read: "),
        ("tool_use", "Read me.", "is not in what the model's chat template 'tool_use' renders"),
    ],
)
def test_a_template_that_cannot_be_used_is_named_with_the_others(name: str, source: str, reason: str) -> None:
    other = next(each for each in BOTH if each != name)
    with pytest.raises(StartFailed, match=f"{reason}.*: name another one by `template_name` .'{other}'.$"):
        load_with_fixed_clock(listed(**BOTH | {name: source}))
