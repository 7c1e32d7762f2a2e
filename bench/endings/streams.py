"""The streams that a scene disturbs, and what must hold of their answers and of a new request afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from bench.rig.clients import BackgroundReader, Chat, Outcome, ResponsesSocket, chat_body, response_body
from bench.rig.node import Node, wait_until
from bench.rig.prompts import OAK_PROMPT, STORY_PROMPT

TOKENS = 400  # of an answer that must still be running when something dies
BEGIN_TRIES = 5

Times = dict[str, float]


def check(holds: object, sentence: str) -> None:
    """Raise `AssertionError` with a sentence unless a condition holds."""
    if not holds:
        raise AssertionError(sentence)


def references(target: Node) -> dict[str, str]:
    """Return the complete texts, by prompt, that the answers of the scenes must equal."""
    long = Chat(target.port, chat_body(STORY_PROMPT, TOKENS)).read()
    short = Chat(target.port, chat_body(OAK_PROMPT)).read()
    check(long.whole and short.whole, f"the node does not answer: {long.error or short.error}")
    return {STORY_PROMPT: long.text, OAK_PROMPT: short.text}


@contextmanager
def streams(target: Node) -> Iterator[tuple[list[BackgroundReader], ResponsesSocket]]:
    """Run two HTTP streams and one WebSocket response, past their first tokens; yield their readers and the WebSocket.

    On a busy machine an answer may be complete before this process runs again; then the streams are started again.
    """
    for _ in range(BEGIN_TRIES):
        chats = [Chat(target.port, chat_body(STORY_PROMPT, TOKENS)) for _ in range(2)]
        socket, outcome = ResponsesSocket(target.port), Outcome()
        readers: list[BackgroundReader] = []
        try:
            socket.send(response_body(STORY_PROMPT, TOKENS))
            readers += [BackgroundReader(chat.read) for chat in chats]
            readers.append(BackgroundReader(partial(socket.read, outcome)))
            outcomes = [*(chat.outcome for chat in chats), outcome]
            check(wait_until(partial(_all_begun, outcomes), 60.0) is not None, "the streams did not begin")
            if all(reader.outcome is None for reader in readers):
                yield readers, socket
                return
        finally:
            _disconnect(chats, socket, readers)
    raise RuntimeError("the streams were over before anything could happen")


def _all_begun(outcomes: list[Outcome]) -> bool:
    return all(outcome.first_at for outcome in outcomes)


def _disconnect(chats: list[Chat], socket: ResponsesSocket, readers: list[BackgroundReader]) -> None:
    socket.leave()
    for chat in chats:
        chat.leave()
    for reader in readers:
        reader.wait()
    socket.close()
    for chat in chats:
        chat.close()


def end_in_retryable_error(readers: list[BackgroundReader], since: float) -> float:
    """Check that each stream ended in a retryable error; return how long after `since` the last one ended."""
    outcomes = [reader.wait() for reader in readers]
    for outcome in outcomes:
        check(not outcome.whole and outcome.finish is None, f"a cut answer looks whole: {outcome.finish}")
        assert outcome.error is not None, "a cut answer ended without an error"
        cause = outcome.error.get("cause", outcome.error["code"])  # `response.failed` has it beside the code
        check(cause in {"engine_lost", "actor_lost", "draining"}, f"a cut answer ended in {outcome.error}")
    return max(outcome.ended_at for outcome in outcomes) - since


def end_complete(readers: list[BackgroundReader], texts: dict[str, str]) -> float:
    """Check that each stream ended with its whole text; return when the last one ended."""
    outcomes = [reader.wait() for reader in readers]
    for outcome in outcomes:
        check(outcome.whole and outcome.text == texts[STORY_PROMPT], f"a stream was cut: {outcome.error}")
    return max(outcome.ended_at for outcome in outcomes)


def end_incomplete(readers: list[BackgroundReader]) -> None:
    """Check that no stream of a node that was killed claims to be complete."""
    for reader in readers:
        check(not reader.wait().whole, "a cut answer looks whole")


def served(target: Node, since: float, texts: dict[str, str]) -> float:
    """Send a new request, check its answer, and return how long after `since` its first token came."""
    while True:
        outcome = Chat(target.port, chat_body(OAK_PROMPT)).read()
        if outcome.status != 503 or outcome.headers.get("x-should-retry") != "true":
            break
        time.sleep(0.01)  # the node had not noticed the death yet; stock clients retry, too
    check(outcome.whole, f"a new request was not served: {outcome.status} {outcome.error}")
    check(outcome.text == texts[OAK_PROMPT], f"a new request was answered {outcome.text!r}")
    return (outcome.first_at or outcome.ended_at) - since
