"""The long runs detect an attack that failed, and count a planned disconnect as no failure."""

from collections.abc import Callable
from threading import Event, Lock, current_thread
from typing import Any

import pytest

from bench.rig.clients import Outcome
from bench.siege import attack_during, no_attack
from bench.soak import Tally

CONNECTION = {"code": "connection", "message": "reset"}
INTERNAL = {"code": "internal", "message": "a bug"}


def test_an_attack_that_lasts_raises_nothing() -> None:
    with attack_during(no_attack, 1):
        pass


def dies(port: int, over: Event) -> None:
    raise AssertionError("no such gateway")


def leaves(port: int, over: Event) -> None:
    """Attack for no time at all."""


@pytest.mark.parametrize(("attack", "why"), [(dies, AssertionError), (leaves, RuntimeError)])
def test_an_attack_that_is_over_before_its_time_fails_the_run(
    attack: Callable[[Any, Any], Any], why: type[AssertionError] | type[RuntimeError]
) -> None:
    threads = []

    def noted(port: int, over: Event) -> None:
        threads.append(current_thread())
        begun.release()
        attack(port, over)

    begun = Lock()
    begun.acquire()
    with pytest.raises(RuntimeError, match="the attack failed") as raised, attack_during(noted, 1):
        begun.acquire()
        threads[0].join(10)
    assert isinstance(raised.value.__cause__, why)


@pytest.mark.parametrize(
    ("kind", "left", "outcome", "how"),
    [
        ("stream", False, Outcome(text="x", finish="stop"), "whole"),
        ("stream", True, Outcome(text="x", finish="stop"), "whole"),
        ("stream", True, Outcome(), "left"),
        ("stream", True, Outcome(error=CONNECTION), "left"),
        ("stream", True, Outcome(error=INTERNAL, status=500), "failed"),
        ("stream", False, Outcome(error=CONNECTION), "failed"),
        ("response.cancel", True, Outcome(finish="cancelled"), "left"),
        ("response.cancel", True, Outcome(error=CONNECTION), "failed"),
        ("response.cancel", True, Outcome(error=INTERNAL), "failed"),
    ],
)
def test_an_answer_counts_as_left_only_if_the_disconnect_ended_it(
    kind: str, left: bool, outcome: Outcome, how: str
) -> None:
    tally = Tally({"p": "x"})
    tally.note(kind, left, "p", outcome)
    assert tally.outcomes == {f"{kind} {how}": 1}
    assert bool(tally.wrong) is (how == "failed")
