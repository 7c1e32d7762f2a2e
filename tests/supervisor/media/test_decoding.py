"""Jobs in real processes: what they answer, how they end, and what a process that was taken over gains: nothing."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
import trio

from actors.media import jobs
from actors.media.jobs import ImageFacts, VideoFacts
from actors.media.planning import Plan, plan
from protocol.errors import BadRequest, DeadlineExceeded, NotReady, RequestError, TooLarge, Unsupported
from protocol.messages.media import Media, Modality
from protocol.tensors import Dtype
from supervisor.media.contents import StoredContent, content_writer
from supervisor.media.template import decoder_environment
from tests.rig import media_samples as samples
from tests.rig.media import decoders, limited, open_descriptors
from tests.rig.media_samples import HEIGHT, WIDTH
from tests.rig.vision import LAYOUT

pytestmark = pytest.mark.realtime

IMAGE, VIDEO = Media(Modality.IMAGE, ""), Media(Modality.VIDEO, "")


@contextmanager
def stored(content: bytes, *, is_data_url: bool = False) -> Iterator[StoredContent]:
    with content_writer() as writer:
        writer.write(content)
        kept = writer.finish(is_data_url=is_data_url)
    try:
        yield kept
    finally:
        kept.close()


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that have not ended."""
    found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in found if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"]


def processes() -> list[int]:
    """Return the processes of decoders that run below this one: the template, and then its jobs."""
    with suppress(FileNotFoundError, ProcessLookupError):
        templates = children(os.getpid())
        return [*templates, *(job for template in templates for job in children(template))]
    return processes()  # one ended while it was looked at


async def test_an_image_is_inspected_and_decoded(tmp_path: Path) -> None:
    async with decoders(tmp_path) as found:
        with stored(samples.png()) as content:
            inspected = await found.inspect(content, Modality.IMAGE)
            assert inspected.content is content
            assert inspected.digest == hashlib.sha256(samples.png()).hexdigest()
            assert inspected.facts == ImageFacts(HEIGHT, WIDTH)
            tensor = await found.decode(content, plan(IMAGE, LAYOUT, inspected.digest, inspected.facts))
    assert (tensor.dtype, tensor.shape) == (Dtype.UINT8, (1, HEIGHT, WIDTH, 3))
    assert bytes(tensor.data) == samples.picture().tobytes()
    assert tensor.data.readonly


async def test_a_large_image_is_mapped_and_its_memory_is_freed(tmp_path: Path) -> None:
    facts = ImageFacts(1600, 2400)
    whole = Plan(
        plan(IMAGE, LAYOUT, "0" * 64, facts).item,
        jobs.DecodeContent(facts, 1600, 2400),
        Dtype.UINT8,
        (1, 1600, 2400, 3),
    )
    async with decoders(tmp_path) as found:
        with stored(samples.png(2400, 1600)) as content:
            tensor = await found.decode(content, whole)
        assert tensor.data.nbytes == whole.size_bytes
        assert tensor.data[:3].tolist() == [255, 0, 0]
        before = open_descriptors()
        found.memory.release(tensor)
        assert tensor.data[:3].tolist() == [255, 0, 0]  # whoever has it may still read
        del tensor
        with trio.fail_after(60):
            while open_descriptors() > before - 2:  # noqa: ASYNC110  # a thread closes the last
                await trio.sleep(0.01)
    assert "memfd:media" not in Path("/proc/self/maps").read_text()


async def test_a_data_url_is_decoded_in_the_process(tmp_path: Path) -> None:
    async with decoders(tmp_path) as found:
        with stored(samples.data_url(samples.jpeg()).encode(), is_data_url=True) as text:
            inspected = await found.inspect(text, Modality.IMAGE)
            assert text.descriptor == -1
            assert inspected.digest == hashlib.sha256(samples.jpeg()).hexdigest()
            assert inspected.content.size_bytes == len(samples.jpeg())
            tensor = await found.decode(inspected.content, plan(IMAGE, LAYOUT, inspected.digest, inspected.facts))
            inspected.content.close()
    assert tensor.shape == (1, HEIGHT, WIDTH, 3)


