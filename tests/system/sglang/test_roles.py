"""The two legs of a pair of real engines change places under requests, and both computations stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes.util import find_library
from threading import Event

import pytest

from bench.rig.node import MODEL, ROOT, Node, free_ports, short_folder
from tests.rig.launched import at_free_ports, run_cli, running_launcher, wait_ready
from tests.system.sglang.greedy import completed, prompts

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.skipif(find_library("ibverbs") is None, reason="Mooncake's library needs Debian's libibverbs1"),
]

READY_WITHIN_S = 240.0
CLIENTS = 4
PROMPTS = prompts(8, longest=200, seed=7)
EXAMPLE = (ROOT / "examples" / "disagg.toml").read_text()


@pytest.fixture
def pair() -> Iterator[Node]:
    """The example of a pair, whose decode can become a prefill."""
    text = EXAMPLE.replace('leg = "decode"\n', f'leg = "decode"\nbootstrap_port = {free_ports(1)[0]}\n')
    text = text.replace('path = "tiny"', f'path = "{ROOT / "examples" / MODEL}"')
    text, ports = at_free_ports(text, 8000, 7401, 7402, 8998)
    text += "[cluster]\nsilent_s = 10.0\nstalled_s = 60.0\n"  # what a busy machine does is no loss
    with short_folder() as folder, running_launcher(folder, text, ports[0]) as target:
        wait_ready(target, READY_WITHIN_S)
        yield target


def given(target: Node, engine: str, role: str) -> tuple[int, str]:
    code, output = run_cli(target, "engine", engine, "set-role", "--role", role)
    return code, output.strip()


def test_the_legs_of_a_pair_change_places_and_no_request_is_lost(pair: Node) -> None:
    wanted = [completed(pair.port, each)[0] for each in PROMPTS]
    over, counts = Event(), [0] * CLIENTS

    def client(place: int) -> None:
        while not over.is_set():
            index = counts[place] % len(PROMPTS)
            assert completed(pair.port, PROMPTS[index])[0] == wanted[index]
            counts[place] += 1

    with ThreadPoolExecutor(CLIENTS) as threads:
        clients = [threads.submit(client, place) for place in range(CLIENTS)]
        try:
            assert given(pair, "tiny-prefill", "decode") == (
                1,
                "prefill/tiny-prefill was not given the role: no engine in service would be left for prompts of its model",
            )
            for engine, role in (("tiny-prefill", "both"), ("tiny-decode", "prefill"), ("tiny-prefill", "decode")):
                before = sum(counts)
                code, output = given(pair, engine, role)
                assert (code, "was given the role" in output) == (0, True), output
                assert sum(counts) > before
        finally:
            over.set()
        for each in clients:
            each.result()
    assert [completed(pair.port, each)[0] for each in PROMPTS] == wanted
