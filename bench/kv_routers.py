"""Dynamo 1.6.1's KV router beside this server's policy `kv`: the same load and pace, on engines of the same costs.

Each has two engines that compute nothing: Dynamo's mockers, and simulated ones. Page size, memory, slots and the
duration of a step are the same; both engines together have the memory for all that the load shares, and neither has it
alone. Every round starts each server anew, without anything in its caches, and sends it the load, by prefix and in
turn. One engine with all the memory gets the load, too: more than it finds no routing can find.

Each request has a connection of its own: Dynamo's front end leaves Nagle's algorithm on, and the first token of an
answer on a connection that was used before waits up to 40 ms for the client's acknowledgement.

The mocker reports no cached tokens to clients. Its hit share is counted from the metrics of its forward passes, which
a process of Dynamo's own records: prompt tokens that were read, of those and the computed ones. Their sum must be the
prompt tokens of all answers, or the share is not printed.

    python -m bench peers install dynamo-mocker
    python -m bench.kv_routers

Some minutes each load. The processes of the router are Dynamo's front end and this server's node with the gateway.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from bench.peers.dynamo import PLANES, front_end, variables
from bench.peers.dynamo_mocker import ENVIRONMENT
from bench.peers.mock_model import mock_model
from bench.peers.peer import ENVIRONMENTS, MODEL, PAGE_SIZE, Command, Peer, Setup
from bench.peers.running import Running, started
from bench.policies import Load, loads, send
from bench.rig.node import free_port, free_ports, metric, short_folder, wait_until
from bench.rig.processes import cpu_s, family, process_table

STEP_S = 0.01
PREFILL_TOKEN_S = 0.0001
PREFILL_CHUNK = 8192  # more than any prompt here: each is computed in one step
SLOTS = 8
ENGINES = 2
SETTLED_S = 1.5  # after a start or a load
TRACE_SPEED = "4"
SAME = ("--ignore-eos", "--connections-a-client", "new")  # of every load

CLUSTER = """\
[node.front]
{nodes}
[gateway]
node = "front"
port = {port}
requests_max = 512
[model.{model}]
path = "{path}"
policy = "{policy}"
queue_max = 256
"""
ENGINE = """\
[engine.{name}]
node = "{name}"
model = "{model}"
kind = "simulated"
slots = {slots}
kv_tokens_max = {kv_tokens_max}
page_size = {page_size}
prefill_chunk = {chunk}
events.publish = true
simulated.costs = {{ fixed_s = {step_s}, per_prefill_token_s = {token_s}, per_running_s = 0.0 }}
"""


def ours(policy: str, setup: Setup) -> list[Command]:
    """Return the commands of the gateway's node, `router`, and of a node for each simulated engine."""
    names = [f"e{number}" for number in range(setup.workers)]
    listens = zip(names, free_ports(len(names)), strict=True)
    nodes = "\n".join(f'[node.{name}]\nlisten = "127.0.0.1:{port}"' for name, port in listens)
    path = mock_model(setup.folder / "model")
    text = CLUSTER.format(nodes=nodes, port=setup.port, model=MODEL, path=path, policy=policy)
    sizes = {"slots": setup.slots, "kv_tokens_max": setup.kv_tokens_max, "page_size": PAGE_SIZE, "chunk": PREFILL_CHUNK}
    costs = {"step_s": setup.step_s, "token_s": PREFILL_TOKEN_S}
    file = setup.folder / "cluster.toml"
    file.write_text(text + "".join(ENGINE.format(name=name, model=MODEL, **sizes, **costs) for name in names))
    words = (sys.executable, "-m", "supervisor", str(file), "--node")
    return [Command("router", (*words, "front")), *(Command(name, (*words, name)) for name in names)]


def dynamos(mode: str, setup: Setup, *options: str) -> list[Command]:
    """Return the commands of the front end, `router`, of one process with all mockers, and of what records steps."""
    front, python, added = front_end(setup, ENVIRONMENT), setup.python(ENVIRONMENT), variables(setup)
    model = ("--model-path", str(mock_model(setup.folder / "model")), "--model-name", MODEL)
    engine = setup.folder / "engine.json"
    engine.write_text(json.dumps({"engine": mocked_engine(setup)}))
    mocker = (python, "-m", "dynamo.mocker", *model, "--extra-engine-args", str(engine))
    recorder = (python, "-m", "dynamo.common.recv_forward_pass_metrics", "--flush-interval", "0.2", *PLANES[:4])
    return [
        Command("router", (*front.words, "--router-mode", mode, *options), added),
        Command("mocker", (*mocker, "--num-workers", str(setup.workers), *PLANES), added),
        Command("recorder", (*recorder, "--output", str(setup.folder / "steps.jsonl")), added),
    ]


