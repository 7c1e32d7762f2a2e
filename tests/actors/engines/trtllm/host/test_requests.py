"""A request that is left is aborted once, and never while a KV cache is on its way to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from attrs import define, field

from actors.engines.trtllm.host.library import Result, TrtllmOutput
from actors.engines.trtllm.host.requests import TrtllmRequest
from actors.engines.trtllm.host.translation import Reader
from protocol.messages.generation import Generate, Sampling
from protocol.token_ids import TokenIds

REQUEST = Generate("r", TokenIds.of([1, 2, 3]), Sampling(4))


@define(eq=False)
class Inside:
    """A request inside an engine, as far as an abort needs it."""

    outputs: Sequence[TrtllmOutput] = ()
    cached_tokens: int = 0
    aborts: int = field(default=0, init=False)

    def __aiter__(self) -> AsyncIterator[Result]:
        raise NotImplementedError

    def abort(self) -> None:
        self.aborts += 1


def asked(*, waits_for_transfer: bool = False) -> tuple[TrtllmRequest, Inside]:
    inside = Inside()
    reader = Reader(REQUEST, ())
    return TrtllmRequest(REQUEST, 1, reader, result=inside, waits_for_transfer=waits_for_transfer), inside


def test_a_request_that_is_left_twice_is_aborted_once() -> None:
    running, inside = asked()
    running.abort_if_safe()
    assert inside.aborts == 0
    running.leave()
    running.leave()
    assert inside.aborts == 1


def test_a_decode_is_aborted_only_once_it_has_its_kv_cache() -> None:
    running, inside = asked(waits_for_transfer=True)
    running.leave()
    assert inside.aborts == 0
    running.waits_for_transfer = False
    running.abort_if_safe()
    assert inside.aborts == 1


def test_a_request_that_is_left_before_the_engine_has_it_is_aborted_later() -> None:
    running, inside = asked()
    running.result = None
    running.leave()
    running.result = inside
    running.abort_if_safe()
    assert inside.aborts == 1
