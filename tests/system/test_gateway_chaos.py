"""Two hundred clients that vanish, stall, send garbage, flood and half-close: the gateway releases all that they held."""

from __future__ import annotations

import gc
import json
import logging
import random
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from attrs import define

from protocol.dialects.responses import FINAL_EVENTS
from supervisor.gateway.outbox import Outbox
from tests.rig.gateway import LINE, Client, Rig, at_rest, chat, create, frame, gateway_rig, head, ids, post
from tests.system.simulator import tasks

CLIENTS = 200
LIMITS: dict[str, Any] = {
    "head_s": 5.0,
    "body_s": 5.0,
    "idle_s": 5.0,
    "stall_s": 4.0,
    "close_s": 1.0,
    "backlog_bytes_max": 30_000,
    "send_buffer_bytes": 8192,
    "head_bytes_max": 8192,
    "body_bytes_max": 100_000,
    "websocket_queue_max": 3,
    "websocket_running_max": 3,
    "websocket_lanes_max": 3,
    "history_bytes_max": 2000,
    "connections_max": 150,
}


def expected(tokens: int) -> str:
    from tests.rig.gateway import TINY

    line = ids(LINE)
    return TINY.tokenizer.decode([line[place % len(line)] for place in range(tokens)])


@define(eq=False)
class Crowd:
    """What clients do, as a seed decides."""

    rng: random.Random
    rig: Rig
    served: int = 0
    refused: int = 0

    async def one(self) -> None:
        """Come at some time, and do one thing or another."""
        await trio.sleep(self.rng.randrange(100) / 10)
        quiet = [
            self.ask,
            self.talk,
            self.talk_in_lanes,
            self.vanish,
            self.leave_lane,
            self.stall,
            self.lie,
            self.garble,
        ]
        loud = [self.flood, self.flood_lane, self.never_read]
        act = self.rng.choice(loud if self.rng.random() < 0.2 else quiet)
        small = act in loud
        client = Client(await self.rig.connect(receive_buffer=2048 if small else None))
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
            with trio.move_on_after(60):
                await act(client)
        await self.end(client)

    async def end(self, client: Client) -> None:
        how = self.rng.choice(["close", "close", "reset", "half"])
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            if how == "reset":
                client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif how == "half":
                await client.stream.send_eof()
                with trio.move_on_after(5):
                    await client.closed()
        client.stream.socket.close()

    def draw_prompt(self, most: int = 60) -> tuple[int, str]:
        tokens = self.rng.randint(1, most)
        return tokens, f"n={tokens} s={self.rng.choice([0, 0, 0, 0.1])}"

    # Honest clients: what they get is whole, or says that it is not -----------------------------

    async def ask(self, client: Client) -> None:
        for _ in range(self.rng.randint(1, 4)):
            tokens, prompt = self.draw_prompt()
            stream = self.rng.random() < 0.5
            reply = await client.ask(post(chat(prompt, stream=stream)))
            if reply.status == 503:
                self.refused += 1
                assert reply.error["code"] in {"overloaded", "draining"}
                return
            assert reply.status == 200
            if not stream:
                assert reply.json["choices"][0]["message"]["content"] == expected(tokens)
            elif "[DONE]" in reply.events:
                assert (reply.text, reply.whole) == (expected(tokens), True)
            else:
                assert reply.chunks[-1]["error"]["code"] == "draining"
                assert not reply.whole
                return
            self.served += 1

    async def talk(self, client: Client) -> None:
        if (await client.upgrade()).status != 101:
            self.refused += 1
            return
        for _ in range(self.rng.randint(1, 4)):
            tokens, prompt = self.draw_prompt()
            await client.say(create(prompt))
            cancel = self.rng.random() < 0.3
            if cancel:
                await trio.sleep(self.rng.choice([0, 0.05]))
                await client.say({"type": "response.cancel"})
            if self.rng.random() < 0.3:
                await client.send(frame(b"ping", 0x89))
            deltas, kind = [], ""
            while kind not in FINAL_EVENTS:
                first, payload = await client.frame()
                if first == 0x88:
                    return
                event: dict[str, Any] = json.loads(payload) if first == 0x81 else {"type": "pong"}
                kind = event["type"]
                deltas += [event["delta"]] if kind == "response.output_text.delta" else []
            if kind == "response.completed":
                assert "".join(deltas) == expected(tokens)
                self.served += 1
            elif kind == "response.incomplete":
                assert cancel
                assert expected(tokens).startswith("".join(deltas))
            elif kind == "response.failed":
                assert event["response"]["error"]["cause"] == "draining"
            else:
                assert event["error"]["code"] in {"overloaded", "draining"}
                self.refused += 1
        await client.send(frame(struct.pack(">H", 1000), 0x88))

    async def talk_in_lanes(self, client: Client) -> None:
        """Ask much at once in a few lanes, some of it as forks, and take no answer for another's."""
        if (await client.upgrade()).status != 101:
            self.refused += 1
            return
        wanted: dict[str, list[int]] = {}
        texts: dict[str, str] = {}
        response_ids: list[str | None] = [None]
        for number in range(self.rng.randint(2, 8)):
            lane, fork = f"l{self.rng.randrange(3)}", self.rng.choice(response_ids)
            tokens, prompt = self.draw_prompt(most=30)
            wanted.setdefault(lane, []).append(tokens)
            await client.say(create(prompt, stream_id=lane, previous_response_id=fork))
            if self.rng.random() < 0.2:
                await client.say({"type": "response.cancel", "stream_id": lane})
            if number % 3 == 2 and not await self.hear(client, wanted, texts, response_ids):
                return
        while any(wanted.values()):
            if not await self.hear(client, wanted, texts, response_ids):
                return

    async def hear(
        self, client: Client, wanted: dict[str, list[int]], texts: dict[str, str], response_ids: list[str | None]
    ) -> bool:
        """Read one frame; return whether more can come."""
        first, payload = await client.frame()
        if first == 0x88:
            return False
        event = json.loads(payload)
        lane = event.get("stream_id")
        match event["type"]:
            case "response.in_progress":
                response_ids.append(event["response"]["id"])
            case "response.output_text.delta":
                texts[lane] = texts.get(lane, "") + event["delta"]
            case "response.completed" | "response.incomplete" | "response.failed":
                tokens, text = wanted[lane].pop(0), texts.pop(lane, "")
                assert expected(tokens).startswith(text)
                assert event["type"] != "response.completed" or text == expected(tokens)
                self.served += event["type"] == "response.completed"
            case "error":  # it may be about one that came later than those that wait
                code: str = event["error"]["code"]
                assert code in {"overloaded", "draining", "previous_response_not_found"}
                wanted[lane] = wanted[lane][1:] if code == "previous_response_not_found" else []
                return code == "previous_response_not_found"
        return True

    # The others ---------------------------------------------------------------------------------

    async def vanish(self, client: Client) -> None:
        await client.send(post(chat("n=500 s=0.1", stream=self.rng.random() < 0.5)))
        await trio.sleep(self.rng.randrange(20) / 10)

    async def leave_lane(self, client: Client) -> None:
        await client.upgrade()
        for _ in range(self.rng.randint(1, 6)):
            await client.say(create("n=500 s=0.1", stream_id=self.rng.choice([None, "a", "b"])))
        await trio.sleep(self.rng.randrange(20) / 10)

    async def stall(self, client: Client) -> None:
        whole = post(chat("n=3")) if self.rng.random() < 0.7 else head("GET", "/v1/responses", upgrade="websocket")
        await client.send(whole[: self.rng.randrange(len(whole))])
        await trio.sleep(self.rng.choice([0, 1, 20]))

    async def lie(self, client: Client) -> None:
        body = json.dumps(chat("n=3")).encode()
        lies = [
            head("POST", "/v1/chat/completions", content_length=len(body) + 50) + body,
            head("POST", "/v1/chat/completions", content_length=5) + body,
            head("POST", "/v1/chat/completions", transfer_encoding="chunked") + b"fffffff\r\n" + body,
            head("POST", "/v1/chat/completions", content_length=200_000) + bytes(200_000),
            head("GET", "/v1/responses", upgrade="websocket", connection="upgrade", sec_websocket_version=13),
            head(x=" " * 20_000),
            head(expect="100-continue", content_length=10, method="POST"),
            head("POST", "/v1/responses", transfer_encoding="chunked") + b"1\r\n{\r\n" * 10_000,
            head("POST", "/v1/completions", transfer_encoding="chunked", content_length=5) + b"0\r\n\r\n",
            post(b"a=b", "/tokenize", content_type="application/x-www-form-urlencoded"),
        ]
        await client.send(self.rng.choice(lies))
        await trio.sleep(self.rng.randrange(80) / 10)

    async def garble(self, client: Client) -> None:
        data = bytearray(post(chat("n=5", stream=True)))
        if self.rng.random() < 0.6:
            await client.upgrade()
            data = bytearray(b"".join(frame(json.dumps(create("n=5")).encode()) for _ in range(3)))
        for _ in range(self.rng.randint(1, 6)):
            data[self.rng.randrange(len(data))] = self.rng.randrange(256)
        while data:
            size = self.rng.randint(1, 200)
            await client.send(bytes(data[:size]))
            del data[:size]
        await trio.sleep(self.rng.randrange(10) / 10)

    async def flood(self, client: Client) -> None:
        for _ in range(10):
            await client.send((head(path="/v1/models") + post(chat("n=20"))) * 4)

    async def flood_lane(self, client: Client) -> None:
        await client.upgrade()
        for _ in range(40):
            await client.say(create("n=40", stream_id=self.rng.choice([None, "a", "b"])))
            await client.send(frame(bytes(100), 0x89))
        await trio.sleep(self.rng.randrange(10) / 10)

    async def never_read(self, client: Client) -> None:
        if self.rng.random() < 0.5:
            await client.upgrade()
            await client.say(create("n=1800 s=0.0001"))
        else:
            await client.send(post(chat("n=1800 s=0.0001", stream=True)))
        await trio.sleep(self.rng.choice([1, 20]))


