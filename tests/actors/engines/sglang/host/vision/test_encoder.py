"""The encoder's host with a tower of its own kind: its batches, their ends, and whether it lives."""

from __future__ import annotations

import pytest

from tests.rig.host_parts import HEAD, RunParts

pytestmark = pytest.mark.engine

SERVING = """
import threading, time
from attrs import define, field
from actors.engines.host.encoder_host import EncoderHost
from protocol.link import codec
from protocol.link.frames import Bye, Cancel, End, Fail, Hello, Open
from protocol.messages.media import EmbeddingBatch, EncodeBatch, EmbeddingOutcome, MediaForm, MediaInfo, MediaItem, Modality
from protocol.messages.engine import Alive, EngineLoad, GetInfo, GetLoad, Ping, encoder_info
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.operations import CheckGrammar
from protocol.link.peer import Peer
from protocol.tensors import Dtype, Tensor

INFO = encoder_info("x", "1", MediaInfo(MediaForm.EMBEDDINGS, 4, Dtype.UINT8, 2, 1, 2), 3)

class Tower:
    def __init__(self):
        self.go, self.at = threading.Semaphore(0), []
        self.does = lambda item: EmbeddingOutcome(item.data)
    def encode(self, items, is_wanted):
        outcomes = []
        for item in items:
            if not is_wanted():
                break
            self.at.append(item.digest[0])
            self.go.acquire()
            outcomes.append(self.does(item))
        return outcomes

def item(name):
    data = Tensor(Dtype.UINT8, (1, 1, 1, 3), memoryview(name.encode() * 3))
    return MediaItem(Modality.IMAGE, name * 64, (1, 2, 2), 1, MediaForm.PIXELS, data)

def batch(names):
    return EncodeBatch(names, tuple(map(item, names)))

class Node:
    def __init__(self):
        self.tower, self.peer, self.frames, self.stream = Tower(), Peer("node", serves_max=0), [], 0
    async def __aenter__(self):
        ours, theirs = socket.socketpair()
        watchdog = SimpleNamespace(end=lambda reason: reason)
        host = EncoderHost(self.tower, INFO, Peer("e", serves_max=20), theirs, watchdog)
        self.serving = asyncio.create_task(host.serve())
        self.reader, self.writer = await asyncio.open_connection(sock=ours)
        self.reading = asyncio.create_task(self.read())
        await self.until(lambda: self.frames)
        return self
    async def __aexit__(self, *_):
        self.tower.go.release(1000)
        self.reading.cancel()
        self.serving.cancel()
        self.writer.close()
    async def read(self):
        while data := await self.reader.read(65536):
            for frame in self.peer.receive_data(data):
                self.frames.append(frame)
                if isinstance(frame, End):
                    pass
    async def until(self, holds, within_s=10.0):
        async with asyncio.timeout(within_s):
            while not holds():
                await asyncio.sleep(0.005)
    def ask(self, request):
        self.stream += 1
        self.peer.send(Open(self.stream, codec.encode(request), 4, "", None, sum(map(len, codec.attached(request)))),
                       codec.attached(request))
        self.write()
        return self.stream
    def cancel(self, stream):
        self.peer.send(Cancel(stream, "left"))
        self.write()
    def write(self):
        while data := self.peer.data_to_send():
            self.writer.write(data)
    def end(self, stream):
        return next((each for each in self.frames if isinstance(each, End | Fail) and each.stream == stream), None)
    async def ended(self, stream):
        await self.until(lambda: self.end(stream))
        return self.end(stream)
    async def load(self):
        return codec.decode((await self.ended(self.ask(GetLoad()))).body)

async def computes_one_batch_after_the_other():
    async with Node() as node:
        first, second = node.ask(batch("ab")), node.ask(batch("c"))
        await node.until(lambda: node.tower.at == ["a"])
        assert await node.load() == EngineLoad(2, 1, 0)
        node.tower.go.release(2)
        end = await node.ended(first)
        assert isinstance(end, End)
        await node.until(lambda: node.tower.at == ["a", "b", "c"])
        assert await node.load() == EngineLoad(1, 0, 0)
        node.tower.go.release()
        assert isinstance(await node.ended(second), End)
        assert await node.load() == EngineLoad(0, 0, 0)
        info = await node.ended(node.ask(GetInfo()))
        assert codec.decode(info.body) == INFO
        refused = await node.ended(node.ask(CheckGrammar(Grammar(GrammarKind.REGEX, "a"))))
        assert refused.code == "engine_refused" and "answers no CheckGrammar" in refused.detail

async def ends_what_nobody_wants():
    async with Node() as node:
        first, second, third = (node.ask(batch(names)) for names in ("abc", "d", "e"))
        await node.until(lambda: node.tower.at == ["a"])
        node.cancel(second)
        assert (await node.ended(second)).code == "left", "at once"
        node.cancel(first)
        await asyncio.sleep(0.05)
        assert node.end(first) is None, "the item that is being computed cannot be interrupted"
        node.tower.go.release()
        assert (await node.ended(first)).code == "left"
        await node.until(lambda: node.tower.at == ["a", "e"])
        node.tower.go.release()
        assert isinstance(await node.ended(third), End)

async def ends_when_it_fails_too_often():
    async with Node() as node:
        node.tower.go.release(1000)
        node.tower.does = lambda item: EmbeddingOutcome(code="invalid_request", detail="wrong")
        for _ in range(9):
            assert isinstance(await node.ended(node.ask(batch("a"))), End), "an item that is wrong is no failure"
        def fails(item):
            raise KeyError("of SGLang's")
        node.tower.does = fails
        for _ in range(3):
            failed = await node.ended(node.ask(batch("a")))
            assert (failed.code, failed.detail) == ("internal", "the encoder failed the batch: KeyError"), failed
        node.tower.does = lambda item: EmbeddingOutcome(code="internal", detail="no numbers")
        node.ask(batch("abc"))
        reason = await asyncio.wait_for(node.serving, 10)
        assert reason == "it failed 6 requests within 60 s, the last by no numbers", reason
        await node.until(lambda: any(isinstance(each, Bye) for each in node.frames))

async def lives_as_long_as_it_computes():
    async with Node() as node:
        assert codec.decode((await node.ended(node.ask(Ping()))).body) == Alive()
        node.ask(batch("a"))
        await node.until(lambda: node.tower.at)
        stuck = node.ask(Ping())
        await asyncio.sleep(1.5)
        assert node.end(stuck) is None, "a thread that waits does not live"
        node.tower.go.release()
        assert isinstance(await node.ended(stuck), End)
        def computes(item):
            until = time.thread_time() + 3
            while time.thread_time() < until:
                pass
            return EmbeddingOutcome(item.data)
        node.tower.does = computes
        node.tower.go.release()
        long = node.ask(batch("b"))
        await node.until(lambda: len(node.tower.at) == 2)
        assert isinstance(await node.ended(node.ask(Ping())), End)
        assert node.end(long) is None, "one that computes lives"

async def main():
    await computes_one_batch_after_the_other()
    await ends_what_nobody_wants()
    await ends_when_it_fails_too_often()
    await lives_as_long_as_it_computes()

asyncio.run(main())
"""

