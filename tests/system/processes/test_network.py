"""Three hosts of a real network: pictures cross it, and a link that is cut in the middle of a tensor leaves nothing.

Front and media, encoder, prefill and decode are three nodes, each in a network namespace with an address of its own.
A link is cut at the bridge between them, so that packets vanish and neither end is told.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGTERM

import pytest
from attrs import define, field

from bench.faults.polling import series
from bench.rig.clients import BackgroundReader, Chat, Outcome
from bench.rig.node import Node, start_process, wait_until
from bench.rig.pictures import data_url, jpeg, picture_body
from bench.rig.processes import MARK
from bench.rig.vision_model import FACTOR, write_vision_model
from tests.rig.namespaces import Network, network, why_not

WHY_NOT = why_not()
pytestmark = [pytest.mark.realtime, pytest.mark.nightly, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

FRONT, ENCODER, ENGINES = HOSTS = ("front", "encoder", "engines")
PORT, LINKS, METRICS = 8000, 7401, 9100
LARGE = 60 * FACTOR  # 3,600 tokens, 8.5 MB of pixels
MEGABITS = 40  # in which the pixels take 1.7 s
SILENT_S, RESUME_S = 4.0, 6.0
READY_S = WITHIN_S = 60.0
TOKENS = 8

FILE = """\
[cluster]
secret = "{secret}"
silent_s = {silent_s}
[node.front]
host = "{front}"
[node.encoder]
host = "{encoder}"
listen = "{encoder}:{links}"
metrics = "127.0.0.1:{metrics}"
[node.engines]
host = "{engines}"
listen = "{engines}:{links}"
metrics = "127.0.0.1:{metrics}"
[gateway]
node = "front"
port = {port}
[model.tiny]
path = "{model}"
resume_s = {resume_s}
[engine.eyes]
node = "encoder"
model = "tiny"
kind = "simulated"
leg = "encode"
[engine.prefill]
node = "engines"
model = "tiny"
kind = "simulated"
leg = "prefill"
kv_tokens_max = 65536
[engine.decode]
node = "engines"
model = "tiny"
kind = "simulated"
leg = "decode"
kv_tokens_max = 65536
"""


@define(eq=False)
class Hosts:
    """The nodes, each in its host."""

    network: Network
    nodes: dict[str, Node] = field(factory=dict)

    def metrics(self, name: str) -> dict[str, float]:
        """Return what a node holds for requests."""
        status, text = self.network.inside(name, lambda: self.nodes[name].get("/metrics"))
        assert status == 200, f"{name} has no metrics"
        return series(text.decode())

    def held(self) -> dict[str, float]:
        """Return everything that is held anywhere."""
        return {f"{name} {key}": value for name in HOSTS for key, value in self.metrics(name).items() if value}

    def is_ready(self) -> bool:
        """Whether pictures are answered."""
        front = self.nodes[FRONT]
        for name, node in self.nodes.items():
            assert node.process.poll() is None, f"{name} ended:\n{node.output()}"
        status, body = self.network.inside(FRONT, lambda: front.get("/metrics"))
        text = body.decode() if status == 200 else ""
        return all(f'espalier_engine_up{{engine="{name}"}} 1' in text for name in ENGINE_NAMES)

    def ask(self, seed: int, side: int) -> tuple[Chat, BackgroundReader]:
        """Ask about a new picture of so many pixels in each direction."""
        body = picture_body(data_url(jpeg(side, side, seed)), tokens_max=TOKENS)
        chat = self.network.inside(FRONT, lambda: Chat(PORT, body))
        return chat, BackgroundReader(chat.read)

    def answer(self, seed: int, side: int = 224) -> Outcome:
        """Return the answer about a picture."""
        return self.ask(seed, side)[1].wait(WITHIN_S)

    def wait(self, holds: Callable[[], object]) -> None:
        """Wait until something is so."""
        assert wait_until(holds, WITHIN_S, 0.02) is not None, self.held()


ENGINE_NAMES = ("encoder/eyes", "engines/prefill", "engines/decode")


@pytest.fixture
def hosts(folder: Path) -> Iterator[Hosts]:
    with network(*HOSTS) as made, started(folder, made) as running:
        running.wait(running.is_ready)
        assert running.answer(1).whole
        running.wait(lambda: not running.held())
        yield running
    assert made.left() == []


@contextmanager
def started(folder: Path, made: Network) -> Iterator[Hosts]:
    """Start the three nodes, and end them."""
    secret = folder / "secret"
    secret.write_text("a secret that all three hosts share")
    secret.chmod(0o600)
    text = FILE.format(
        secret=secret,
        silent_s=SILENT_S,
        resume_s=RESUME_S,
        model=write_vision_model(folder / "model", pixels_max=LARGE**2),
        links=LINKS,
        metrics=METRICS,
        port=PORT,
        **{name: made.address(name) for name in HOSTS},
    )
    running = Hosts(made)
    try:
        for name in reversed(HOSTS):
            own = folder / name
            (own / "t").mkdir(parents=True)
            (own / "cluster.toml").write_text(text)
            mark = f"{os.getpid()}-{name}"
            with (own / "output").open("wb") as output:
                added = {"TMPDIR": str(own / "t"), MARK: mark}
                words = ["--node", name, str(own / "cluster.toml")]
                process = start_process(words, output, added, made.command(name))
            port = PORT if name == FRONT else METRICS
            running.nodes[name] = Node(process, port, own, own / "t", mark, time.perf_counter())
        yield running
        for node in running.nodes.values():
            node.observe()
            node.signal(SIGTERM)
        assert {name: node.wait_exit(WITHIN_S) is None for name, node in running.nodes.items()} == dict.fromkeys(
            reversed(HOSTS), False
        )
        assert [each for node in running.nodes.values() for each in node.leftovers()] == []
    finally:
        for node in running.nodes.values():
            node.end()


def sending(hosts: Hosts) -> float:
    """Return the bytes of pixels that are on their way to the encoder."""
    return hosts.metrics(FRONT).get('link_attached_bytes{direction="sent",peer="encoder"}', 0.0)


def cut_in_the_middle(hosts: Hosts, seed: int) -> tuple[Chat, BackgroundReader]:
    """Ask about a large picture, and cut the encoder off once some of its pixels have come to it."""
    hosts.network.slow(ENCODER, MEGABITS)
    chat, reader = hosts.ask(seed, LARGE)
    hosts.wait(lambda: sending(hosts) > 0)
    time.sleep(0.3)
    hosts.network.cut(ENCODER)
    assert sending(hosts) > 0, "the pixels had come before the link was cut"
    return chat, reader


def test_a_picture_whose_pixels_are_cut_off_ends_in_an_error_and_the_next_is_answered(hosts: Hosts) -> None:
    chat, reader = cut_in_the_middle(hosts, 2)
    outcome = reader.wait(WITHIN_S)
    assert (outcome.status, outcome.text) == (503, "")
    assert outcome.error is not None
    assert outcome.error["code"] in {"link_lost", "not_ready"}
    hosts.wait(lambda: not hosts.held())
    text_alone = hosts.network.inside(FRONT, lambda: Chat(PORT, picture_body(tokens_max=TOKENS)))
    assert text_alone.read().whole, "text needs no encoder"
    hosts.network.join(ENCODER)
    hosts.wait(hosts.is_ready)
    assert hosts.answer(3).whole
    assert hosts.answer(4, LARGE).whole
    hosts.wait(lambda: not hosts.held())
    chat.close()


def test_a_picture_is_sent_again_when_the_link_is_back_in_time(hosts: Hosts) -> None:
    chat, reader = cut_in_the_middle(hosts, 2)
    hosts.wait(lambda: 'espalier_link_up{peer="encoder"} 0' in scrape(hosts))
    hosts.network.join(ENCODER)
    assert reader.wait(WITHIN_S).whole
    assert 'espalier_resumes_total{code="link_lost",kind="retried",model="tiny"} 1' in scrape(hosts)
    hosts.wait(lambda: not hosts.held())
    chat.close()


def test_a_client_that_leaves_while_the_link_is_cut_leaves_nothing(hosts: Hosts) -> None:
    chat, reader = cut_in_the_middle(hosts, 2)
    chat.leave()
    reader.wait(WITHIN_S)
    hosts.wait(lambda: not {name for name in hosts.held() if name.startswith("front ") and "link_" not in name})
    hosts.wait(lambda: not hosts.held())
    hosts.network.join(ENCODER)
    hosts.wait(hosts.is_ready)
    assert hosts.answer(3).whole
    chat.close()


def scrape(hosts: Hosts) -> str:
    """Return the metrics of the front."""
    return hosts.network.inside(FRONT, lambda: hosts.nodes[FRONT].get("/metrics"))[1].decode()