@pytest.fixture
def rather_slow() -> trio.testing.MockClock:
    return trio.testing.MockClock(autojump_threshold=0)


def held() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(("seed", "drains"), [(0, False), (1, True)])
async def test_nothing_is_left_of_any_client(
    seed: int, drains: bool, rather_slow: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rng = random.Random(seed * 2 + drains)
    async with gateway_rig(requests_max=6, waiting_max=6, admit_s=1.0, **LIMITS) as rig:
        await trio.testing.wait_all_tasks_blocked()
        fds, before = held(), tasks()
        crowd = Crowd(rng, rig)
        outboxes: list[Outbox] = []
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                for _ in range(CLIENTS // 3 if drains else CLIENTS):
                    nursery.start_soon(crowd.one)
                if drains:
                    await trio.sleep(6)
                    outboxes += rig.gateway.connections
                    rig.gateway.drain()
                    await trio.sleep(0.5)
                    rig.gateway.abort()
                else:
                    await trio.sleep(9)
                    outboxes += rig.gateway.connections
            await at_rest(rig)
        assert all(outbox.client_gone and outbox.backlog_bytes == 0 for outbox in outboxes)
        if not drains:
            assert (await (await rig.client()).ask(post(chat("n=9")))).json["choices"][0]["finish_reason"] == "stop"
            rig.hang_up()
            await at_rest(rig)
        await trio.testing.wait_all_tasks_blocked()
        assert (held(), tasks()) == (fds, before)
    assert drains or crowd.served > 20
    bad = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not bad, bad[0].exc_text
