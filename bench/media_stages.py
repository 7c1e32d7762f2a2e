"""The stages of a request with a picture before its answer begins: a client reaches each one and disconnects there.

Pictures are as large as their stage needs: `LARGE` ones are seconds on their way, since their pixels, and their
embeddings of `WIDTH` elements a token, are tens of megabytes on a link. In a narrow cluster the encoder computes one
item at a time and takes long for it, so that others wait for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

from bench.rig.clients import BackgroundReader, Chat
from bench.rig.cluster import FRONT, Cluster, Plan, cluster_engine_name
from bench.rig.media_load import DECODERS, MediaLoad, MediaPoller
from bench.rig.pictures import commented, file_url, jpeg, picture_body, png, video, video_body
from bench.rig.polling import GIVE_UP_S, RequestNotReleased
from bench.rig.slow_server import SlowServer
from bench.rig.vision_cluster import DECODE, ENCODER, PREFILL, simulated_plan
from bench.rig.vision_model import FACTOR

TOKENS = 1000
SMALL = 16 * FACTOR, 16 * FACTOR  # width and height
LARGE = 90 * FACTOR, 90 * FACTOR  # 8,100 tokens, 19 MB of pixels
HUGE = 7000, 7000  # as many pixels as a decoder takes: half a second or more of decoding
WIDTH = 1024
FILM = 640, 480, 300  # width, height and frames
ENCODE_S = 0.1  # of a batch, which cannot be stopped in its middle
LONG_ENCODE_S = 1.0
SLOTS = 2  # of the narrow encoder
ATTEMPTS = 5
COSTS = {"fixed_s": 0.01, "per_prefill_token_s": 0.00005}


def plan(model: Path, files: Path, server: SlowServer, *, narrow: bool) -> Plan:
    """Return the plan of a front, an encoder, a prefill and a decode that are simulated."""
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
            "allowed_hosts": json.dumps([f"127.0.0.1:{server.port}"]),
            "allowed_networks": '["127.0.0.0/8"]',
        },
    )


@dataclass
class Scene:
    """The cluster, what a stage sends, and what it needs to know when to disconnect."""

    target: Cluster
    poll: MediaPoller
    server: SlowServer
    files: Path
    chance: Random
    numbers: Iterator[int] = field(default_factory=count)
    _made: dict[str, bytes] = field(default_factory=dict)

    def picture(self, width: int, height: int) -> str:
        """Return the URL of a picture of a size whose content nobody has seen before."""
        name = f"{width}-{height}"
        if name not in self._made:
            self._made[name] = jpeg(width, height, 1)
        number = next(self.numbers)
        return file_url(self.files, f"{number}.jpg", commented(self._made[name], str(number).encode()))

    def same(self, name: str, make: Callable[[], bytes]) -> str:
        """Return the URL of a content that is always the same."""
        if not (self.files / name).exists():
            file_url(self.files, name, make())
        return (self.files / name).as_uri()


@contextmanager
def request(scene: Scene, url: str, *, is_video: bool = False) -> Iterator[Chat]:
    """Ask about a picture or a video and read the answer in another thread; disconnect when the body ends."""
    body = (video_body if is_video else picture_body)(url, tokens_max=TOKENS)
    chat = Chat(scene.target.front.port, body)
    reader = BackgroundReader(chat.read)
    try:
        yield chat
    finally:
        chat.leave()
        reader.wait(GIVE_UP_S)
        chat.close()


def left_when(
    scene: Scene, chat: Chat, holds: Callable[[MediaLoad], bool], within_s: float = 0.0
) -> tuple[float, bool]:
    """Disconnect once `holds`, up to `within_s` later; return the time until all is free, and whether it held."""
    reached = scene.poll.wait(holds)
    time.sleep(scene.chance.uniform(0.0, within_s))
    reached = reached and chat.outcome.ended_at == 0.0
    left_at = time.perf_counter()
    chat.leave()
    return scene.poll.until_idle(left_at), reached


# The stages -------------------------------------------------------------------------------


def fetching(scene: Scene) -> tuple[float, bool]:
    """Disconnect while the front waits for an answer of the picture's server, or reads one that comes slowly."""
    with request(scene, scene.server.url(scene.chance.choice(("silent", "trickle")))) as chat:
        return left_when(scene, chat, lambda _: scene.server.asked == 1, 0.1)


