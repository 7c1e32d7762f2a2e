"""Fitted costs are those of the timings, and of a simulated engine behind a server."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.spec import Costs, SimulatedSpec
from bench.calibration.fit import (
    COSTS,
    Bench,
    Timing,
    Unusable,
    first_token,
    fit,
    measure,
    next_token,
    table,
)
from bench.load.messages import Target
from protocol.messages.generation import Generate, Sampling, Tokens
from protocol.token_ids import TokenIds
from supervisor.engines.kinds import read_cluster

SIMULATED = Path(__file__).parents[3] / "examples" / "simulated.toml"

MEASURED = ("fixed_s", "per_running_s", "per_prefill_token_s")
TRIES = 6  # the first good one counts: a busy machine's own times are measured as well

price = st.floats(1e-6, 1.0)


def rows(
    fixed: float, running: float, prefill: float, kv: float, overhead: float, noise: Callable[[], float] = lambda: 1.0
) -> list[Timing]:
    out = [first_token((fixed + running + prefill * length + overhead) * noise(), length) for length in (64, 256, 1024)]
    for streams in (1, 4, 16):
        out += [
            next_token((fixed + streams * (running + kv * context)) * noise(), streams, context)
            for context in (80, 1100)
        ]
    return out


@given(*(price for _ in COSTS))
def test_exact_times_give_the_exact_costs(
    fixed: float, running: float, prefill: float, kv: float, overhead: float
) -> None:
    measured = rows(fixed, running, prefill, kv, overhead)
    fitted = fit(measured)
    assert fitted.rms < 1e-6
    for row in measured:
        again = sum(amount * fitted.costs[name] for name, amount in zip(COSTS, row.amounts, strict=True))
        assert again == pytest.approx(row.seconds, rel=1e-5)


def test_costs_of_a_usual_size_are_separated() -> None:
    fitted = fit(rows(0.008, 5e-5, 3e-5, 4e-8, 0.002))
    assert fitted.costs == pytest.approx(dict(zip(COSTS, (0.008, 5e-5, 3e-5, 4e-8, 0.002), strict=True)), rel=1e-6)


def test_noise_leaves_a_residual_and_no_negative_cost() -> None:
    rng = random.Random(0)
    fitted = fit(rows(0.008, 0.0, 3e-5, 0.0, 0.0, lambda: rng.uniform(0.9, 1.1)))
    assert min(fitted.costs.values()) >= 0
    assert 0.01 < fitted.rms < 0.1
    assert fitted.worst[0] >= fitted.rms
    assert fitted.costs["per_prefill_token_s"] == pytest.approx(3e-5, rel=0.2)


def test_costs_that_were_not_varied_are_not_separated_and_the_times_still_fit() -> None:
    fitted = fit([next_token(0.01, 4, 100)])
    assert fitted.rms < 1e-9
    assert sum(value > 0 for value in fitted.costs.values()) == 1


def test_the_table_is_a_section_of_the_file(tmp_path: Path) -> None:
    text = table(fit(rows(0.008, 5e-5, 3e-5, 4e-8, 0.002))).replace("NAME", "tiny-0")
    before, _, _ = SIMULATED.read_text().partition("[engine.tiny-0.simulated.costs]")
    file = tmp_path / "cluster.toml"
    (tmp_path / "tiny").mkdir()
    file.write_text(before + text)
    costs = read_cluster(file).engine["tiny-0"].simulated.costs  # type: ignore[attr-defined]
    assert costs == Costs(fixed_s=0.008, per_running_s=5e-5, per_prefill_token_s=3e-5, per_kv_token_s=4e-8)
    assert "2.00 ms beside its step" in text


# Against a server that takes its time as stated -------------------------------------------


async def answer(engine: SimulatedEngine, stream: trio.SocketStream) -> None:
    """Answer one chat completion over HTTP; a word is a token."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive_some()
    head, _, text = data.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: (\d+)", head)
    assert found is not None
    length = int(found[1])
    while len(text) < length:
        text += await stream.receive_some()
    body = json.loads(text)
    words = body["messages"][0]["content"].split()
    request = Generate(
        f"{id(stream)}",
        TokenIds.of([hash(word) % 1000 for word in words]),
        Sampling(body["max_tokens"], ignore_eos=True),
    )
    await stream.send_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
    async for reply in engine.submit(request):
        if isinstance(reply, Tokens):
            await stream.send_all(b'data: {"choices": [{"delta": {"content": "word "}}]}\n\n')
    await stream.send_all(b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n')
    usage = {"prompt_tokens": len(words), "completion_tokens": body["max_tokens"]}
    await stream.send_all(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())


async def with_server(spec: SimulatedSpec, use: Callable[[int], Any]) -> Any:
    """Call `use(port)` in a thread while an engine is served."""
    engine = SimulatedEngine(spec, random.Random(0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)

        async def handle(stream: trio.SocketStream) -> None:
            async with stream:
                await answer(engine, stream)

        listeners = await nursery.start(partial(trio.serve_tcp, handle, 0, host="127.0.0.1"))
        result = await trio.to_thread.run_sync(use, listeners[0].socket.getsockname()[1])
        nursery.cancel_scope.cancel()
    return result


@pytest.mark.realtime
async def test_the_costs_of_a_simulated_engine_are_measured_from_outside() -> None:
    costs = Costs(fixed_s=0.02, per_running_s=0.008, per_prefill_token_s=0.0002)
    spec = SimulatedSpec(costs=costs, prefix_cache=False, vocabulary_size=1000)

    def use(port: int) -> list[Any]:
        return list(measure(Bench(target(port), 0, repeats=2), [50, 300], [1, 4], 12))

    wanted = {name: pytest.approx(getattr(costs, name), rel=0.25) for name in MEASURED}
    tries: list[dict[str, float]] = []
    while len(tries) < TRIES and tries[-1:] != [wanted]:
        fitted = fit(await with_server(spec, use))
        tries.append({name: fitted.costs[name] for name in MEASURED})
    assert tries[-1] == wanted, tries
    assert fitted.rms < 0.1


def target(port: int) -> Target:
    return Target(url=f"http://127.0.0.1:{port}/v1", api="chat", model="any", ignore_eos=True)


@pytest.mark.realtime
def test_an_error_of_a_missing_server_has_its_address() -> None:
    with pytest.raises(Unusable, match=r"127\.0\.0\.1:9"):
        Bench(target(9), 0, repeats=1).calibrate()
