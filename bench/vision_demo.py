"""The demonstration with pictures, `examples/vision.toml`: its answers to stock clients, its memory, its start time.

An encoder, a prefill and a decode of the tiny model that was trained to say what it sees, and a front, started as one
command starts them. The unmodified `openai` client shows them pictures, by a chat, by the Responses API and over a
WebSocket. The memory of each process is its proportional share (PSS), since engines share the pages of their zygote.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from openai import OpenAI
from PIL import Image, ImageDraw

from bench.cost.groups import groups
from bench.rig.node import ROOT, Node, free_ports, short_folder, start_process, wait_until
from bench.rig.pictures import data_url, encoded
from bench.rig.processes import MARK, family, memory_bytes, process_table

FILE = ROOT / "examples" / "vision.toml"
MODEL = "tiny-vision"
QUESTION = "What is in the picture?"
READY_WITHIN_S = 300.0
STOPPED_WITHIN_S = 60.0
ENGINES = 3
SIDE = 168
BOX = (42, 42, 126, 126)
WHITE = (250, 250, 250)
SHOWN = {
    "A red circle.": ((220, 40, 30), "ellipse"),
    "A blue square.": ((40, 80, 220), "rectangle"),
    "A green circle.": ((30, 160, 60), "ellipse"),
    "A yellow square.": ((240, 230, 40), "rectangle"),
}
"""Pictures, by what the model is to say of them."""

Client = Callable[[OpenAI, str], str]


def picture(colour: tuple[int, int, int], shape: str) -> str:
    """Return a picture of one shape as a data URL."""
    drawn = Image.new("RGB", (SIDE, SIDE), WHITE)
    getattr(ImageDraw.Draw(drawn), shape)(BOX, fill=colour)
    return data_url(encoded(drawn, "PNG"), "png")


def by_chat(client: OpenAI, url: str) -> str:
    """Ask by a chat completion."""
    content: list[Any] = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], temperature=0, max_tokens=32
    )
    return answer.choices[0].message.content or ""


def _input(url: str) -> list[Any]:
    content = [{"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": QUESTION}]
    return [{"role": "user", "content": content}]


def by_responses(client: OpenAI, url: str) -> str:
    """Ask by the Responses API over HTTP."""
    answer = client.responses.create(model=MODEL, input=_input(url), temperature=0, max_output_tokens=32)
    return answer.output_text


def by_websocket(client: OpenAI, url: str) -> str:
    """Ask by the Responses API over a WebSocket."""
    with client.responses.connect() as connection:
        connection.response.create(model=MODEL, input=_input(url), temperature=0, max_output_tokens=32)
        for event in connection:
            if event.type == "response.completed":
                return event.response.output_text
            if event.type in {"error", "response.failed"}:
                return event.model_dump_json()
    return ""


CLIENTS: dict[str, Client] = {"chat": by_chat, "responses": by_responses, "responses, WebSocket": by_websocket}


@contextmanager
def running(folder: Path) -> Iterator[tuple[Node, float]]:
    """Run the demonstration with free ports; yield its launcher, and after how many seconds it was ready."""
    gateway, *links = free_ports(4)
    bootstrap = free_ports(1)[0]
    text = FILE.read_text().replace(f'path = "{MODEL}"', f'path = "{ROOT / "examples" / MODEL}"')
    ports = dict(zip(("7401", "7402", "7403"), links, strict=True)) | {"8000": gateway, "8998": bootstrap}
    for was, port in ports.items():
        assert was in text, f"{FILE} has no port {was}"
        text = text.replace(was, str(port))
    (folder / "cluster.toml").write_text(text)
    (folder / "t").mkdir()
    mark = f"{os.getpid()}-{gateway}"
    with (folder / "output").open("wb") as output:
        added = {"TMPDIR": str(folder / "t"), MARK: mark}
        process = start_process([str(folder / "cluster.toml")], output, added)
    launcher = Node(process, gateway, folder, folder / "t", mark, time.perf_counter())

    def is_ready() -> bool:
        return launcher.get("/ready")[0] == 200 and engines_up(launcher) == ENGINES

    try:
        took_s = wait_until(is_ready, READY_WITHIN_S, 0.05)
        assert took_s is not None, f"it did not get ready:\n{launcher.output()[-3000:]}"
        yield launcher, took_s
    finally:
        launcher.end()


def engines_up(launcher: Node) -> int:
    """Return how many engines can be asked."""
    if launcher.process.poll() is not None:
        raise RuntimeError(f"it ended:\n{launcher.output()[-3000:]}")
    return int(launcher.metric("espalier_engine_up"))


def memory_mb(launcher: Node) -> dict[str, list[float]]:
    """Return the memory of each process, by what it is."""
    entries = family(process_table(), [launcher.pid])
    found: dict[str, list[float]] = defaultdict(list)
    for pid, group in groups(entries).items():
        with suppress(OSError):
            found[group].append(memory_bytes(pid) / 1e6)
    return dict(found)


def measure(folder: Path) -> list[str]:
    """Print answers, memory and times; return a sentence for each thing that is wrong."""
    wrong: list[str] = []
    with running(folder) as (launcher, took_s):
        print(f"ready after {took_s:.1f} s")
        with OpenAI(base_url=f"http://127.0.0.1:{launcher.port}/v1", api_key="none", max_retries=0) as client:
            for name, ask in CLIENTS.items():
                for wanted, (colour, shape) in SHOWN.items():
                    began_at = time.perf_counter()
                    text = ask(client, picture(colour, shape))
                    print(f"{name:<24}{wanted:<20}{text!r:<28}{time.perf_counter() - began_at:>8.3f} s")
                    if text != wanted:
                        wrong.append(f"{name}: a picture of {wanted!r} was answered with {text!r}")
        memory = memory_mb(launcher)
        for group, values in sorted(memory.items()):
            print(f"{group:<24}{' + '.join(f'{value:.0f}' for value in values)} MB")
        print(f"{'together':<24}{sum(map(sum, memory.values())):.0f} MB")
        launcher.observe()
        launcher.signal(signal.SIGTERM)
        if launcher.wait_exit(STOPPED_WITHIN_S) is None or launcher.process.returncode != 0:
            wrong.append("it did not end by itself")
        wrong += launcher.leftovers()
    return wrong


def main() -> int:
    """Print answers, memory and times; return 1 if anything was wrong."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with short_folder() as folder:
        wrong = measure(folder)
    for sentence in wrong:
        print(f"MISSED: {sentence}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
