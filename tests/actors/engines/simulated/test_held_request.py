"""A request inside a simulated engine, before and after it was preempted."""

from __future__ import annotations

from actors.engines.simulated.held_request import HeldRequest
from actors.engines.simulated.kv_memory import KvMemory, Lease
from tests.rig.simulated_engines import generate


def test_a_preempted_request_computes_its_answer_again_as_a_part_of_its_prompt() -> None:
    asked = generate("a", [1, 2, 3], 9)
    held = HeldRequest(asked, asked.tokens, digests=[], lease=Lease([], 1), computed=3)
    assert held.kv_tokens == 3
    held.output += [7, 8]
    assert (held.kv_tokens, held.answered) == (4, [7, 8]), "the last token is in no page yet"
    held.preempt()
    assert (held.prompt.tolist(), held.answered) == ([1, 2, 3, 7, 8], [])
    assert (held.computed, held.kv_tokens, held.digests, held.lease) == (0, 0, None, None)
    held.computed = 5
    held.output += [9]
    assert (held.kv_tokens, held.answered) == (5, [9])
    held.preempt()
    assert (held.prompt.tolist(), held.output) == ([1, 2, 3, 7, 8, 9], [7, 8, 9])


PAGE = 8
SAME = list(range(100))


def held(
    tokens: list[int] = SAME, *, computed: int = 0, salt: str | None = None, has_begun: bool = False
) -> HeldRequest:
    made = HeldRequest(generate("a", tokens, salt=salt), computed=computed, has_begun=has_begun)
    made.look_up(PAGE, None, caches=True)
    return made


def test_a_prompt_finds_what_others_have_computed_until_it_begins() -> None:
    memory, first, second = KvMemory(64), held(), held([*SAME[:40], *SAME])
    for each in (first, second):
        each.lease = memory.take(each.reusable(PAGE), 20)
    assert first.lease is not None
    for digest in first.reusable(PAGE)[:3]:
        memory.publish(first.lease, digest)
    assert second.find(memory, PAGE) == 24
    assert (second.computed, second.cached) == (24, 24)
    for digest in first.reusable(PAGE)[3:]:
        memory.publish(first.lease, digest)
    assert second.find(memory, PAGE) == 16, "no more is the same"
    assert second.find(memory, PAGE) == 0
    third = held()
    third.lease, third.has_begun = memory.take([], 12), True
    assert third.find(memory, PAGE) == 0