TOWER = """
import torch
from actors.engines.sglang.host.vision.vision_tower import VisionTower
from protocol.errors import BadRequest
from protocol.messages.media import MediaForm, MediaInfo, MediaItem, Modality, Encode
from protocol.tensors import Dtype, Tensor

MEDIA = MediaInfo(MediaForm.EMBEDDINGS, 2, Dtype.FLOAT32, 2, 1, 2)

class Pixels:
    def patches(self, item):
        if item.digest[0] == "b":
            raise BadRequest("wrong")
        if item.digest[0] == "c":
            raise KeyError("of transformers")
        return torch.full((4 * item.tokens, 1), float(int(item.digest[0], 16)))

class Model:
    def __init__(self):
        self.calls = []
    def _feature(self, items):
        self.calls.append([int(item.feature[0, 0]) for item in items])
        if any(item.feature[0, 0] == 14 for item in items):
            raise RuntimeError("out of memory")
        rows = [torch.full((item.feature.shape[0] // 4, 2), float("nan") if item.feature[0, 0] == 15 else float(item.feature[0, 0]))
                for item in items]
        return torch.cat(rows)
    get_image_feature = get_video_feature = _feature

def item(name, modality=Modality.IMAGE):
    data = Tensor(Dtype.UINT8, (1, 1, 1, 3), memoryview(bytes(3)))
    return MediaItem(modality, name * 64, (1, 2, 2), 1, MediaForm.PIXELS, data)

def tower(together):
    model = Model()
    return VisionTower(SimpleNamespace(model=model, device="cpu"), Pixels(), MEDIA, together), model

names = "a1b2c3e4f5"
items = [item(name, Modality.VIDEO if place % 3 == 2 else Modality.IMAGE) for place, name in enumerate(names)]
for together in (False, True):
    made, model = tower(together)
    outcomes = made.encode(items, lambda: True)
    codes = {name: outcome.code for name, outcome in zip(names, outcomes)}
    assert codes == {**dict.fromkeys(names, ""), "b": "invalid_request", "c": "engine_refused", "e": "internal", "f": "internal"}, codes
    details = {name: outcome.detail for name, outcome in zip(names, outcomes) if outcome.code == "internal"}
    assert details == {"e": "the encoder failed: RuntimeError", "f": "the encoder made embeddings that are no numbers"}, details
    for name, outcome in zip(names, outcomes):
        assert outcome.code or bytes(outcome.data.data) == torch.full((1, 2), float(int(name, 16))).numpy().tobytes(), name
    longest = max(map(len, model.calls))
    assert longest == (6 if together else 1), model.calls
made, model = tower(False)
wanted = iter([True, True, False])
assert len(made.encode(items, lambda: next(wanted))) == 2
assert model.calls == [[10], [1]]
"""

PARTS = {"serving": HEAD + SERVING, "tower": HEAD + TOWER}


@pytest.fixture(scope="module")
def written(run_parts: RunParts) -> dict[str, str]:
    return run_parts(PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_the_parts_of_an_encoders_host(part: str, written: dict[str, str]) -> None:
    assert written[part].endswith("done\n"), written[part]
