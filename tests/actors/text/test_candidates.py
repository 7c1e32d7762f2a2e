"""No turn of the event loop builds what a client can make long: whole answers, candidates, held-back text."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import trio
import trio.abc
import trio.testing
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from actors.text.candidates import CandidateChoice
from actors.text.limits import PromptLimits
from actors.text.staged_text import SCORED_A_PIECE, StagedText
from actors.text.stop_strings import StopScanner, StopStrings
from protocol.dialects import chat, completions
from protocol.dialects.answer_builder import PIECE_BYTES, AnswerBody
from protocol.messages.generation import FinishReason, Tokens, Usage
from protocol.messages.text import Answered, ChoiceEnded, Respond, Text, TokenText
from supervisor.gateway.memory import ANSWER_BYTES_FREE
from tests.actors.test_processor import running
from tests.actors.text.test_encoding import Counting
from tests.actors.text.test_logprobs import reading
from tests.rig.fake_engine import logprob_at
from tests.rig.gateway import INFO, TINY, Client, Reply, Worker, at_rest, create, gateway_rig, head, ids, post
from tests.rig.turn_cost import Costs

SCORED = {"logprobs": True, "top_logprobs": 20}


def chat_body(messages: list[Any]) -> dict[Any, Any]:
    return {"model": "tiny", "max_tokens": 1, "messages": messages}


@contextmanager
def turns_counted() -> Iterator[None]:
    """Fail if a task of the product does too much in one turn of the body."""
    costs = Costs()
    trio.lowlevel.add_instrument(costs)
    try:
        yield
    finally:
        trio.lowlevel.remove_instrument(costs)
    costs.check()


async def asked(body: dict[str, Any], path: str = "/v1/chat/completions") -> Reply:
    """Ask, reading as a client does, and return the answer."""
    async with gateway_rig(total_s=600.0, requests_max=256) as rig:
        client = await rig.client()
        await client.send(post(body, path))
        await client.more()  # the worker and what relays its tokens run before the first byte
        return await client.reply()


def texts(count: int) -> Iterator[Text]:
    line, detokenizer = ids("The oak is old. "), reading()
    for place in range(count):
        token = line[place % len(line)]
        if (text := detokenizer.feed([token], [logprob_at(token, place, 20, 512)])) is not None:
            yield text


@pytest.mark.parametrize(("dialect", "path"), [(chat, "chat/completions"), (completions, "completions")])
async def test_an_answer_in_one_piece_is_built_in_pieces(
    dialect: ModuleType, path: str, autojump_clock: MockClock
) -> None:
    """It was built in one turn: 0.2 s for these 128 x 60 tokens, and 5 s for the review's 128 x 1,200."""
    own = {"messages": [{"role": "user", "content": "n=60"}], **SCORED} if dialect is chat else {"prompt": "n=60"}
    body = {"model": "tiny", "n": 128, "max_tokens": 60, "logprobs": 20} | own
    with turns_counted():
        reply = await asked(body, f"/v1/{path}")
    assert (reply.status, reply.whole, len(reply.body) > 2_000_000) == (200, True, True)
    contents = [choice.get("text") or choice["message"]["content"] for choice in reply.json["choices"]]
    assert len(contents) == 128
    assert min(map(len, contents)) > 50


@pytest.mark.parametrize(("dialect", "most"), [(chat, 1500), (completions, 600)])
def test_what_waits_of_an_answer_in_one_piece_is_bytes(dialect: ModuleType, most: int) -> None:
    """Objects took 4 kB a token with 20 log probabilities; now a token takes what it takes in the body."""
    fields = (
        {"messages": [{"role": "user", "content": "x"}], **SCORED}
        if dialect is chat
        else {"prompt": "x", "logprobs": 20}
    )
    request = dialect.parse(json.dumps({"model": "m"} | fields).encode())
    gathered, chunks = dialect.Completion(request, request_id="0" * 32, created=1), list(texts(1000))
    for text in chunks:
        gathered.add(text)
    gathered.add(ChoiceEnded(FinishReason.STOP))
    kept = [each for each in gc.get_referents(*gc.get_referents(gathered)) if isinstance(each, Text)]
    assert not kept
    body = gathered.finish(Answered(Usage(1, 1000)))
    assert body.size / 1000 < most
    pieces = list(body.pieces())
    assert max(map(len, pieces)) <= PIECE_BYTES
    assert sum(map(len, pieces)) == body.size
    assert not list(body.pieces())


@given(parts=st.lists(st.binary(max_size=250_000), max_size=5))
def test_a_body_in_pieces_is_the_whole_of_it(parts: list[Any]) -> None:
    body = AnswerBody.from_parts(parts)
    pieces = list(body.pieces())
    assert b"".join(pieces) == b"".join(parts)
    assert body.size == sum(map(len, parts))
    assert all(0 < len(piece) <= PIECE_BYTES for piece in pieces)


