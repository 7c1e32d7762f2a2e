"""Jobs for the decoders, and the check of their answers: a content may have taken over its reader's process.

So an answer must be one of a few kinds, in their order; a size or a shape must equal the one computed here; and a file
must be sealed before it is mapped, since a shrinking file would kill this process. A crash, a malformed answer or a
timeout costs a decoder its own item, and its process.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn, TypeVar

import msgspec
import trio
from attrs import define, field, frozen

from actors.media import jobs
from actors.media.jobs import Bounds, EmbeddingFacts, Facts, JobEnded, JobLimits, Opened, Refused, VideoFacts
from actors.media.media import Inspected
from actors.media.planning import Plan
from protocol.errors import (
    BadRequest,
    DeadlineExceeded,
    NotReady,
    Overloaded,
    RequestError,
    StartFailed,
    TooLarge,
    Unsupported,
)
from protocol.messages.media import DIGEST_LENGTH, Modality
from protocol.tensors import Tensor
from supervisor.media.contents import StoredContent, sealed_size
from supervisor.media.memory import MediaMemory
from supervisor.media.template import DecoderTemplate
from supervisor.printable import printable
from supervisor.sockets.descriptor_reserve import is_full
from supervisor.supervision.registration import Registration

A = TypeVar("A", bound=jobs.JobAnswer)

log = logging.getLogger(__name__)

READY_WITHIN_S = 10.0  # the restart of a template
SLOWDOWN_MAX = 4.0  # elapsed time over processor time of a job, on a busy machine
SLOWDOWN_GRACE_S = 2.0
RIGHTS_BYTES = 4  # one descriptor in a control message
FPS_MAX = 1_000.0
DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_LENGTH}}}")
REFUSALS: dict[str, tuple[type[RequestError], str]] = {
    "invalid": (BadRequest, "cannot be read"),
    "unsupported": (Unsupported, "cannot be taken"),
    "too_large": (TooLarge, "is too large"),
    "memory": (TooLarge, "is too large"),
    "bug": (BadRequest, "cannot be read"),
}


@frozen
class DecodeLimits:
    """The limits of a content and of its decoder's process."""

    bytes_max: int
    bounds: Bounds
    decode_s: float = 10.0  # processor time, to read the header of a content or to decode it
    memory_bytes_max: int = 1024 * 1024 * 1024  # one process


@define(eq=False)
class DecoderStatistics:
    """Counts of jobs, crashes and malformed answers."""

    jobs: int = 0
    crashes: int = 0
    malformed: int = 0


@define(eq=False)
class Decoders:
    """Inspects and decodes contents, each in a process of its own."""

    registration: Registration[DecoderTemplate]
    memory: MediaMemory
    limits: DecodeLimits
    counts: DecoderStatistics = field(factory=DecoderStatistics)

    async def inspect(self, content: StoredContent, modality: Modality) -> Inspected[StoredContent]:
        """Return the facts about a content; the text of a data URL is closed, and replaced by its decoded bytes."""
        task = jobs.Inspect(modality, content.is_data_url, self.limits.bytes_max, self.limits.bounds)
        output_bytes = self.limits.bytes_max if content.is_data_url else 1
        encoded: StoredContent | None = None
        try:
            async with self._answers(task, output_bytes, content, modality) as answers:
                opened = await answers.next(Opened)
                digest = answers.checked_digest(opened)
                if content.is_data_url:
                    size = opened.size_bytes
                    encoded = StoredContent(answers.take_file(size), size, free=content.free)
                inspected = await answers.next(jobs.InspectedHeader)
                facts = answers.checked_facts(inspected.facts)
            if encoded is not None:
                content.close()
                content, encoded = encoded, None
            return Inspected(content, digest, facts)
        finally:
            if encoded is not None:
                encoded.close()

    async def decode(self, content: StoredContent, plan: Plan) -> Tensor:
        """Return the planned tensor of a content."""
        async with self._answers(plan.task, plan.size_bytes, content, plan.item.modality) as answers:
            await answers.next(jobs.Decoded)
            descriptor = answers.take_file(plan.size_bytes)
            try:
                return Tensor(plan.dtype, plan.shape, self.memory.take(descriptor, plan.size_bytes))
            except OSError as error:
                raise Overloaded("there is no memory left for what was decoded") from error

    @asynccontextmanager
    async def _answers(
        self, task: jobs.Inspect | jobs.DecodeContent, output_bytes: int, content: StoredContent, modality: Modality
    ) -> AsyncIterator[_Answers]:
        """Run a job while the body reads its answers; leaving the body kills its process."""
        template = await self._template()
        limits = JobLimits(math.ceil(self.limits.decode_s), self.limits.memory_bytes_max, output_bytes)
        self.counts.jobs += 1
        try:
            async with template.job(jobs.Job(task, limits), content.descriptor) as connection:
                answers = _Answers(self, modality, connection)
                within_s = SLOWDOWN_MAX * self.limits.decode_s + SLOWDOWN_GRACE_S
                try:
                    with trio.fail_after(within_s):  # noqa: ASYNC100  # its body waits
                        yield answers
                finally:
                    answers.close()
        except trio.TooSlowError as error:
            raise DeadlineExceeded(f"the {modality} was not decoded in time: the machine is busy") from error
        except OSError as error:
            if is_full(error):
                raise Overloaded("there is no descriptor or no memory left for a decoder") from error
            raise NotReady("the media decoders were lost") from error

    async def _template(self) -> DecoderTemplate:
        template: DecoderTemplate | None = None
        with trio.move_on_after(READY_WITHIN_S):
            try:
                template = await self.registration.wait_started()
            except StartFailed as error:
                raise NotReady("the media decoders cannot start; the log of the server has the reason") from error
        if template is None:
            raise NotReady("the media decoders are starting")
        return template


