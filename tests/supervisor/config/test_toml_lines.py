"""Every key of a TOML text has the line on which it is written, however it is spelled."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from protocol.strict.mistakes import join, segment
from supervisor.config.toml_lines import line_of, lines_of

TEXT = r'''# [no]
a.b = 1
'prot' = """x = 1
[y]
"""
"q.r" = [1, # ]
  2, {z = 3, "k\u0041" = [ {n=1} ]},
]
[t.u]
v = 'x' # [no]
w = "\"] = ["
[[arr]]
k = 1
[arr.sub]
m = 2
[[arr]]
k = 2
[[arr.deep]]
p = 1
[ "model" . "qwen-2.5" ]
path = "x"
[t]
late = """a ""two"" quotes"""
'''


def test_keys_have_their_lines_however_they_are_spelled() -> None:
    tomllib.loads(TEXT)
    assert lines_of(TEXT) == {
        "a": 2,
        "a.b": 2,
        "prot": 3,
        '["q.r"]': 6,
        '["q.r"][0]': 6,
        '["q.r"][1]': 7,
        '["q.r"][2]': 7,
        '["q.r"][2].z': 7,
        '["q.r"][2].kA': 7,
        '["q.r"][2].kA[0]': 7,
        '["q.r"][2].kA[0].n': 7,
        "t": 22,
        "t.u": 9,
        "t.u.v": 10,
        "t.u.w": 11,
        "arr": 12,
        "arr[0]": 12,
        "arr[0].k": 13,
        "arr[0].sub": 14,
        "arr[0].sub.m": 15,
        "arr[1]": 16,
        "arr[1].k": 17,
        "arr[1].deep": 18,
        "arr[1].deep[0]": 18,
        "arr[1].deep[0].p": 19,
        "model": 20,
        'model["qwen-2.5"]': 20,
        'model["qwen-2.5"].path': 21,
        "t.late": 23,
    }


def test_a_missing_key_has_the_line_of_its_table() -> None:
    lines = lines_of(TEXT)
    assert line_of("t.u.missing", lines) == 9
    assert line_of("arr[1].deep[0].p[3]", lines) == 19
    assert line_of("nothing.at.all", lines) == 1
    assert line_of("a.bc", lines) == 2


KEYS = st.sampled_from(["a", "b-c", "D_9", '"x y"', "'p.q'", '"\\u00e9"', "10"])
VALUES = st.recursive(
    st.sampled_from(
        ["1", "-2.5e3", "true", '"#] x"', "'[{'", '"""m\n"n" = 1\n"""', "'''o\n'''", "1979-05-27T07:32:00Z"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[ {' , '.join(items)} ]")
        | st.lists(inner, max_size=3).map(lambda items: "[\n" + "".join(f"{item}, # ,]\n" for item in items) + "]")
    ),
    max_leaves=5,
)


@given(st.lists(st.tuples(KEYS, VALUES), max_size=6, unique_by=lambda each: tomllib.loads(f"{each[0]}=1").popitem()[0]))
def test_each_key_of_a_table_has_the_line_on_which_it_was_written(pairs: list[Any]) -> None:
    text, expected = "[t]\n", {"t": 1}
    for key, value in pairs:
        (plain,) = tomllib.loads(f"{key} = 1")
        expected[join("t", segment(plain))] = text.count("\n") + 1
        text += f"{key} = {value}\n"
    tomllib.loads(text)
    lines = lines_of(text)
    assert {path: line for path, line in lines.items() if path in expected} == expected


def paths(value: object, path: str = "") -> Iterator[str]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, join(path, segment(key)))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from paths(inner, f"{path}[{number}]")


HEADERS = st.lists(KEYS, min_size=1, max_size=3).map(".".join)
LINES = st.one_of(
    st.tuples(KEYS, VALUES).map(" = ".join),
    HEADERS.map("[{}]".format),
    HEADERS.map("[[{}]]".format),
    st.tuples(HEADERS, st.just("{ a = 1, b-c = { D_9 = [ 1, { a = 2 } ] } }")).map(" = ".join),
)


@given(st.lists(LINES, max_size=8))
def test_every_path_of_a_valid_text_has_a_line(lines: list[Any]) -> None:
    text = "\n".join(lines)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    assert set(lines_of(text)) == set(paths(data))