async def test_a_prompt_that_is_repeated_counts_as_often_as_it_comes(rather_slow: MockClock) -> None:
    body = {"model": "tiny", "n": 64, "max_tokens": 4, "prompt": "n=4 " + "x" * 1500, "echo": True}
    async with gateway_rig(requests_max=256, answers_bytes_max=100_000) as rig:
        for stream in (False, True):
            reply = await (await rig.client()).ask(post(body | {"stream": stream}, "/v1/completions"))
            assert (reply.status, "answers_bytes_max" in reply.error["message"]) == (400, True)
            reply = await (await rig.client()).ask(post(body | {"stream": stream, "n": 8}, "/v1/completions"))
            assert reply.status == 200


@pytest.mark.parametrize(("answers_bytes_max", "whole"), [(10_000_000, True), (200_000, False)])
async def test_events_that_wait_behind_a_repeated_prompt_are_counted_as_long_as_they_are(
    answers_bytes_max: int, whole: bool, rather_slow: MockClock
) -> None:
    """A token was counted as the 8 bytes of an answer in one piece, and its event has 200: here 26 kB for 600."""
    body = {"model": "tiny", "n": 8, "max_tokens": 400, "prompt": "n=400", "echo": True, "stream": True}
    limits: dict[str, Any] = {
        "answers_bytes_max": answers_bytes_max,
        "backlog_bytes_max": 30_000,
        "send_buffer_bytes": 4096,
    }
    async with gateway_rig(requests_max=256, stall_s=600.0, **limits) as rig:
        client = Client(await rig.connect(receive_buffer=4096))
        await client.send(post(body, "/v1/completions"))
        await trio.sleep(60)
        counted_bytes = rig.gateway.memory.answers.reserved_bytes
        reply = await client.reply()
        assert (reply.whole, b"answers_bytes_max" in reply.body) == (whole, not whole)
        if whole:
            assert len(reply.body) - 100_000 < counted_bytes < len(reply.body)
        await client.stream.aclose()
        await at_rest(rig)
        assert rig.gateway.memory.answers.reserved_bytes == 0


async def test_candidates_are_kept_packed_and_replayed_in_many_turns(autojump_clock: MockClock) -> None:
    """The likeliest of 128 drafts was told in one turn, and all were kept as objects: 4 kB a token."""
    body = {"model": "tiny", "n": 64, "best_of": 128, "max_tokens": 100, "prompt": "n=100", "logprobs": 20}
    with turns_counted():
        reply = await asked(body, "/v1/completions")
    assert len(reply.json["choices"]) == 64


@pytest.mark.parametrize("top", [0, 5])
async def test_a_candidate_is_replayed_as_it_would_have_been_streamed(top: int) -> None:
    line, replies = ids("The oak is old. wörld 日本 🙂 "), list[Any]()
    detokenizer = reading(["old"], choice=3)
    draft, straight = CandidateChoice(replies.append), []
    for place, token in enumerate(line * 5):
        tokens = Tokens((token,), (logprob_at(token, place, top, 512),))
        draft.noted(tokens)
        straight.append(detokenizer.feed(tokens.ids, tokens.logprobs))
        if detokenizer.matched:
            break
    straight.append(detokenizer.finish())
    draft(ChoiceEnded(FinishReason.STOP, 9, detokenizer.matched))
    ended = await draft.replay(StagedText(reading(["old"], choice=3)), replies.append)
    pieces = replies
    assert ended == ChoiceEnded(FinishReason.STOP, 3, "old")
    wanted = [piece for piece in straight if piece is not None]
    assert "".join(piece.text for piece in pieces) == "".join(piece.text for piece in wanted) == "The oak is "
    assert [logprob for piece in pieces for logprob in piece.logprobs] == [
        logprob for piece in wanted for logprob in piece.logprobs
    ]
    assert sum(piece.tokens for piece in pieces) == sum(piece.tokens for piece in wanted)


@pytest.mark.parametrize("last", ["b", "a"])
async def test_text_held_back_for_a_stop_string_is_sent_a_few_tokens_a_turn(
    last: str, autojump_clock: MockClock
) -> None:
    """A thousand tokens with 20 log probabilities each, of all choices in one turn: seconds."""
    line = "a" * 300 + last
    worker, count = Worker(line=line), len(ids(line))
    async with running(worker, limits=PromptLimits(INFO, 2048, 2048)) as address:
        asked_for = Respond("b" * 32, texts=(f"n={count}",), n=4, logprobs=20, stop=(line + "c",))
        async with address.ask(asked_for, 10_000) as answer:
            replies: list[Any] = []
            await answer.relay(replies.append)
    pieces = [each for each in replies if isinstance(each, Text)]
    assert max(len(each.logprobs) for each in pieces) <= SCORED_A_PIECE < count
    for choice in range(4):
        own = [each for each in pieces if each.choice == choice]
        assert "".join(each.text for each in own) == line
        assert sum(len(each.logprobs) for each in own) == sum(each.tokens for each in own) == count
        assert all("".join(token.text for token in each.logprobs) == each.text for each in own)


