"""The merge of engines' own metrics: labels, one head a family, and nothing that would break or forge a text."""

from __future__ import annotations

import random

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import MockClock

from protocol.messages.operations import METRICS_BYTES_MAX, EngineMetrics
from supervisor.telemetry.engine_metrics import LINE_LENGTH_MAX, merge_in_steps
from tests.rig.turns import cpu_watched

PREFIXES = ("sglang:", "other:")
GAUGE = """\
# HELP sglang:running Requests that run
# TYPE sglang:running gauge
"""
HISTOGRAM = """\
# HELP sglang:queue_seconds Time
# TYPE sglang:queue_seconds histogram
sglang:queue_seconds_bucket{le="0.1"} 1.0
sglang:queue_seconds_bucket{le="+Inf"} 2.0
sglang:queue_seconds_sum 0.7
sglang:queue_seconds_count 2.0
"""


async def merged(**texts: str) -> tuple[list[str], dict[str, int]]:
    """Return the lines of the merged texts of engines of node `a`, and what was left out."""
    text, left_out = await merge_in_steps({f"a/{name}": EngineMetrics(text) for name, text in texts.items()}, PREFIXES)
    assert text == b"" or text.endswith(b"\n")
    return text.decode().splitlines(), {name: count for name, count in left_out.items() if count}


async def one(text: str) -> list[str]:
    """Return the series that are taken of a text."""
    lines, _ = await merged(tiny=text)
    return [line for line in lines if not line.startswith("#")]


async def test_each_series_has_its_engine_and_rank_and_each_family_one_head(autojump_clock: MockClock) -> None:
    lines, left_out = await merged(
        tiny=GAUGE + 'sglang:running{tp_rank="3"} 2.0\n' + HISTOGRAM,
        big=GAUGE + 'sglang:running{dp_rank="1",model_name="m"} 3.0\nsglang:running{dp_rank="0"} 4.0\n',
    )
    assert lines == [
        "# HELP sglang:queue_seconds Time",
        "# TYPE sglang:queue_seconds histogram",
        'sglang:queue_seconds_bucket{engine="a/tiny",rank="0",le="0.1"} 1.0',
        'sglang:queue_seconds_bucket{engine="a/tiny",rank="0",le="+Inf"} 2.0',
        'sglang:queue_seconds_sum{engine="a/tiny",rank="0"} 0.7',
        'sglang:queue_seconds_count{engine="a/tiny",rank="0"} 2.0',
        "# HELP sglang:running Requests that run",
        "# TYPE sglang:running gauge",
        'sglang:running{engine="a/big",rank="1",dp_rank="1",model_name="m"} 3.0',
        'sglang:running{engine="a/big",rank="0",dp_rank="0"} 4.0',
        'sglang:running{engine="a/tiny",rank="0",tp_rank="3"} 2.0',
    ]
    assert left_out == {}
    families = {family.name: family for family in text_string_to_metric_families("\n".join(lines) + "\n")}
    assert {name: family.type for name, family in families.items()} == {
        "sglang:queue_seconds": "histogram",
        "sglang:running": "gauge",
    }


@pytest.mark.parametrize(
    "series",
    [
        "espalier_requests_total 1.0",
        'sglang:running{a="b"} 1.0\x00',
        "sglang:running",
        "sglang:running one",
        "sglang:running 1.0 1700000000",
        'sglang:running{a="b",a="c"} 1.0',
        'sglang:running{a="b"c="d"} 1.0',
        'sglang:running{a="b} 1.0',
        'sglang:running{a="\\x"} 1.0',
        'sglang:running{0a="b"} 1.0',
        "sglang:running_bucket 1.0",
        "sglang:walking 1.0",
        "sglang:" + "r" * LINE_LENGTH_MAX + " 1.0",
        f'sglang:running{{a="{"b" * LINE_LENGTH_MAX}"}} 1.0',
    ],
)
async def test_a_line_that_is_no_series_of_its_family_is_left_out_and_counted(
    series: str, autojump_clock: MockClock
) -> None:
    lines, left_out = await merged(tiny=f"{GAUGE}{series}\nsglang:running 2.0\n")
    assert lines[2:] == ['sglang:running{engine="a/tiny",rank="0"} 2.0']
    assert left_out == {"a/tiny": 1}