def mocked_engine(setup: Setup) -> dict[str, Any]:
    """Return the mocker's own description of an engine, whose durations are in a file that is written here."""
    file = setup.folder / "durations.npz"
    lengths, step_ms = (1.0, float(PREFILL_CHUNK)), 1000 * setup.step_s
    arrays = {
        "prefill_isl": lengths,
        "prefill_ttft_ms": tuple(step_ms + 1000 * PREFILL_TOKEN_S * tokens for tokens in lengths),
        "decode_active_kv_tokens": (0.0, 1e6),
        "decode_context_length": (1.0, 1e6),
        "decode_itl": (step_ms,) * 4,
    }
    with zipfile.ZipFile(file, "w") as archive:
        for name, values in arrays.items():
            archive.writestr(f"{name}.npy", numpy_array(values, (2, 2) if len(values) == 4 else (2,)))
    return {
        "backend": "sglang",
        "num_gpu_blocks": setup.kv_tokens_max // PAGE_SIZE,
        "block_size": PAGE_SIZE,
        "max_num_seqs": setup.slots,
        "sglang": {"max_prefill_tokens": PREFILL_CHUNK, "chunked_prefill_size": PREFILL_CHUNK},
        "timing_model": {"type": "external", "provider": "dynamo_profile", "config": {"path": str(file)}},
    }


def numpy_array(values: Sequence[float], shape: tuple[int, ...]) -> bytes:
    """Return numbers as a file of NumPy's, version 1.0, 64-bit floats in the order of C."""
    head = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape!r}, }}".ljust(117) + "\n"
    body = struct.pack(f"<{len(values)}d", *values)
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode() + body


@frozen
class Router:
    """One server with one policy: its commands, and on how many engines."""

    title: str
    commands: Callable[[Setup], list[Command]]
    environments: tuple[str, ...] = ()
    engines: int = ENGINES

    @property
    def peer(self) -> Peer:
        """Return it as a server that can be started."""
        return Peer(
            name="router",
            title=self.title,
            engine="simulated",
            commands=self.commands,
            environments=self.environments,
            workers_max=ENGINES,
            ready_path=None if self.environments else "/ready",
        )


TUNED = ("--router-prefill-load-scale", "32")  # the best of Dynamo's own published sweep


def tuned(setup: Setup) -> list[Command]:
    """Return Dynamo's commands with the value of its KV router that its own sweep of values found best."""
    return dynamos("kv", setup, *TUNED)


DYNAMO = (ENVIRONMENT,)
ROUTERS = (
    Router("espalier kv", partial(ours, "kv")),
    Router("dynamo kv", partial(dynamos, "kv"), DYNAMO),
    Router("dynamo kv, tuned", tuned, DYNAMO),
    Router("espalier round_robin", partial(ours, "round_robin")),
    Router("dynamo round-robin", partial(dynamos, "round-robin"), DYNAMO),
    Router("espalier, one engine", partial(ours, "kv"), engines=1),
    Router("dynamo, one engine", partial(dynamos, "kv"), DYNAMO, engines=1),
)


@define
class Figures:
    """The figures of one router, one value a round."""

    hit_share: list[float] = field(factory=list)
    ttft_p50_ms: list[float] = field(factory=list)
    ttft_p99_ms: list[float] = field(factory=list)
    tokens_s: list[float] = field(factory=list)
    failed: list[int] = field(factory=list)
    cpu_ms: list[float] = field(factory=list)  # of the router's processes, a request
    decision_us: list[float] = field(factory=list)  # by the server's own metric; Dynamo has none in turn

    def row(self) -> str:
        """Return the medians, and the least and the most hit share, as a line of a table."""
        shares = f"{statistics.median(self.hit_share):6.1%} ({min(self.hit_share):.1%} to {max(self.hit_share):.1%})"
        several = (self.ttft_p50_ms, self.ttft_p99_ms, self.tokens_s, self.cpu_ms)
        medians = "{:9.1f} {:9.1f} {:9.1f} {:9.2f}".format(*map(statistics.median, several))
        decision_us = f"{statistics.median(self.decision_us):9.0f}" if self.decision_us else "        -"
        return f"{shares:26}{medians} {decision_us}{sum(self.failed):8}"


