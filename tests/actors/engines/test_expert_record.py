"""The record of a mixture of experts: its numbers, its picture, and the legal order of its operations."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

from actors.engines.expert_record import RecordState, balancedness, record_of, write_files
from protocol.errors import BadRequest, Overloaded
from protocol.messages.experts import ExpertLayer

COUNTS = [[4, 0, 0, 4], [0, 0, 0, 0], [2, 2, 2, 2]]


class Kept(dict[str, bytes]):
    """Files in memory."""

    def write(self, name: str, data: bytes) -> None:
        self[name] = data


def test_balancedness_is_the_mean_divided_by_the_maximum() -> None:
    assert balancedness([1, 1, 1, 1]) == 1.0
    assert balancedness([8, 0, 0, 0]) == 0.25
    assert balancedness([0, 0]) == 1.0


def test_a_record_has_the_layers_with_experts_and_the_ranks_that_share_them() -> None:
    record = record_of(COUNTS, 3, ["a"], ranks=2)
    assert record.layers == (
        ExpertLayer(0, 8, 0.5, 0, (4, 4), 1.0),
        ExpertLayer(2, 8, 1.0, 0, (4, 4), 1.0),
    )
    assert (record.steps, record.routed, record.files) == (3, 16, ("a",))
    assert record.picture.splitlines()[:2] == ["layer   0 9009", "layer   2 9999"]
    assert all(layer.ranks == () and layer.rank_balancedness is None for layer in record_of(COUNTS, 3, []).layers)


def test_a_line_of_the_picture_stays_short_however_many_experts_there_are() -> None:
    counts = [list(range(1000)) for _ in range(2)]
    assert max(map(len, record_of(counts, 1, []).picture.splitlines())) <= 140


def test_the_files_are_numbers_that_sglang_reads_and_a_picture_with_a_cell_for_each_expert() -> None:
    files = Kept()
    names = write_files(files, "experts-1", COUNTS)
    assert names == ("experts-1.json", "experts-1.svg")
    assert json.loads(files[names[0]]) == {"logical_count": COUNTS}
    svg = ET.fromstring(files[names[1]])
    cells = svg.findall("{http://www.w3.org/2000/svg}rect")
    assert len(cells) == 12
    assert {cell.attrib["fill"] for cell in cells[4:8]} == {"#440154"}
    assert cells[0].attrib["fill"] == "#fde725"
    assert [title.text for title in cells[0]] == ["layer 0, expert 0: 4 tokens"]


def test_a_record_without_a_token_is_empty() -> None:
    assert record_of([[0, 0]], 0, []).layers == ()
    assert write_files(Kept(), "a", [])


def test_the_order_of_operations() -> None:
    state = RecordState()
    for wrong in (state.stop, state.check_dump):
        with pytest.raises(BadRequest):
            wrong()
    state.start()
    with pytest.raises(Overloaded):
        state.start()
    state.check_dump()
    state.dumped()
    state.check_dump()  # it goes on
    state.stop()
    state.check_dump()
    state.dumped()
    with pytest.raises(BadRequest):
        state.check_dump()