@frozen(eq=False)
class _Answers:
    """The checked answers of one job, and their descriptors."""

    decoders: Decoders
    modality: Modality
    socket: trio.socket.SocketType
    received: list[int] = field(factory=list)  # descriptors until they are taken

    def close(self) -> None:
        """Close the descriptors that were not taken."""
        while self.received:
            os.close(self.received.pop())

    async def next(self, kind: type[A]) -> A:
        """Return the next answer; raises `RequestError` unless it is of this kind.

        A refusal, and the end of the job's process, raise it as well.
        """
        packet, ancillary, flags, _ = await self.socket.recvmsg(
            jobs.PACKET_BYTES_MAX, socket.CMSG_LEN(RIGHTS_BYTES), socket.MSG_CMSG_CLOEXEC
        )
        self.received.extend(
            int.from_bytes(data[:RIGHTS_BYTES], sys.byteorder)
            for level, type_, data in ancillary
            if (level, type_) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(data) >= RIGHTS_BYTES
        )
        if not packet:
            raise NotReady("the media decoders were lost")
        if flags & socket.MSG_CTRUNC:
            raise Overloaded("there is no descriptor left for what was decoded")
        answer = self._decoded(packet)
        if not isinstance(answer, kind):
            self._failed(answer)
        return answer

    def _decoded(self, packet: bytes) -> jobs.JobAnswer:
        try:
            answer: jobs.JobAnswer = jobs.decode_answer(packet)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.malformed("an answer that is none")
        return answer

    def _failed(self, answer: jobs.JobAnswer) -> NoReturn:
        """Raise the error of an unexpected answer."""
        if isinstance(answer, Refused):
            error, verdict = REFUSALS[answer.code]
            detail = printable(answer.detail)[: jobs.DETAIL_CHARACTERS_MAX]
            if answer.code == "bug":
                log.warning("a media decoder failed", extra={"modality": self.modality.value, "reason": detail})
            raise error(f"the {self.modality} {verdict}: {detail}")
        if not isinstance(answer, JobEnded):
            self.malformed("an answer out of order")
        if answer.signal < 0:
            raise NotReady("no process could be started for a media decoder")
        if answer.signal == signal.SIGXCPU:
            seconds = self.decoders.limits.decode_s
            raise BadRequest(
                f"the {self.modality} cannot be read: that takes more than {seconds:g} s of processor time"
            )
        self.decoders.counts.crashes += 1
        log.warning("a media decoder crashed", extra={"modality": self.modality.value, "signal": answer.signal})
        if answer.signal == signal.SIGKILL:  # by the kernel, for lack of memory: no fault of the content
            raise NotReady(f"the decoder of the {self.modality} was killed")
        raise BadRequest(f"the {self.modality} cannot be read: its decoder crashed")

    def malformed(self, what: str) -> NoReturn:
        """Count a malformed answer, and raise its error."""
        self.decoders.counts.malformed += 1
        log.error("a media decoder gave a false answer", extra={"modality": self.modality.value, "reason": what})
        raise BadRequest(f"the {self.modality} cannot be read: its decoder gave a false answer")

    def take_file(self, size_bytes: int) -> int:
        """Return the received descriptor of a sealed file of this size; any other is malformed."""
        if not self.received:
            self.malformed("no file")
        if not 0 <= size_bytes == sealed_size(self.received[0]):
            self.malformed("a file that is not sealed, or of another size")
        return self.received.pop(0)

    def checked_digest(self, opened: Opened) -> str:
        """Return the digest of a content."""
        bytes_max = self.decoders.limits.bytes_max
        if not (DIGEST.fullmatch(opened.digest) and 0 <= opened.size_bytes <= bytes_max):
            self.malformed("a digest that is none")
        return opened.digest

    def checked_facts(self, facts: Facts) -> Facts:
        """Return the facts about a content; facts beyond the limits of the job are malformed."""
        bounds = self.decoders.limits.bounds
        if (self.modality is Modality.VIDEO) is not isinstance(facts, VideoFacts):
            self.malformed("facts of another modality")
        if isinstance(facts, EmbeddingFacts):
            if min(facts.tokens, facts.width) < 1 or facts.tokens * facts.width > self.decoders.limits.bytes_max:
                self.malformed("an impossible shape")
            return facts
        if min(facts.height, facts.width) < 1 or facts.height * facts.width > bounds.pixels_max:
            self.malformed("an impossible size")
        if isinstance(facts, VideoFacts) and not (0 < facts.frames <= bounds.frames_max and 0 < facts.fps <= FPS_MAX):
            self.malformed("an impossible number of frames")
        return facts