def _decodes(load: MediaLoad) -> bool:
    return load.total(FRONT, "media_bytes", "prepared") > 0 and load.held[DECODERS] > 0


def decoding(scene: Scene) -> tuple[float, bool]:
    """Disconnect while a picture of as many pixels as there may be is decoded."""
    with request(scene, scene.same("huge.png", lambda: png(*HUGE, 1))) as chat:
        return left_when(scene, chat, _decodes, 0.05)


def decoding_video(scene: Scene) -> tuple[float, bool]:
    """Disconnect while a video is decoded."""
    with request(scene, scene.same("film.mp4", lambda: video(*FILM)), is_video=True) as chat:
        return left_when(scene, chat, _decodes, 0.05)


def encoding(scene: Scene) -> tuple[float, bool]:
    """Disconnect while the encoder computes the only picture of its batch."""
    with request(scene, scene.picture(*SMALL)) as chat:
        return left_when(scene, chat, lambda load: load.total("encoder_queue_items", "computing") == 1, ENCODE_S / 2)


def _crosses(peer: str, direction: str) -> Callable[[MediaLoad], bool]:
    words = "link_attached_bytes", f'peer="{peer}"', f'direction="{direction}"'
    return lambda load: load.total(FRONT, *words) > 0


def sending(scene: Scene, peer: str, direction: str) -> tuple[float, bool]:
    """Disconnect while a tensor crosses the front's link with another node in a direction."""
    with request(scene, scene.picture(*LARGE)) as chat:
        return left_when(scene, chat, _crosses(peer, direction))


def computing(scene: Scene) -> tuple[float, bool]:
    """Disconnect while the prefill computes a prompt with embeddings."""
    name = cluster_engine_name(PREFILL)
    with request(scene, scene.picture(*LARGE)) as chat:
        return left_when(scene, chat, lambda load: load.total("engine_running", f'"{name}"') > 0, 0.2)


def _waiting(scene: Scene, others: int, holds: Callable[[MediaLoad], bool]) -> tuple[float, bool]:
    """Disconnect behind other pictures at the narrow encoder; they keep what they have.

    On a busy machine these may be encoded before the picture has come: then all of it is tried again.
    """
    for _ in range(ATTEMPTS):
        with ExitStack() as stack:
            for number in range(1, others + 1):
                stack.enter_context(request(scene, scene.picture(*SMALL)))
                scene.poll.wait(partial(_assigned, number), LONG_ENCODE_S)
            before = scene.poll.read()
            chat = stack.enter_context(request(scene, scene.picture(*SMALL)))
            if reached := scene.poll.wait(holds, LONG_ENCODE_S):
                left_at = time.perf_counter()
                chat.leave()
                took_s = scene.poll.until(partial(_within, before), left_at)
        scene.poll.until_idle(time.perf_counter())
        if reached:
            return took_s, True
    raise RequestNotReleased(f"in {ATTEMPTS} attempts no picture came in time to wait for the encoder")


def _within(before: MediaLoad, load: MediaLoad) -> bool:
    return load.within(before)


def _assigned(number: int, load: MediaLoad) -> bool:
    is_computing = load.total("encoder_queue_items", "computing") == 1
    return is_computing and load.total(ENCODER, "engine_requests_assigned") == number


def waiting_for_batch(scene: Scene) -> tuple[float, bool]:
    """Disconnect while the picture has a slot of the encoder and waits for its batch."""
    return _waiting(scene, SLOTS - 1, lambda load: load.total("encoder_queue_items", "waiting") == 1)


def waiting_for_slot(scene: Scene) -> tuple[float, bool]:
    """Disconnect while all slots of the encoder are taken."""
    return _waiting(scene, SLOTS, partial(_assigned, SLOTS + 1))


Stage = Callable[[Scene], tuple[float, bool]]
"""Returns the seconds until the request was released, and whether the client disconnected in this stage."""

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
NODES = (FRONT, ENCODER, PREFILL, DECODE)
