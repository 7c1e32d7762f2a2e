"""Signals that ask a process for its end are heard from the first to the last moment at which it has children."""

from __future__ import annotations

import signal

import trio

from supervisor.signals import SIGNALS, received

DEADLY = {signal.SIG_DFL, signal.default_int_handler}


async def test_o_no_signal_ends_a_process_that_does_not_listen_any_more_and_still_has_children_to_end():
    """Trio gave back what was there before: SIGTERM ended a launcher with -15 while it ended what was left."""
    with received():
        pass
    assert not DEADLY & {signal.getsignal(number) for number in SIGNALS}
    with received():
        for number in SIGNALS:
            signal.raise_signal(number)  # nobody takes them up
    for number in SIGNALS:
        signal.raise_signal(number)


async def test_a_signal_that_comes_just_before_somebody_listens_is_heard(monkeypatch):
    opened = trio.open_signal_receiver

    def late(*numbers):
        signal.raise_signal(signal.SIGTERM)
        return opened(*numbers)

    monkeypatch.setattr(trio, "open_signal_receiver", late)
    with received() as signals, trio.fail_after(5):
        async for number in signals:
            assert number == signal.SIGTERM
            break