@pytest.mark.parametrize(
    "text",
    [
        "sglang:running 1.0\n",  # without a type
        "# TYPE espalier_requests_total counter\nespalier_requests_total 1.0\n",
        "# TYPE sglang:running nonsense\nsglang:running 1.0\n",
        f"{GAUGE}# HELP sglang:other Something\nsglang:running 1.0\n",
        f"{GAUGE}# TYPE espalier_up gauge\nespalier_up 1.0\n",
    ],
)
async def test_what_belongs_to_no_family_of_an_engine_is_left_out(text: str, autojump_clock: MockClock) -> None:
    assert await merged(tiny=text) == ([], {"a/tiny": 1})


async def test_a_name_that_two_engines_give_another_type_has_the_type_of_the_first(autojump_clock: MockClock) -> None:
    lines, left_out = await merged(
        a=f"{GAUGE}sglang:running 1.0\n", b="# TYPE sglang:running counter\nsglang:running 2.0\n"
    )
    assert lines[1:] == ["# TYPE sglang:running gauge", 'sglang:running{engine="a/a",rank="0"} 1.0']
    assert left_out == {"a/b": 1}


async def test_labels_with_the_names_of_ours_are_kept_under_others(autojump_clock: MockClock) -> None:
    series = 'sglang:running{engine="b/mine",rank="7",x="a,b=\\"c\\"}"} 1.0\n'
    assert await one(GAUGE + series) == [
        'sglang:running{engine="a/tiny",rank="0",x="a,b=\\"c\\"}",exported_engine="b/mine",exported_rank="7"} 1.0'
    ]


@pytest.mark.parametrize("value", ["0", "1.5", "-3", "1e-05", "1.2e+30", "NaN", "+Inf", "-Inf"])
async def test_values_stay_as_they_are_written(value: str, autojump_clock: MockClock) -> None:
    assert await one(f"{GAUGE}sglang:running {value}\n") == [f'sglang:running{{engine="a/tiny",rank="0"}} {value}']


async def test_what_the_engine_has_left_out_is_counted_too(autojump_clock: MockClock) -> None:
    _, left_out = await merge_in_steps(
        {"a/tiny": EngineMetrics(f"{GAUGE}nonsense\n", 41), "a/b": EngineMetrics("", -1)}, PREFIXES
    )
    assert left_out == {"a/tiny": 42, "a/b": 0}


@pytest.mark.parametrize("fill", ["\n", "#\n", "sglang:running 1.0\n", "x", '{a="'])
def test_a_text_of_any_content_is_merged_in_short_turns(fill: str) -> None:
    body = fill * ((METRICS_BYTES_MAX - len(GAUGE)) // len(fill))

    async def merge() -> None:
        async with trio.open_nursery() as nursery:  # in a task of the product's own function, whose turns are measured
            nursery.start_soon(merge_in_steps, {"a/tiny": EngineMetrics(GAUGE + body)}, PREFIXES)
            nursery.start_soon(merge_in_steps, {"a/tiny": EngineMetrics(f"{GAUGE}sglang:running{{{body}")}, PREFIXES)

    with cpu_watched() as exceeded:
        trio.run(merge)
    assert exceeded == []


async def test_random_texts_make_a_text_that_prometheus_reads(autojump_clock: MockClock) -> None:
    chance = random.Random(7)
    pieces = [
        "sglang:running",
        "espalier_up",
        "{",
        "}",
        'a="b"',
        ",",
        '"',
        "\\",
        " ",
        "1.0",
        "\n",
        "# TYPE ",
        "# HELP ",
    ]
    pieces += [" gauge", " histogram", "_bucket", 'le="1"', "sglang:x", GAUGE, HISTOGRAM]
    for _ in range(300):
        text = "".join(chance.choice(pieces) for _ in range(chance.randrange(60)))
        lines, _ = await merged(tiny=text, big=text)
        names = [family.name for family in text_string_to_metric_families("\n".join(lines) + "\n")]
        assert all(name.startswith("sglang:") for name in names)
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["espalier_engine_up", "python_info", "sglangs", "unknown:x"])
async def test_an_engine_reports_no_metric_whose_name_is_that_of_others(name: str, autojump_clock: MockClock) -> None:
    lines, left_out = await merged(
        tiny=f"# HELP {name} x\n# TYPE {name} gauge\n{name} 1.0\n{GAUGE}sglang:running 2.0\n"
    )
    assert [line for line in lines if not line.startswith("#")] == ['sglang:running{engine="a/tiny",rank="0"} 2.0']
    assert left_out == {"a/tiny": 1}
