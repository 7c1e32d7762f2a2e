"""The processor refuses what an engine could not take, names the client's own field, and ends what is not wanted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from actors.kit.offload import OFFLOAD_SIZE_MIN, RunInThread, T, run_inline
from actors.processor import STOP_CHARACTER_WORK, processor
from actors.text.limits import PromptLimits
from actors.text.model import Defaults, TextModel
from actors.text.stop_strings import StopStrings
from protocol.errors import BadRequest, ContextTooLong, NotReady, StartFailed
from protocol.messages.generation import FinishReason, Started, Usage
from protocol.messages.text import Accepted, Answered, ChoiceEnded, Detokenize, Respond, Role, Text, Tokenize, Turn
from protocol.model_folder import FILES
from protocol.token_ids import TokenIds
from tests.rig.calls import AnyAddress, mailbox
from tests.rig.gateway import FOLDER, INFO, TINY, Worker, load_with_fixed_clock

MOST = 100
LIMITS = PromptLimits(INFO, MOST, MOST)
CONTENTS = {name: (FOLDER / name).read_bytes() for name in FILES if (FOLDER / name).is_file()}


def respond(content: str = "n=5", *, turns: Sequence[Turn] = (), **fields: Any) -> Respond:
    return Respond("a" * 32, tuple(turns) or (Turn(Role.USER, content),), **fields)


@asynccontextmanager
async def running(
    worker: Worker | None = None,
    model: TextModel = TINY,
    limits: PromptLimits | None = LIMITS,
    aside: RunInThread = run_inline,
    requests_max: int = 4,
    tokenize_max: int = 10**6,
) -> AsyncIterator[AnyAddress]:
    address, inbox = mailbox(requests_max)
    async with trio.open_nursery() as nursery:
        worker = worker or Worker()
        arguments = inbox, model, worker, lambda: limits, aside, requests_max
        await nursery.start(partial(processor, *arguments, tokenize_tokens_max=tokenize_max))
        yield address
        nursery.cancel_scope.cancel()


async def ask(address: AnyAddress, request: Respond | Tokenize | Detokenize) -> tuple[list[Any], Any]:
    async with address.ask(request, 10_000) as answer:
        replies = [reply async for reply in answer]
        return replies, await answer.result()


def text(replies: list[Started | Accepted | ChoiceEnded | Text]) -> str:
    return "".join(reply.text for reply in replies if isinstance(reply, Text))


# The good road -----------------------------------------------------------------------------


async def test_a_conversation_becomes_text_with_usage(autojump_clock: MockClock) -> None:
    worker = Worker(cached=3)
    async with running(worker) as address:
        replies, answered = await ask(address, respond("n=4"))
    prompt = len(TINY.encode([Turn(Role.USER, "n=4")]))
    assert replies[:2] == [Accepted(prompt), Started(3)]
    assert text(replies) == "The oak is o"
    assert sum(reply.tokens for reply in replies if isinstance(reply, Text)) == 4
    assert replies[-1] == ChoiceEnded(FinishReason.STOP)
    assert answered == Answered(Usage(prompt, 4, 3))


async def test_the_engine_is_asked_for_the_prompt_of_the_template(autojump_clock: MockClock) -> None:
    worker = Worker()
    turns = [
        Turn(Role.DEVELOPER, "Be kind."),
        Turn(Role.USER, "Hi"),
        Turn(Role.ASSISTANT, "Yes?"),
        Turn(Role.USER, "x"),
    ]
    async with running(worker) as address:
        await ask(address, respond(turns=turns))
    prompt = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
    wanted = prompt + "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert TINY.tokenizer.decode(worker.asked[0].tokens, skip_special_tokens=False) == wanted
    assert TINY.prompt(turns) == wanted


async def test_without_a_wish_the_answer_may_fill_the_context(autojump_clock: MockClock) -> None:
    worker = Worker()
    async with running(worker) as address:
        await ask(address, respond("n=5"))
        await ask(address, respond("n=5", tokens_max=7))
    (first, second) = worker.asked
    assert len(first.tokens) + first.sampling.tokens_max == MOST
    assert second.sampling.tokens_max == 7


async def test_what_a_request_leaves_open_the_models_authors_decide(autojump_clock: MockClock) -> None:
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    model = load_with_fixed_clock(CONTENTS | {"generation_config.json": json.dumps(config).encode()})
    worker = Worker()
    async with running(worker, model) as address:
        await ask(address, respond())
        await ask(address, respond(temperature=0.0, top_p=0.5, top_k=-1, min_p=0.0, repetition_penalty=1.0, seed=7))
    own, given = (request.sampling for request in worker.asked)
    assert (own.temperature, own.top_p, own.top_k, own.min_p, own.repetition_penalty) == (0.6, 0.9, 20, 0.05, 1.1)
    assert (given.temperature, given.top_p, given.top_k, given.min_p, given.repetition_penalty) == (0, 0.5, -1, 0, 1)
    assert (own.seed, given.seed) == (None, 7)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, Defaults()),
        ({"do_sample": False, "temperature": 0.3}, Defaults()),
        ({"top_k": 0}, Defaults(top_k=-1)),
        ({"top_k": 50, "temperature": True}, Defaults(top_k=50)),
        ({"temperature": 0.7, "top_p": None}, Defaults(temperature=0.7)),
    ],
)
def test_defaults_are_read_as_transformers_writes_them(config: dict[str, Any], wanted: Defaults) -> None:
    assert load_with_fixed_clock(CONTENTS | {"generation_config.json": json.dumps(config).encode()}).defaults == wanted


# Refusals, by the client's own names ---------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "kind", "param", "reason"),
    [
        (
            respond("word " * 200, params={"turns": "messages"}),
            ContextTooLong,
            "messages",
            "prompt and answer together",
        ),
        (respond("word " * 200, params={"turns": "input"}), ContextTooLong, "input", "can have 100"),
        (respond(tokens_max=100, params={"tokens_max": "max_tokens"}), ContextTooLong, "max_tokens", "100 more are"),
        (respond(tokens_min=99, params={"tokens_min": "min_tokens"}), BadRequest, "min_tokens", "at least 99"),
        (respond(stop_token_ids=(512,)), BadRequest, "stop_token_ids", "end at 511"),
    ],
)
async def test_what_the_engine_could_not_take_is_refused_by_the_clients_name(
    request_: Respond, kind: type[ContextTooLong | BadRequest], param: str, reason: str, autojump_clock: MockClock
) -> None:
    worker = Worker()
    async with running(worker) as address:
        with pytest.raises(kind, match=reason) as caught:
            await ask(address, request_)
        assert caught.value.param == param
        assert worker.prompts == []
        assert (await ask(address, respond()))[0][-1] == ChoiceEnded(FinishReason.STOP)


async def test_before_the_first_engine_nothing_is_ready(autojump_clock: MockClock) -> None:
    async with running(limits=None) as address:
        with pytest.raises(NotReady, match="no engine has been ready"):
            await ask(address, respond())


async def test_a_prompt_is_never_shortened_in_silence() -> None:
    tokenizer = json.loads(CONTENTS["tokenizer.json"])
    tokenizer["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    model = load_with_fixed_clock(CONTENTS | {"tokenizer.json": json.dumps(tokenizer).encode()})
    assert model.encode(respond("a long way to go").turns) == TINY.encode(respond("a long way to go").turns)


# Templates -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('id') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ messages[0].nothing.at_all }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 1 / 0 }}",
        "{{ 1 + 'a' }}",
        "{{ messages[99]['content'] + 'x' }}",
    ],
)
async def test_a_template_can_refuse_but_do_nothing_else(
    template: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker()
    with pytest.raises(StartFailed, match="chat template renders no plain conversation"):
        load_with_fixed_clock(CONTENTS, template)  # not even a greeting gets through
    template = f"{{% if '=' in messages[0]['content'] %}}{template}{{% endif %}}{{{{ messages[0]['content'] }}}}"
    async with running(worker, load_with_fixed_clock(CONTENTS, template)) as address:
        for _ in range(8):  # more than there may be bugs
            with pytest.raises(BadRequest, match="chat template refuses"):
                await ask(address, respond())
    assert worker.prompts == []
    assert not caplog.records


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ strftime_now('%Y') }}", "1970"),
        ("{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=true) }}", None),
        ("{% generation %}{{ messages[0]['role'] }}{% endgeneration %}", "user"),
    ],
)
def test_a_template_has_what_transformers_gives_it(template: str, text: str | None) -> None:
    prompt = load_with_fixed_clock(CONTENTS, template + "{{ messages[0]['content'] }}").prompt(respond("n=4").turns)
    assert prompt == (text if text is not None else '{"a":1,"b":"\\u00e9"}') + "n=4"


@pytest.mark.parametrize(
    ("contents", "template", "reason"),
    [
        ({}, None, "no tokenizer.json and no config.json"),
        (CONTENTS | {"generation_config.json": b"[]"}, None, "^generation_config.json cannot be read: it is no JSON"),
        (CONTENTS | {"tokenizer_config.json": b"\xff"}, None, "^tokenizer_config.json cannot be read: 'utf-8' codec"),
        (
            CONTENTS | {"config.json": b"{", "tokenizer.json": b"<html>"},
            None,
            "^config.json cannot be read: .*; tokenizer.json cannot be read: expected value at line 1 column 1$",
        ),
        ({name: CONTENTS[name] for name in ("tokenizer.json", "config.json")}, None, "no chat template"),
        (CONTENTS, "{% if %}", "chat template cannot be read"),
    ],
)
def test_a_model_that_cannot_be_used_fails_the_start_with_the_reason(
    contents: dict[str, bytes], template: str | None, reason: str
) -> None:
    with pytest.raises(StartFailed, match=reason):
        load_with_fixed_clock(contents, template)


def test_an_older_files_template_and_tokens_are_found() -> None:
    config = {"chat_template": "{{ bos_token }}{{ messages[0]['content'] }}", "bos_token": {"content": "<|endoftext|>"}}
    files = {name: CONTENTS[name] for name in ("tokenizer.json", "config.json")}
    model = load_with_fixed_clock(files | {"tokenizer_config.json": json.dumps(config).encode()})
    assert model.prompt(respond("x").turns) == "<|endoftext|>x"


@pytest.mark.parametrize(
    ("ids", "first"),
    [
        ({"bos_token_id": 5}, 5),
        ({"bos_token_id": 512}, 2),
        ({"bos_token_id": -1}, 2),
        ({"bos_token_id": 2**40}, 2),
        ({"bos_token_id": True}, 2),
        ({"bos_token_id": 512, "eos_token_id": [600, 7]}, 7),
        ({"bos_token_id": 512, "eos_token_id": 600}, None),
    ],
)
def test_only_a_token_of_the_tokenizer_begins_a_text(ids: dict[str, Any], first: int | None) -> None:
    config = json.loads(CONTENTS["config.json"]) | {"eos_token_id": 2} | ids
    files = {"tokenizer.json": CONTENTS["tokenizer.json"], "chat_template.jinja": b"{{ messages[0]['content'] }}"}
    assert load_with_fixed_clock(files | {"config.json": json.dumps(config).encode()}).first_token == first


# Endings ---------------------------------------------------------------------------------------


async def test_a_stop_string_ends_the_workers_call_at_once(autojump_clock: MockClock) -> None:
    worker = Worker()
    async with running(worker) as address:
        replies, answered = await ask(address, respond("n=80 s=1", stop=("is old",)))
        assert trio.current_time() == 5
        assert worker.running == 0
        assert worker.left == 1
    assert text(replies) == "The oak "
    prompt = replies[0].prompt_tokens
    assert replies[-1] == ChoiceEnded(FinishReason.STOP, matched="is old")
    assert answered == Answered(Usage(prompt, 5))


async def test_leaving_ends_the_workers_call_at_once(autojump_clock: MockClock) -> None:
    worker = Worker()
    async with running(worker) as address:
        with trio.move_on_after(2.5):
            await ask(address, respond("n=50 s=1"))
        await trio.testing.wait_all_tasks_blocked()
        assert (trio.current_time(), worker.running, worker.left) == (2.5, 0, 1)


async def test_long_prompts_go_aside_and_short_ones_do_not(autojump_clock: MockClock) -> None:
    types: list[Any] = []

    async def aside(function: Callable[[], T], *, owner: str, size: int) -> T:
        await trio.sleep(1)
        assert (owner, size >= OFFLOAD_SIZE_MIN) == ("alice", True)
        types.append(type(function()))
        return function()

    async with running(aside=aside, limits=PromptLimits(INFO, 10**6, 10**6)) as address:
        await ask(address, respond("a" * (OFFLOAD_SIZE_MIN // 2), owner="alice"))
        assert types == []
        await ask(address, respond("a" * OFFLOAD_SIZE_MIN, owner="alice"))
        assert types == [TokenIds]  # a text is rendered in much less time than it is tokenised
        await ask(address, respond(turns=[Turn(Role.USER, "")] * 200, owner="alice"))  # many turns are long too
        assert types == [TokenIds, str, TokenIds]


async def test_long_stop_strings_are_read_aside(autojump_clock: MockClock) -> None:
    read: list[Any] = []

    async def aside(function: Callable[[], T], *, owner: str, size: int) -> T:
        await trio.sleep(1)
        assert (owner, size >= OFFLOAD_SIZE_MIN) == ("alice", True)
        read.append(result := function())
        return result

    async with running(aside=aside) as address:
        for stop in (("oak",), ("oak", "x" * (OFFLOAD_SIZE_MIN // STOP_CHARACTER_WORK))):
            replies, _ = await ask(address, respond("n=3", stop=stop, owner="alice"))
            assert text(replies) == "The "
    assert [type(each) for each in read] == [StopStrings]


async def test_leaving_while_a_long_prompt_is_aside_frees_the_place(autojump_clock: MockClock) -> None:
    async def aside(function: Callable[[], T], **_: Any) -> T:
        await trio.sleep_forever()

    worker = Worker()
    async with running(worker, aside=aside, requests_max=1) as address:
        with trio.move_on_after(3):
            await ask(address, respond("a" * OFFLOAD_SIZE_MIN))
        replies, _ = await ask(address, respond())
        assert (trio.current_time(), len(worker.prompts)) == (3, 1)
        assert text(replies)


async def test_at_most_so_many_are_answered_at_a_time(autojump_clock: MockClock) -> None:
    worker = Worker()
    async with running(worker, requests_max=2) as address, trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(ask, address, respond("n=2 s=1"))
        await trio.sleep(1)
        assert worker.running == 2
    assert trio.current_time() == 6
