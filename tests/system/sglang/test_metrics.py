"""SGLang's own metrics at `/metrics` of a real node: labelled, while the engine lives, and no longer."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from bench.rig.node import MODEL, SGLANG, Node, node, short_folder, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

AGAIN_WITHIN_S = 60.0
FAMILIES_MIN = 60
PID = re.compile(r'pid="([0-9]+)"')
RUN_TOKENS = "sglang:realtime_tokens_total"


@pytest.fixture
def measured() -> Iterator[Node]:
    with short_folder() as folder, node(folder, engine=SGLANG + "metrics = true\n") as running:
        yield running


def scraped(running: Node) -> list[str]:
    """Return the series of SGLang's own that the node serves."""
    text = running.get("/metrics")[1].decode()
    list(text_string_to_metric_families(text))  # it is what Prometheus reads
    heads = [line for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(heads) == len({line.split()[2] for line in heads})
    return [line for line in text.splitlines() if line.startswith("sglang:")]


def test_the_metrics_of_an_engine_are_served_while_it_lives_and_end_with_it(measured: Node) -> None:
    with OpenAI(base_url=f"http://127.0.0.1:{measured.port}/v1", api_key="none", max_retries=0) as client:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=32)
        before = scraped(measured)
        assert len({re.split("[{ ]", line)[0] for line in before}) >= FAMILIES_MIN
        assert all(f'{{engine="main/{MODEL}-0",rank="0",' in line for line in before)
        assert measured.metric("espalier_engine_metrics_left_out") == 0
        decoded = measured.metric(RUN_TOKENS, mode="decode")
        assert decoded > 0

        first = {pid for line in before for pid in PID.findall(line)}
        scheduler = measured.observe()["scheduler"].pid
        measured.kill("scheduler")
        assert wait_until(lambda: not scraped(measured), AGAIN_WITHIN_S) is not None, "what died keeps its series"
        assert wait_until(lambda: scraped(measured), AGAIN_WITHIN_S) is not None
        after = scraped(measured)
        assert {pid for line in after for pid in PID.findall(line)}.isdisjoint({*first, str(scheduler)})
        assert measured.metric(RUN_TOKENS, mode="decode") < decoded, "it counts from its own warm-up on"
        assert not list(measured.tmp.rglob(f"*_{scheduler}.db"))