@define
class Measured:
    """One running server, what it has computed so far, and what its router has spent."""

    running: Running

    def text(self) -> str:
        """Return its router's metrics."""
        return self.running.ask("GET", "/metrics")[1].decode()

    def cpu_s(self) -> float:
        """Return the CPU time of the processes of the router."""
        return sum(cpu_s(entry.pid) for entry in family(process_table(), [self.running.roots["router"].pid]))

    def decisions(self) -> tuple[float, float]:
        """Return the time that decisions took so far, in microseconds, and their number."""
        text = self.text()
        mine, other = "espalier_routing_decision_seconds", "dynamo_router_overhead_total_ms"
        spent_us = 1e6 * metric(text, f"{mine}_sum") + 1e3 * metric(text, f"{other}_sum")
        return spent_us, metric(text, f"{mine}_count") + metric(text, f"{other}_count")

    def steps(self) -> list[dict[str, Any]]:
        """Return the mockers' forward passes so far; of simulated engines there are none."""
        file = self.running.setup.folder / "steps.jsonl"
        whole = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
        return [json.loads(line)["metrics"] for line in whole]

    def wait_engines(self) -> None:
        """Wait until every engine can be chosen; raises `RuntimeError`."""
        engines = self.running.setup.workers

        def there() -> bool:
            if "recorder" in self.running.roots:
                return len({step["worker_id"] for step in self.steps()}) >= engines
            return metric(self.text(), "espalier_link_up") >= engines

        if wait_until(there, 30.0, every_s=0.2) is None:
            raise RuntimeError(f"{self.running.peer.title}: fewer than {engines} engines")
        time.sleep(SETTLED_S)

    def prompt_tokens(self) -> tuple[int, int]:
        """Return the prompt tokens that were found in a cache so far, and all of them."""
        if "recorder" not in self.running.roots:
            text = self.text()
            cached, every = (metric(text, "espalier_tokens_total", kind=kind) for kind in ("cached", "input"))
            return int(cached), int(every)
        scheduled = [step["scheduled_requests"] for step in self.steps()]
        cached = sum(each["sum_prefill_kv_tokens"] for each in scheduled)
        return cached, cached + sum(each["sum_prefill_tokens"] for each in scheduled)


def measure(router: Router, load: Load, seed: int, environments: Path, figures: Figures) -> None:
    """Start a server, send it a load once, and add what came of it."""
    with short_folder() as folder:
        share = ENGINES // router.engines
        setup = Setup(
            folder=folder,
            port=free_port(),
            slots=SLOTS * share,
            workers=router.engines,
            kv_tokens_max=load.kv_tokens * share,
            step_s=STEP_S,
            environments=environments.absolute(),
        )
        with started(router.peer, setup) as running:
            measured = Measured(running)
            measured.wait_engines()
            cpu_before_s = measured.cpu_s()
            document = send(running.url, (*load.words, *SAME), seed, running.setup.folder)
            time.sleep(SETTLED_S)
            (cached, every), (spent_us, choices) = measured.prompt_tokens(), measured.decisions()
            cpu_used_s = measured.cpu_s() - cpu_before_s
    requests, prompts = document["requests"], document["tokens"]["prompt"]
    if every != prompts:
        raise RuntimeError(f"{router.title}: the engines have read {every} prompt tokens, answers say {prompts}")
    figures.hit_share.append(cached / every)
    figures.ttft_p50_ms.append(document["latencies"]["ttft"]["p50"])
    figures.ttft_p99_ms.append(document["latencies"]["ttft"]["p99"])
    figures.tokens_s.append(document["rates"]["output_tokens_per_s"])
    figures.failed.append(requests["sent"] - requests["completed"])
    figures.cpu_ms.append(1000 * cpu_used_s / requests["completed"])
    figures.decision_us += [spent_us / choices] if choices else []


def paced(folder: Path, scale: float) -> dict[str, Load]:
    """Return the loads of the policies' bench by name, the trace at the times of its lines."""
    every = {name: load for name, load in loads(folder, scale).items() if not load.paced}
    words = ("--trace", str(folder / "trace.jsonl"), "--trace-scale", "0.1", "--trace-speed", TRACE_SPEED)
    return every | {"trace": Load(words, every["trace"].kv_tokens)}


def main(words: Sequence[str]) -> None:
    """Print a table for each load."""
    parser = argparse.ArgumentParser(prog="python -m bench.kv_routers", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="a factor for the number of requests")
    parser.add_argument("--loads", nargs="*", default=["shared", "turns", "trace"])
    parser.add_argument("--routers", nargs="*", default=[router.title for router in ROUTERS])
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="of peers; default: build/peers")
    options = parser.parse_args(words)
    routers = [router for router in ROUTERS if router.title in options.routers]
    with short_folder() as folder:
        every = paced(folder, options.scale)
        for name in options.loads:
            table = {router.title: Figures() for router in routers}
            for number in range(options.rounds):
                for router in routers if number % 2 == 0 else routers[::-1]:
                    measure(router, every[name], number, options.environments, table[router.title])
                    sys.stderr.write(f"{name} {number} {router.title:22}{table[router.title].row()}\n")
            sys.stdout.write(f"\n{name}: medians of {options.rounds} rounds, CPU of the router in ms a request\n")
            titles = ("TTFT p50", "p99 ms", "tokens/s", "CPU", "choice us")
            sys.stdout.write(f"{'':22}{'hit share':26}" + " ".join(f"{title:>9}" for title in titles) + "  failed\n")
            for title, figures in table.items():
                sys.stdout.write(f"{title:22}{figures.row()}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