@pytest.mark.parametrize("no_number", [float("nan"), float("-inf"), float("inf")])
def test_a_log_probability_that_is_no_number_makes_no_candidate_likelier(no_number: float) -> None:
    likely, unlikely, broken = [CandidateChoice(list[Any]().append) for _ in range(3)]
    for candidate, logprob in ((likely, -0.5), (unlikely, -100.0), (broken, no_number)):
        candidate(Text("a", 1, 0, (TokenText("a", b"a", logprob),)))
        candidate(Text("b", 1, 0, (TokenText("b", b"b", -0.5),)))
    ranked = sorted([likely, broken, unlikely], key=CandidateChoice.likelihood)
    assert ranked == [broken, unlikely, likely]


# Stop strings -------------------------------------------------------------------------------


class CountedStops(StopStrings):
    steps = 0

    def step(self, state: int, character: str) -> int:
        self.steps += 1
        return super().step(state, character)


def test_long_stop_strings_cost_a_step_a_character() -> None:
    """Each token took 16,000 comparisons, a millisecond, and 128 choices took them in one turn."""
    stops = CountedStops(tuple("a" * (1000 + place) + "b" for place in range(16)))
    stops.steps = 0
    scanner = StopScanner(stops)
    for _ in range(5000):
        scanner.scan("a")
    assert stops.steps == 5000
    assert len(scanner.held) == 1015


alphabet = st.text(st.sampled_from("ab "), min_size=1, max_size=6)


@given(stops=st.lists(alphabet, min_size=1, max_size=6), pieces=st.lists(st.text(st.sampled_from("abc "), max_size=8)))
def test_a_stop_string_is_found_as_by_comparing(stops: list[Any], pieces: list[Any]) -> None:
    scanner, out, text = StopScanner(StopStrings(stops)), "", ""
    for piece in pieces:
        text += piece
        certain, matched = scanner.scan(piece)
        out += certain
        found = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            assert (matched, out) == (stop, text[:start])
            return
        assert matched is None
        keep = max(
            size
            for size in range(7)
            if size == 0 or (any(s.startswith(text[-size:]) and size < len(s) for s in stops) and size <= len(text))
        )
        assert (out, scanner.held) == (text[: len(text) - keep], text[len(text) - keep :])
    assert out + scanner.flush() == text


# Bodies ----------------------------------------------------------------------------------------


LONG_BODIES = {
    "many turns": chat_body([{"role": "user", "content": "n=1"}] * 500),
    "a long turn": chat_body([{"role": "user", "content": "oak " * 30_000}]),
    "many mistakes": chat_body([{"role": "nobody"}] * 1000),
}


@pytest.mark.parametrize("body", LONG_BODIES.values(), ids=LONG_BODIES)
async def test_a_long_body_is_read_aside(body: dict[Any, Any], rather_slow: MockClock) -> None:
    """10,900 messages took 50 ms of one turn, and 800,000 token ids 59."""
    async with gateway_rig() as rig:
        aside = Counting()
        rig.gateway.runtime = evolve(rig.gateway.runtime, run_in_thread=aside)
        client = await rig.client()
        assert (await client.ask(post(chat_body([{"role": "user", "content": "n=1"}])))).status == 200
        assert aside.sizes == []
        assert (await client.ask(post(body))).status in {200, 400}
        assert len(aside.sizes) == 1
        socket = await rig.client()
        await socket.upgrade()
        await socket.say(create("oak " * 30_000))
        assert (await socket.events())[-1]["error"]["code"] == "context_length_exceeded"
        assert len(aside.sizes) == 2
        await socket.say(create("n=1"))
        assert (await socket.events())[-1]["type"] == "response.completed"
        assert len(aside.sizes) == 2


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_a_long_answer_about_tokens_is_counted_and_waits_for_its_reader(path: str, mock_clock: MockClock) -> None:
    """No time passes: on a busy machine, megabytes on their way would look like a client that stalls."""
    token = max(TINY.tokenizer.get_vocab().items(), key=lambda entry: len(entry[0]))[1]
    text = TINY.decode([token]) * 250_000
    asked = {"tokens": [token] * 250_000} if path == "/detokenize" else {"prompt": text}
    async with gateway_rig(backlog_bytes_max=256 * 1024) as rig:
        client = await rig.client()
        await client.send(post(asked, path))
        [outbox] = rig.gateway.connections
        while not outbox.backlog_bytes:
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert 0 < outbox.backlog_bytes <= 256 * 1024
        counted_bytes = rig.gateway.memory.answers.reserved_bytes + ANSWER_BYTES_FREE
        reply = await client.reply()
        assert (reply.status, reply.whole, len(reply.body)) == (200, True, counted_bytes)
        assert reply.json["text"] == text if path == "/detokenize" else reply.json["count"] == 250_000
        await client.ask(head())
        assert rig.gateway.memory.answers.reserved_bytes == 0
