"""A mistaken name of a section is one mistake, with the right way to write it, and hides no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.errors import StartFailed
from supervisor.engines.kinds import read_cluster
from tests.rig.gateway import FOLDER
from tests.supervisor.config.test_load import GOOD, mistakes

Written = Callable[[str], Path]


def needs_quotes(table: str, name: str) -> str:
    return f'{table}.{name}: a name with a dot needs quotes: write [{table}."{name}"]'


SECOND = '[engine.b]\nmodel = "Qwen3-1.5B"\nkind = "simulated"\nkv_tokens_max = 64\n'


def renamed(name: str, engine: str = "tiny-0") -> str:
    text = GOOD.replace("[model.tiny]", f"[model.{name}]").replace('"tiny"', f'"{name}"')
    return text.replace("engine.tiny-0", f"engine.{engine}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (renamed("Qwen3-1.7B"), [(2, needs_quotes("model", "Qwen3-1.7B"))]),
        (
            renamed("Qwen3-1.7B").replace("path =", "pth ="),
            [
                (2, needs_quotes("model", "Qwen3-1.7B")),
                (3, 'model["Qwen3-1.7B"].pth: is not a key here; did you mean path?'),
            ],
        ),
        (renamed("Qwen2.5-0.5B-Instruct"), [(2, needs_quotes("model", "Qwen2.5-0.5B-Instruct"))]),
        (
            renamed("Qwen3-1.7B", "Qwen3-1.7B.0"),
            [(2, needs_quotes("model", "Qwen3-1.7B")), (5, needs_quotes("engine", "Qwen3-1.7B.0"))],
        ),
        (
            renamed("Qwen3-1.7B") + f'[model.Qwen3-1.5B]\npath = "{FOLDER}"\n{SECOND}',
            [(2, needs_quotes("model", "Qwen3-1.7B")), (9, needs_quotes("model", "Qwen3-1.5B"))],
        ),
        (
            (
                f'{GOOD}[model.tiny.5]\npath = "{FOLDER}"\n[engine.b]\nmodel = "tiny.5"\nkind = "simulated"\n'
                "kv_tokens_max = 64\n"
            ),
            [(9, needs_quotes("model", "tiny.5"))],
        ),
        (
            (
                f'{GOOD}slotts = 3\n[engine.b.1]\nmodel = "tiny"\ndevice = "cpu"\nkv_tokens_max = 64\nslotts = 3\n'
                "[engine.b.1.deadlines]\ngap_s = true\n"
            ),
            [
                (9, "engine.tiny-0.slotts: is not a key here; did you mean slots?"),
                (10, needs_quotes("engine", "b.1")),
                (14, 'engine["b.1"].slotts: is not a key here; did you mean slots?'),
                (16, 'engine["b.1"].deadlines.gap_s: expected a number, got true'),
            ],
        ),
        (
            f'{GOOD}[node.a.b]\n[node.main]\nlisten = "127.0.0.1:7401"\n',
            [(9, 'node["a.b"]: must be lower-case letters, digits and dashes, got "a.b"')],
        ),
    ],
)
def test_an_unquoted_name_is_one_mistake_and_is_known_elsewhere(
    written: Written, text: str, expected: list[tuple[int, str]]
) -> None:
    assert mistakes(written(text)) == expected


NO_NAME = "has a section without a name: write"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD.replace("[model.tiny]", "[model]"), [(2, f"model: {NO_NAME} [model.NAME]")]),
        (GOOD.replace("[engine.tiny-0]", "[engine]"), [(5, f"engine: {NO_NAME} [engine.NAME]")]),
        (
            GOOD.replace("[engine.tiny-0]", "[engine]").replace("[model.tiny]", "[model]") + "slotts = 3\n",
            [
                (2, f"model: {NO_NAME} [model.NAME]"),
                (5, f"engine: {NO_NAME} [engine.NAME]"),
                (9, "engine.engine-0.slotts: is not a key here; did you mean slots?"),
            ],
        ),
        (
            GOOD.replace("[engine.tiny-0]", "[[engine]]") + "slotts = 3\n",
            [
                (5, "engine: has sections without names: write each as [engine.NAME]"),
                (9, "engine.engine-0.slotts: is not a key here; did you mean slots?"),
            ],
        ),
        (f'{GOOD}[node]\nlisten = "127.0.0.1:7401"\n', [(9, f"node: {NO_NAME} [node.NAME]")]),
    ],
)
def test_a_section_without_a_name_is_one_mistake(written: Written, text: str, expected: list[tuple[int, str]]) -> None:
    assert mistakes(written(text)) == expected


@pytest.mark.parametrize(
    ("text", "row"),
    [
        (f"{GOOD}[engine.tiny-0.deadlin]\ngap_s = 3\n", "engine.tiny-0.deadlin: is not a key here; did you mean"),
        (f"{GOOD}[engine.tiny-0.limits]\nslots = 3\n", "engine.tiny-0.limits: is not a key here"),
        (f"{GOOD}[engine.tiny-0.nothing]\n", "engine.tiny-0.nothing: is not a key here"),
    ],
)
def test_an_unknown_table_of_a_section_is_no_name(written: Written, text: str, row: str) -> None:
    ((_, mistake),) = mistakes(written(text))
    assert mistake.startswith(row)


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("[model.Qwen/Qwen3-0.6B]", '; a name with such characters needs quotes: [model."Qwen/Qwen3-0.6B"]'),
        ("[model.a/b-0.6B.grid]", '; a name with such characters needs quotes: [model."a/b-0.6B".grid]'),
        ("[engine.my engine] # mine", '; a name with such characters needs quotes: [engine."my engine"]'),
        ("path = ~/models/x", '; a text needs quotes: path = "..."'),
        ("metrics = True", "; write metrics = true"),
        ("port = = 3", ""),
    ],
)
def test_a_line_that_only_lacks_quotes_is_refused_with_its_quotes(written: Written, line: str, advice: str) -> None:
    with pytest.raises(StartFailed) as caught:
        read_cluster(written(f"# a file\n{line}\n"))
    assert " is not TOML: " in str(caught.value)
    assert str(caught.value).partition(")")[2] == advice
