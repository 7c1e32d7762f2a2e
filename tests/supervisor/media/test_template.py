"""The template of the decoders: one that does not read makes jobs wait and fails none, and one without a filter starts none."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from actors.media import jobs
from actors.media.jobs import DecodeContent, ImageFacts, Job, JobLimits
from protocol.errors import StartFailed
from supervisor.media.template import DecoderTemplate, decoder_template
from supervisor.processes.output_log import OutputLog
from supervisor.processes.process import GracePeriods
from supervisor.supervision.registration import Registration

JOB = Job(DecodeContent(ImageFacts(1, 1), frames=tuple(range(8_000))), JobLimits(1, 1, 1))  # as long as packets get
JOBS = 8  # more than a socket takes


@pytest.fixture
def content() -> Iterator[int]:
    """Yield a descriptor."""
    opened = os.open(os.devnull, os.O_RDONLY)
    yield opened
    os.close(opened)


async def test_jobs_wait_while_the_template_does_not_read(content: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    template, read, begun = DecoderTemplate(trio.socket.from_stdlib_socket(ours)), 0, 0

    async def begin() -> None:
        nonlocal begun
        async with template.job(JOB, content):
            begun += 1

    with trio.fail_after(10), template.control, theirs:
        async with trio.open_nursery() as nursery:
            for _ in range(JOBS):
                nursery.start_soon(begin)
            await wait_all_tasks_blocked()
            assert 0 < begun < JOBS
            while read < JOBS:
                packet, descriptors, _, _ = socket.recv_fds(theirs, jobs.PACKET_BYTES_MAX, 2)
                assert packet == jobs.encode(JOB)
                for descriptor in descriptors:
                    os.close(descriptor)
                read += 1
                await wait_all_tasks_blocked()
    assert begun == JOBS


async def test_jobs_that_wait_fail_when_the_template_has_died(content: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    template, failed = DecoderTemplate(trio.socket.from_stdlib_socket(ours)), 0

    async def begin() -> None:
        nonlocal failed
        try:
            async with template.job(JOB, content):
                pass
        except OSError:
            failed += 1

    with trio.fail_after(10), theirs:
        async with trio.open_nursery() as nursery:
            for _ in range(JOBS):
                nursery.start_soon(begin)
            await wait_all_tasks_blocked()
            assert failed == 0
            template.control.close()
    assert 0 < failed < JOBS


UNFILTERED = """
from actors.media.decoder import __main__ as template, trial
trial.passes = lambda _, filtered: not filtered
template.main()
"""


@pytest.mark.parametrize("required", [True, False])
async def test_decoders_without_a_filter_start_only_where_none_is_required(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, required: bool
) -> None:
    registration: Registration[DecoderTemplate] = Registration()
    command, output_log = (sys.executable, "-c", UNFILTERED), OutputLog(tmp_path / "decoders.log")
    run = partial(decoder_template, registration, output_log, GracePeriods(), {}, command, filter_required=required)
    with trio.fail_after(60):
        if required:
            with pytest.raises(StartFailed, match=r"no sandbox on this host: .*; set sandbox = \"preferred\""):
                await run()
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await registration.wait()
            nursery.cancel_scope.cancel()
    assert "the sandbox of the media decoders is weaker" in caplog.text
