"""The stages of a request with a picture before its answer begins: a client reaches each one and disconnects there.

The decoders are real, the engines simulated. All counts must be 0 for good: those of engines and links, the budgets of
the media actor, its decoders' processes, items at the encoder, and connections to the picture's server. A batch that an
encoder computes cannot be stopped in its middle, so `encoding` has the rest of one: up to 100 ms. Where others wait at
the encoder, the time is that until nothing more is held than before the request. After the tries of a stage every node
must have as many descriptors, files in memory, threads and names under /dev/shm as before.
"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

from bench.faults.aborts import TOKENS, Limits, Scene, Stage, leave, try_stages
from bench.faults.polling import Held, Poller, RequestNotReleased, beyond, children, remains, template_of
from bench.faults.scenario import Run
from bench.rig.clients import Chat
from bench.rig.cluster import FRONT, Cluster, Plan, cluster, cluster_engine_name
from bench.rig.node import wait_until
from bench.rig.pictures import commented, file_url, jpeg, picture_body, png, video, video_body
from bench.rig.vision_cluster import DECODE, ENCODER, PREFILL, simulated_plan
from bench.rig.vision_model import FACTOR, write_vision_model

LIMITS = Limits(target_ms=250.0, percent=99, reached_min=0.9)
DECODERS = "decoders"  # processes
LEFT_WITHIN_S = 15.0  # threads close freed descriptors, and Trio keeps an idle thread for 10 s
SMALL = 16 * FACTOR, 16 * FACTOR  # width and height
LARGE = 90 * FACTOR, 90 * FACTOR  # 8,100 tokens, 19 MB of pixels
HUGE = 7000, 7000  # as many pixels as a decoder takes: half a second or more of decoding
PIXELS_MAX = 128 * 128 * FACTOR**2
WIDTH = 1024
FILM = 640, 480, 300  # width, height and frames
ENCODE_S = 0.1  # of a batch, which cannot be stopped in its middle
LONG_ENCODE_S = 1.0
SLOTS = 2  # of the narrow encoder
ATTEMPTS = 5
COSTS = {"fixed_s": 0.01, "per_prefill_token_s": 0.00005}
NODES = (FRONT, ENCODER, PREFILL, DECODE)
PICTURE_BYTES = 8 * 1024 * 1024  # that it promises
TRICKLE_S = 0.02  # between two pieces
PIECE = b"\xff" * 512
HEAD = f"HTTP/1.1 200 OK\r\nContent-Type: image/jpeg\r\nContent-Length: {PICTURE_BYTES}\r\n\r\n".encode()


def plan(model: Path, files: Path, port: int, *, narrow: bool) -> Plan:
    """Return the plan of simulated engines, and a front that may fetch files and from a port of this machine."""
    encoder = {"batch_max": 1, "cache_bytes_max": 0} if narrow else {"cache_bytes_max": 0}
    return simulated_plan(
        model,
        encoder_slots=SLOTS if narrow else 16,
        encoder=encoder,
        encoding_costs={"fixed_s": LONG_ENCODE_S if narrow else ENCODE_S},
        costs=COSTS,
        width=WIDTH,
        media={
            "file_root": json.dumps(str(files)),
            "allowed_hosts": json.dumps([f"127.0.0.1:{port}"]),
            "allowed_networks": '["127.0.0.0/8"]',
        },
    )


class SlowServer:
    """A slow web server on loopback: a picture is still being fetched when its client leaves.

    `/silent` never answers, every other path sends a few bytes a second.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._stopped = Event()
        self.open: dict[socket.socket, bool] = {}  # connections, and whether a request has come
        Thread(target=self._accept, daemon=True).start()

    @property
    def asked(self) -> int:
        """The number of open connections on which something is fetched."""
        return sum(list(self.open.values()))

    def close(self) -> None:
        """End all connections, and listen no more."""
        self._stopped.set()
        for each in (self._listener, *self.open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.open[connection] = False
                Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            head = connection.recv(65_536)
            self.open[connection] = bool(head)
            if head and not head.startswith(b"GET /silent"):
                connection.sendall(HEAD)
                connection.settimeout(TRICKLE_S)
            while head and not self._stopped.is_set():
                try:
                    head = connection.recv(65_536)  # empty once the client has left
                except TimeoutError:
                    connection.send(PIECE)
        del self.open[connection]


@dataclass(kw_only=True)
class MediaScene(Scene):
    """The scene of a cluster with an encoder: the pictures that its stages send."""

    server: SlowServer
    files: Path
    _made: dict[str, bytes] = field(default_factory=dict)

    def asked(self, size: tuple[int, int]) -> dict[str, Any]:
        """Return a request about a picture of a size whose content no cache has."""
        name = f"{size[0]}-{size[1]}"
        if name not in self._made:
            self._made[name] = jpeg(*size, 1)
        number = next(self.numbers)
        url = file_url(self.files, f"{number}.jpg", commented(self._made[name], str(number).encode()))
        return picture_body(url, tokens_max=TOKENS)

    def same(self, name: str, make: Callable[[], bytes]) -> str:
        """Return the URL of a content that is always the same."""
        if not (self.files / name).exists():
            file_url(self.files, name, make())
        return (self.files / name).as_uri()


# The stages ------------------------------------------------------------------------------


def fetching(scene: MediaScene) -> tuple[float, bool]:
    """Disconnect while the front waits for an answer of the picture's server, or reads one that comes slowly."""
    url = f"http://127.0.0.1:{scene.server.port}/{scene.chance.choice(('silent', 'trickle'))}"
    with scene.request(picture_body(url, tokens_max=TOKENS)) as chat:
        return scene.left_when(chat, lambda _: scene.server.asked == 1, within_s=0.1)


def _decodes(held: Held) -> bool:
    return held.total(FRONT, "media_bytes", "prepared") > 0 and held.values[DECODERS] > 0


def decoding(scene: MediaScene) -> tuple[float, bool]:
    """Disconnect while a picture of as many pixels as there may be is decoded."""
    url = scene.same("huge.png", lambda: png(*HUGE, 1))
    with scene.request(picture_body(url, tokens_max=TOKENS)) as chat:
        return scene.left_when(chat, _decodes, within_s=0.05)


def decoding_video(scene: MediaScene) -> tuple[float, bool]:
    """Disconnect while a video is decoded."""
    with scene.request(video_body(scene.same("film.mp4", lambda: video(*FILM)), tokens_max=TOKENS)) as chat:
        return scene.left_when(chat, _decodes, within_s=0.05)


def _queued(held: Held, state: str) -> float:
    return held.total(ENCODER, "encoder_queue_items", state)


def encoding(scene: MediaScene) -> tuple[float, bool]:
    """Disconnect while the encoder computes the only picture of its batch."""
    with scene.request(scene.asked(SMALL)) as chat:
        return scene.left_when(chat, lambda held: _queued(held, "computing") == 1, within_s=ENCODE_S / 2)


def sending(scene: MediaScene, peer: str, direction: str) -> tuple[float, bool]:
    """Disconnect while a tensor crosses the front's link with another node in a direction."""
    words = "link_attached_bytes", f'peer="{peer}"', f'direction="{direction}"'
    with scene.request(scene.asked(LARGE)) as chat:
        return scene.left_when(chat, lambda held: held.total(FRONT, *words) > 0)


def computing(scene: MediaScene) -> tuple[float, bool]:
    """Disconnect while the prefill computes a prompt with embeddings."""
    name = f'"{cluster_engine_name(PREFILL)}"'
    with scene.request(scene.asked(LARGE)) as chat:
        return scene.left_when(chat, lambda held: held.total(FRONT, "engine_running", name) > 0, within_s=0.2)


def _waiting(scene: MediaScene, others: int, holds: Callable[[Held], bool]) -> tuple[float, bool]:
    """Disconnect behind other pictures at the narrow encoder; they keep what they have.

    On a busy machine these may be encoded before the picture has come: then all of it is tried again.
    """
    for _ in range(ATTEMPTS):
        with ExitStack() as stack:
            for number in range(1, others + 1):
                stack.enter_context(scene.request(scene.asked(SMALL)))
                scene.poll.wait(partial(_assigned, number), LONG_ENCODE_S)
            before = scene.poll.read()
            chat = stack.enter_context(scene.request(scene.asked(SMALL)))
            if reached := scene.poll.wait(holds, LONG_ENCODE_S):
                took_s = scene.poll.until(partial(_within, before), leave(chat))
        scene.poll.until_idle(time.perf_counter())
        if reached:
            return took_s, True
    raise RequestNotReleased(f"in {ATTEMPTS} attempts no picture came in time to wait for the encoder")


def _within(before: Held, held: Held) -> bool:
    return held.within(before)


def _assigned(number: int, held: Held) -> bool:
    return _queued(held, "computing") == 1 and held.total(ENCODER, "engine_requests_assigned") == number


def waiting_for_batch(scene: MediaScene) -> tuple[float, bool]:
    """Disconnect while the picture has a slot of the encoder and waits for its batch."""
    return _waiting(scene, SLOTS - 1, lambda held: _queued(held, "waiting") == 1)


def waiting_for_slot(scene: MediaScene) -> tuple[float, bool]:
    """Disconnect while all slots of the encoder are taken."""
    return _waiting(scene, SLOTS, partial(_assigned, SLOTS + 1))


NARROW: dict[str, Stage] = {
    "waiting for a slot of the encoder": waiting_for_slot,
    "waiting for its batch": waiting_for_batch,
}
WIDE: dict[str, Stage] = {
    "fetching": fetching,
    "decoding a picture": decoding,
    "decoding a video": decoding_video,
    "encoding": encoding,
    "sending pixels": partial(sending, peer=ENCODER, direction="sent"),
    "sending embeddings": partial(sending, peer=ENCODER, direction="received"),
    "prefill waiting for embeddings": partial(sending, peer=PREFILL, direction="sent"),
    "prefill computing with them": computing,
}


# The run ---------------------------------------------------------------------------------


def left_of(target: Cluster, poll: Poller, before: dict[str, Counter[str]]) -> list[str]:
    """Return a sentence for each thing that is there now, at rest, and was not before."""

    def more() -> list[str]:
        return [f"{name}: {each}" for name in NODES for each in beyond(remains(target.nodes[name]), before[name])]

    wait_until(lambda: not more(), LEFT_WITHIN_S, 0.1)
    return poll.read(PREFILL, DECODE).sentences() + more()


def measure(run: Run, *, narrow: bool) -> None:
    """Try the chosen stages of one cluster, until a request is not released."""
    stages = NARROW if narrow else WIDE
    chosen = {name: stages[name] for name in run.chosen(stages)}
    if not chosen:
        return
    files = run.folder / "files"
    files.mkdir()
    model = write_vision_model(run.folder / "model", pixels_max=PIXELS_MAX)
    with (
        closing(SlowServer()) as server,
        cluster(run.folder, plan(model, files, server.port, narrow=narrow)) as target,
    ):
        template = template_of(target.front)

        def outside() -> dict[str, float]:
            return {"connections": len(server.open), DECODERS: len(children(template))}

        with closing(Poller(target.nodes, (FRONT, ENCODER), 0.002, outside=outside)) as poll:
            scene = MediaScene(target.front.port, poll, server=server, files=files)
            for _ in range(2):  # a first request is slower than any other
                Chat(scene.port, scene.asked(SMALL) | {"max_tokens": 4}).read()
            for stage in chosen.values():
                stage(scene)
            poll.until_idle(time.perf_counter())
            poll.read(PREFILL, DECODE)  # the connections are there from now on
            before = {name: remains(target.nodes[name]) for name in NODES}
            left = partial(left_of, target, poll, before)
            try_stages(run, scene, chosen, LIMITS, left)
        run.wrong += target.wait_idle(5.0) + target.stop(20.0)


def media_abort_times(run: Run) -> None:
    """Measure every stage."""
    for narrow in (False, True):
        run.attempt("narrow" if narrow else "wide", partial(measure, narrow=narrow))
