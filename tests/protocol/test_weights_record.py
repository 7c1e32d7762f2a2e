"""Records of weights: one order for all nodes, and who is behind."""

from __future__ import annotations

import pytest

from protocol.errors import BadRequest
from protocol.messages.kind import Message
from protocol.messages.weights import (
    BeginWeightsUpdate,
    EndWeightsUpdate,
    GetWeightsChecksum,
    SetWeightsVersion,
    UpdateWeightsFromDisk,
    WeightsUpdated,
    WeightsVersion,
    numbered,
    recorded,
)
from protocol.weights_record import FIRST_WEIGHTS, WeightsRecord, differ

FOURTH = WeightsRecord(4, "step-4", "aa", "/step-4")
DISK = UpdateWeightsFromDisk(folder="/step-5", version="step-5")


def test_of_two_updates_at_once_the_same_one_is_newer_for_every_node() -> None:
    records = [FIRST_WEIGHTS, FOURTH, WeightsRecord(5, "a", "bb"), WeightsRecord(5, "b", "aa")]
    for place, record in enumerate(records):
        assert [record.is_newer(other) for other in records] == [place > other for other in range(4)]


@pytest.mark.parametrize(
    ("record", "newest", "why"),
    [
        (FIRST_WEIGHTS, FIRST_WEIGHTS, ""),
        (WeightsRecord(version="renamed"), FIRST_WEIGHTS, ""),
        (FOURTH, FOURTH, ""),
        (FIRST_WEIGHTS, FOURTH, "its weights are those of its start, and its model has version 'step-4'"),
        (FOURTH, WeightsRecord(5, "step-5"), "its weights are of version 'step-4', and its model has version 'step-5'"),
        (WeightsRecord(4, "other", "aa"), FOURTH, "its weights are of version 'other', and its model has version"),
        (
            WeightsRecord(4, "step-4", "bb"),
            FOURTH,
            "its weights of version 'step-4' differ from those of other engines",
        ),
        (WeightsRecord(4, "step-4", "tp2:bb"), FOURTH, ""),
    ],
)
def test_a_record_behind_the_newest_one_has_a_reason(record: WeightsRecord, newest: WeightsRecord, why: str) -> None:
    assert record.behind(newest).startswith(why)
    assert bool(record.behind(newest)) is bool(why)


def test_checksums_of_one_layout_are_compared() -> None:
    assert differ("aa", "bb")
    assert differ("tp2:aa", "tp2:bb")
    assert not differ("aa", "aa")
    assert not differ("aa", "tp2:bb")


@pytest.mark.parametrize(
    ("request_", "result", "record"),
    [
        (DISK, WeightsUpdated("step-5", "bb"), WeightsRecord(5, "step-5", "bb", "/step-5")),
        (EndWeightsUpdate("step-9", 9), WeightsUpdated("step-9", "cc"), WeightsRecord(9, "step-9", "cc")),
        (EndWeightsUpdate(""), WeightsUpdated("step-4", "aa"), FOURTH),
        (GetWeightsChecksum(), WeightsUpdated("step-4", "aa"), FOURTH),
        (SetWeightsVersion("new", 5), WeightsVersion("new"), WeightsRecord(5, "new", "aa", "/step-4")),
        (SetWeightsVersion(), WeightsVersion("step-4"), FOURTH),
    ],
)
def test_an_operation_leaves_a_record(request_: Message, result: Message, record: WeightsRecord) -> None:
    assert recorded(FOURTH, request_, result) == record


def test_an_update_gets_the_next_number_of_its_model() -> None:
    for alone in (False, True):
        assert getattr(numbered(DISK, FOURTH, alone=alone), "serial") == 5  # noqa: B009  # of any message
    assert numbered(EndWeightsUpdate("x", 7), FOURTH, alone=True) == EndWeightsUpdate("x", 7)
    assert numbered(EndWeightsUpdate(""), FOURTH, alone=True) == EndWeightsUpdate("")
    assert numbered(BeginWeightsUpdate(), FOURTH, alone=False) == BeginWeightsUpdate()


def test_one_engine_that_is_asked_for_the_version_of_its_model_joins_the_others() -> None:
    request = EndWeightsUpdate("step-4")
    assert numbered(request, FOURTH, alone=True) == EndWeightsUpdate("step-4", 4, "aa")
    assert numbered(request, FOURTH, alone=False) == EndWeightsUpdate("step-4", 5), "new weights of all"


def test_the_weights_of_all_engines_have_one_name() -> None:
    assert numbered(SetWeightsVersion("new"), FOURTH, alone=False) == SetWeightsVersion("new", 5)
    assert numbered(SetWeightsVersion("new"), FIRST_WEIGHTS, alone=True) == SetWeightsVersion("new")
    with pytest.raises(BadRequest, match="name the weights of all of them at once"):
        numbered(SetWeightsVersion("new"), FOURTH, alone=True)
