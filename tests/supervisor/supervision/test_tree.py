"""A tree as a value: what cannot be made, how long its stop takes, and its rendering."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
import trio

from supervisor.supervision.tree import Backoff, Child, Tree, render
from tests.rig.supervision import REST, TRANSIENT, child, tree


async def actor(inbox: object, slots: int, *, task_status: trio.TaskStatus[None]) -> None: ...


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: child(""), "'' is no name for a child: paths are made of names and slashes."),
        (lambda: tree(name="a/b"), "'a/b' is no name for a child: paths are made of names and slashes."),
        (lambda: tree(child("a"), child("b"), child("a")), "t: two children have the same name: a, b, a."),
        (lambda: child("a", start_within_s=0), "a: start_within_s is 0, but must be more than 0 and finite."),
        (lambda: child("a", stop_within_s=inf), "a: stop_within_s is inf, but must be more than 0 and finite."),
        (lambda: tree(restarts_window_s=inf - inf), "t: restarts_window_s is nan, but must be more than 0 and finite."),
        (lambda: tree(restarts_max=-1), "t: restarts_max is -1, but must not be negative."),
        (lambda: child("a", limits=(("x", 1), ("x", 2))), "a: two limits have the same name: x, x."),
        (lambda: child("a", significant=True), "a: a significant child ends its tree, so it cannot be permanent."),
        (lambda: tree(significant=True), "t: a significant child ends its tree, so it cannot be permanent."),
        (
            lambda: Child(name="a", run=actor, args=(1,)),
            "a: its function does not fit its 1 args: missing a required argument: 'slots'.",
        ),
        (lambda: Backoff(min_s=0), "the back-off: min_s is 0, but must be more than 0 and finite."),
        (lambda: Backoff(reset_after_s=-1), "the back-off: reset_after_s is -1, but must be more than 0 and finite."),
        (lambda: Backoff(min_s=9, max_s=3), "the back-off: min_s is 9, more than max_s, 3."),
        (lambda: Backoff(jitter=1.5), "the back-off: jitter is 1.5, but must be from 0 to 1."),
        (lambda: tree(child("a", needs=("b",)), child("b")), "t: a needs b, which is no child before it."),
        (lambda: tree(child("a"), child("b", needs=("b",))), "t: b needs b, which is no child before it."),
        (
            lambda: tree(child("a"), restarts_max=None),
            "t: it never gives up, so its back-off must count crashes, or it could spin.",
        ),
        (
            lambda: tree(child("a"), child("b", needs=()), strategy=REST),
            "t: b states what it needs, but in a tree that is rest for one each child needs all before it.",
        ),
    ],
)
def test_a_contradictory_tree_cannot_be_made(make: Callable[[], Child | Tree | Backoff], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == sentence


def test_a_tree_may_take_as_long_to_stop_as_its_children() -> None:
    inner = tree(child("a", stop_within_s=2), child("b", stop_within_s=30), name="inner")
    assert tree(inner, child("c", stop_within_s=1)).stop_within_s == 33


def test_a_tree_is_printed_with_all_its_policies_and_limits() -> None:
    engine = Child(
        name="engine",
        run=actor,
        args=(1, 2),
        start_within_s=600,
        stop_within_s=15,
        limits=(("slots", 16), ("kv_tokens", 20480)),
        about="SGLang on the CPU",
    )
    value = tree(
        child(
            "gateway",
            about="HTTP and WebSocket on 127.0.0.1:8000",
            limits=(
                ("connections", 1024),
                ("requests", 256),
                ("backlog_bytes", 1048576),
                ("body_bytes", 33554432),
                ("admit_within_s", 0.25),
            ),
        ),
        tree(
            engine,
            child("decode", limits=(("inbox", 16),)),
            name="tiny-0",
            about="one engine and the actor that feeds it",
            strategy=REST,
            restarts_max=5,
            restarts_window_s=300,
        ),
        child("load", restart=TRANSIENT, significant=True),
        tree(child("c", needs=()), name="w", needs=("gateway",), restarts_max=None, backoff=Backoff(crashes=True)),
        name="quickstart",
        about="one machine, one tiny model",
    )
    assert render(value).splitlines() == [
        "quickstart    one machine, one tiny model",
        "│             stops within 30 s",
        "│             one for one · at most 3 restarts in 30 s · failed starts wait 0.5 to 30 s",
        "├─ gateway    HTTP and WebSocket on 127.0.0.1:8000",
        "│             permanent · starts within 5 s · stops within 5 s",
        "│             connections 1,024 · requests 256 · backlog_bytes 1,048,576 · body_bytes 33,554,432 ·",
        "│             admit_within_s 0.25",
        "├─ tiny-0     one engine and the actor that feeds it",
        "│  │          permanent · stops within 20 s",
        "│  │          rest for one · at most 5 restarts in 300 s · failed starts wait 0.5 to 30 s",
        "│  ├─ engine  SGLang on the CPU",
        "│  │          permanent · starts within 600 s · stops within 15 s",
        "│  │          slots 16 · kv_tokens 20,480",
        "│  └─ decode  permanent · starts within 5 s · stops within 5 s",
        "│             inbox 16",
        "├─ load       transient · significant · starts within 5 s · stops within 5 s",
        "└─ w          permanent · needs gateway · stops within 5 s",
        "   │          one for one · never gives up · failures wait 0.5 to 30 s",
        "   └─ c       permanent · needs nothing · starts within 5 s · stops within 5 s",
    ]
