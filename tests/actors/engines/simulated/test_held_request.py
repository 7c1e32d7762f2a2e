"""A request inside a simulated engine, before and after it was preempted."""

from __future__ import annotations

from actors.engines.simulated.held_request import HeldRequest
from actors.engines.simulated.kv_memory import Lease
from tests.rig.simulated_engines import generate


def test_a_preempted_request_computes_its_answer_again_as_a_part_of_its_prompt() -> None:
    held = HeldRequest(generate("a", [1, 2, 3], 9), [1, 2, 3], digests=[], lease=Lease([], 1), computed=3)
    assert held.kv_tokens == 3
    held.output += [7, 8]
    assert (held.kv_tokens, held.answered) == (4, [7, 8]), "the last token is in no page yet"
    held.preempt()
    assert (held.prompt, held.answered) == ([1, 2, 3, 7, 8], [])
    assert (held.computed, held.kv_tokens, held.digests, held.lease) == (0, 0, None, None)
    held.computed = 5
    held.output += [9]
    assert (held.kv_tokens, held.answered) == (5, [9])
    held.preempt()
    assert (held.prompt, held.output) == ([1, 2, 3, 7, 8, 9], [7, 8, 9])