@pytest.mark.parametrize("container", samples.CODECS)
async def test_the_frames_of_a_video_are_decoded(tmp_path: Path, container: str) -> None:
    async with decoders(tmp_path) as found:
        with stored(samples.video(container)) as content:
            inspected = await found.inspect(content, Modality.VIDEO)
            assert inspected.facts == VideoFacts(HEIGHT, WIDTH, 12, 4.0)
            step = plan(VIDEO, LAYOUT, inspected.digest, inspected.facts)
            tensor = await found.decode(content, step)
    assert tensor.shape == (6, *step.shape[1:])
    size = len(tensor.data) // 6
    brightness = [tensor.data[frame * size + size // 2] for frame in range(6)]
    assert brightness == sorted(brightness)
    assert brightness[-1] > 240


REFUSED = [
    (b"hello", Modality.IMAGE, Unsupported, "the image cannot be taken: it is of no type that is known here"),
    (samples.video(), Modality.IMAGE, Unsupported, r"it is a video \(MP4\), and an image is expected"),
    (samples.png(), Modality.VIDEO, Unsupported, r"the video cannot be taken: it is an image \(PNG\)"),
    (samples.embeddings(), Modality.VIDEO, Unsupported, "a safetensors file"),
    (samples.png_bomb(40_000, 25_000), Modality.IMAGE, TooLarge, "the image is too large: it has 40000 x 25000 pixels"),
    (
        samples.png()[:30],
        Modality.IMAGE,
        BadRequest,
        "the image cannot be read: the header of the PNG image is corrupt",
    ),
    (samples.animated("GIF"), Modality.IMAGE, Unsupported, "animated GIF"),
    (b"\x80\x04\x95abc", Modality.IMAGE, Unsupported, "a pickle can run code"),
]


async def test_what_is_refused_has_its_code_and_a_sentence(tmp_path: Path) -> None:
    async with decoders(tmp_path) as found:
        for content, modality, error, reason in REFUSED:
            with stored(content) as kept, pytest.raises(error, match=reason) as caught:
                await found.inspect(kept, modality)
            assert type(caught.value) is error
        assert (found.counts.crashes, found.counts.malformed) == (0, 0)


async def test_a_job_whose_asker_leaves_is_killed_at_once(tmp_path: Path) -> None:
    async with decoders(tmp_path, command=hostile("time.sleep(1000)")) as found:
        with stored(samples.png()) as content, trio.move_on_after(0.5):
            await found.inspect(content, Modality.IMAGE)
        with trio.fail_after(60):
            while len(processes()) > 1:  # noqa: ASYNC110  # nobody tells when a process is gone
                await trio.sleep(0.001)


async def test_a_job_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    async with decoders(tmp_path, limited(decode_s=0.9), hostile("while True: pass", free=False)) as found:
        with stored(samples.png()) as content, pytest.raises(BadRequest, match=r"more than 0\.9 s of processor time"):
            await found.inspect(content, Modality.IMAGE)
        assert found.counts.crashes == 0
    async with decoders(tmp_path, limited(decode_s=0.1), hostile("import time; time.sleep(100)")) as found:
        with stored(samples.png()) as content, pytest.raises(DeadlineExceeded, match="the machine is busy"):
            await found.inspect(content, Modality.IMAGE)


# Processes that a content has taken over ----------------------------------------------------

HOSTILE = """
import os, socket, signal, sys, time, fcntl
from actors.media.decoder import __main__ as template, job, sandbox
from actors.media import jobs
{free}
def run(task, answers, descriptor):
    opened = jobs.encode(jobs.Opened("0" * 64, os.lseek(descriptor, 0, os.SEEK_END)))
{body}
import actors.media.decoder.trial
actors.media.decoder.trial.passes = lambda *_, **__: True
"""


FREE = "sandbox.enter = lambda *_, **__: None"


def hostile(body: str, *, free: bool = True) -> tuple[str, ...]:
    """Return the command of a template whose jobs do something else, free of their sandbox or in it."""
    lines = "\n".join(f"    {line}" for line in dedent(body).splitlines())
    return sys.executable, "-c", f"{HOSTILE.format(body=lines, free=FREE * free)}\njob.run = run\ntemplate.main()"


def hostile_by_content(bodies: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a template whose jobs do what the first byte of their content is the number of."""
    cases = (f"if number == {number}:\n{indent(dedent(body).strip(), '    ')}" for number, body in enumerate(bodies))
    return hostile("\n".join(["number = os.pread(descriptor, 1, 0)[0]", *cases]))


INSPECTED = "jobs.encode(jobs.InspectedHeader(jobs.ImageFacts({}, {})))"
FALSE_ANSWERS = [
    'answers.send(b"nonsense")',
    'answers.send(b"{}")',
    "answers.send(jobs.encode(jobs.Decoded()))",
    f"answers.send({INSPECTED.format(1, 1)})",
    "answers.send(opened); answers.send(opened)",
    'answers.send(jobs.encode(jobs.Opened("../../etc", 1)))',
    'answers.send(jobs.encode(jobs.Opened("0" * 64, 1 << 60)))',
    f"answers.send(opened); answers.send({INSPECTED.format(1 << 40, 1 << 40)})",
    f"answers.send(opened); answers.send({INSPECTED.format(0, 5)})",
    f"answers.send(opened); answers.send({INSPECTED.format(-5, -5)})",
    "answers.send(opened); answers.send(jobs.encode(jobs.InspectedHeader(jobs.VideoFacts(5, 5, 5, 5.0))))",
    "answers.send(opened); answers.send(b'x' * 60000)",
]


async def test_a_false_answer_costs_its_own_item_alone(tmp_path: Path) -> None:
    async with decoders(tmp_path, command=hostile_by_content(FALSE_ANSWERS)) as found:
        for number, body in enumerate(FALSE_ANSWERS):
            with stored(bytes([number])) as content, pytest.raises(BadRequest, match="gave a false answer"):
                await found.inspect(content, Modality.IMAGE)
            assert found.counts.malformed == number + 1, body


FALSE_FILES = [
    "answers.send(jobs.encode(jobs.Decoded()))",  # none
    "socket.send_fds(answers, [jobs.encode(jobs.Decoded())], [job.write_sealed([bytes(5)])])",  # too small
    "socket.send_fds(answers, [jobs.encode(jobs.Decoded())], [job.write_sealed([bytes(1 << 20)])])",  # too large
    """
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.truncate(unsealed, {size})
    socket.send_fds(answers, [jobs.encode(jobs.Decoded())], [unsealed])
    """,
    """
    writable = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.truncate(writable, {size})
    fcntl.fcntl(writable, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    socket.send_fds(answers, [jobs.encode(jobs.Decoded())], [writable])
    """,
    "socket.send_fds(answers, [jobs.encode(jobs.Decoded())], [os.open('/dev/zero', os.O_RDONLY)])",
    "socket.send_fds(answers, [jobs.encode(jobs.Decoded())], [os.open('/etc/passwd', os.O_RDONLY)])",
]


async def test_a_file_that_could_change_or_has_another_size_is_never_mapped(tmp_path: Path) -> None:
    step = plan(IMAGE, LAYOUT, "0" * 64, ImageFacts(HEIGHT, WIDTH))
    bodies = [body.format(size=step.size_bytes) for body in FALSE_FILES]
    async with decoders(tmp_path, command=hostile_by_content(bodies)) as found:
        before = open_descriptors()
        for number, body in enumerate(bodies):
            with stored(bytes([number])) as content, pytest.raises(BadRequest, match="gave a false answer"):
                await found.decode(content, step)
            assert (found.counts.malformed, open_descriptors()) == (number + 1, before), body


async def test_a_result_with_further_descriptors_leaves_none_open(tmp_path: Path) -> None:
    step = plan(IMAGE, LAYOUT, "0" * 64, ImageFacts(HEIGHT, WIDTH))
    body = f"""
    first = job.write_sealed([bytes({step.size_bytes})])
    socket.send_fds(answers, [jobs.encode(jobs.Decoded())], [first] + [os.dup(0) for _ in range(100)])
    """
    async with decoders(tmp_path, command=hostile(body)) as found:
        before = open_descriptors()
        with stored(samples.png()) as content, pytest.raises(RequestError):
            await found.decode(content, step)
        assert open_descriptors() == before


async def test_a_descriptor_that_nobody_asked_for_is_closed(tmp_path: Path) -> None:
    body = """
    file = job.write_sealed([b"x"])
    socket.send_fds(answers, [opened], [file])
    socket.send_fds(answers, [jobs.encode(jobs.InspectedHeader(jobs.ImageFacts(5, 5)))], [file])
    """
    false = "socket.send_fds(answers, [jobs.encode(jobs.Opened('x', 1))], [os.dup(0)])"
    async with decoders(tmp_path, command=hostile(body)) as found:
        before = open_descriptors()
        with stored(samples.png()) as content:
            await found.inspect(content, Modality.IMAGE)
        assert open_descriptors() == before
    async with decoders(tmp_path, command=hostile(false)) as found:
        before = open_descriptors()
        for is_data_url in (False, True):
            with stored(samples.png(), is_data_url=is_data_url) as content, pytest.raises(BadRequest):
                await found.inspect(content, Modality.IMAGE)
        assert open_descriptors() == before


async def test_a_crash_costs_its_own_item_alone(tmp_path: Path) -> None:
    command = hostile("os.kill(os.getpid(), os.pread(descriptor, 1, 0)[0])")
    async with decoders(tmp_path, command=command) as found:
        (template,) = processes()
        for count, number in enumerate((signal.SIGSEGV, signal.SIGABRT, signal.SIGILL), start=1):
            with stored(bytes([number])) as content, pytest.raises(BadRequest, match="its decoder crashed"):
                await found.inspect(content, Modality.IMAGE)
            assert found.counts.crashes == count
        assert processes() == [template]


async def test_a_decoder_that_the_system_kills_is_no_fault_of_the_content(tmp_path: Path) -> None:
    async with decoders(tmp_path, command=hostile(f"os.kill(os.getpid(), {signal.SIGKILL.value})")) as found:
        with stored(samples.png()) as content, pytest.raises(NotReady, match="decoder of the image was killed"):
            await found.inspect(content, Modality.IMAGE)
        assert found.counts.crashes == 1


# The template -------------------------------------------------------------------------------


async def test_a_template_that_dies_fails_its_jobs_with_an_error_that_may_be_retried(tmp_path: Path) -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(Exception, match="the template of the media decoders died"), flatten_subgroups=True
    ):
        async with decoders(tmp_path, command=hostile("import time; time.sleep(100)")) as found:

            async def kill() -> None:
                await trio.sleep(0.3)
                os.kill(processes()[0], signal.SIGKILL)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill)
                with stored(samples.png()) as content, pytest.raises(NotReady, match="were lost"):
                    await found.inspect(content, Modality.IMAGE)
            with trio.fail_after(60):
                while processes():  # noqa: ASYNC110  # the jobs die with it
                    await trio.sleep(0.01)
            await trio.sleep(5)


async def test_no_process_that_can_be_started_is_an_error_that_may_be_retried(tmp_path: Path) -> None:
    command = (sys.executable, "-c", f"{HOSTILE.format(body='    pass', free=FREE)}\n{FORK_FAILS}\ntemplate.main()")
    async with decoders(tmp_path, command=command) as found:
        with stored(samples.png()) as content, pytest.raises(NotReady, match="no process could be started"):
            await found.inspect(content, Modality.IMAGE)


FORK_FAILS = """
def fork():
    raise BlockingIOError(11, "Resource temporarily unavailable")
os.fork = fork
"""


async def test_a_template_that_cannot_start_says_why(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "raise ImportError('there is no Pillow')")
    expected = pytest.RaisesExc(Exception, match="could not start: ImportError: there is no Pillow")
    with pytest.RaisesGroup(expected, flatten_subgroups=True):
        async with decoders(tmp_path, command=command):
            pass


async def test_nothing_is_left_when_the_decoders_end(tmp_path: Path) -> None:
    before = open_descriptors()
    async with decoders(tmp_path, command=hostile("while True: pass")) as found:
        with ExitStack() as kept:
            content = kept.enter_context(stored(samples.png()))
            with trio.move_on_after(0.3):
                await found.inspect(content, Modality.IMAGE)
    assert processes() == []
    assert open_descriptors() == before


def test_the_environment_of_decoders_has_nothing_of_the_nodes_own() -> None:
    own = {"ESPALIER_ADMIN_KEY": "secret", "AWS_SECRET_ACCESS_KEY": "secret", "HOME": "/root", "PATH": "/bin"}
    assert set(decoder_environment(own)) == {"PYTHONPATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
    assert decoder_environment({"PYTHONPATH": "/more"})["PYTHONPATH"].endswith(":/more")


class ScriptedPoll:
    """Reports descriptors as ready, one batch after another."""

    def __init__(self, *batches: list[int]) -> None:
        self.batches = list(batches)

    def register(self, *_: object) -> None: ...
    def unregister(self, *_: object) -> None: ...

    def poll(self) -> list[tuple[int, int]]:
        if not self.batches:
            raise EOFError
        return [(fd, 0) for fd in self.batches.pop(0)]


def test_a_new_job_is_not_ended_by_the_end_of_the_one_whose_descriptor_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job ends, its asker leaves and another job comes, all at the same moment."""
    from actors.media.decoder.__main__ import Template, _Running

    begun: list[int] = []
    left: list[object] = []
    ours, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    first, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    pidfd = os.pidfd_open(pid)
    poll: Any = ScriptedPoll([ours.fileno()], [pidfd, control.fileno(), answers.fileno()])
    template = Template(control, base_bytes=0, filtered=False, poll=poll)
    running = _Running(pidfd, answers)
    template._by_pidfd[pidfd] = template._by_socket[answers.fileno()] = running  # noqa: SLF001

    def begin(_: bytes, fds: list[int]) -> None:
        begun.extend(fds)
        template._by_socket[fds[0]] = _Running(-1, socket.socket(fileno=fds[0]))  # noqa: SLF001

    monkeypatch.setattr(Template, "_begin", lambda _, *given: begin(*given))
    monkeypatch.setattr(Template, "_left", lambda _, one: left.append(one))
    socket.send_fds(ours, [b"a job"], [theirs.fileno(), 0])
    number = answers.fileno()
    with pytest.raises(EOFError):
        template.serve()
    assert begun[0] == number  # it has the number of the one that ended
    assert all(one is running for one in left)
    for each in (ours, control, kept, theirs, first, template._by_socket[number].answers):  # noqa: SLF001
        each.close()
    os.close(begun[1])
