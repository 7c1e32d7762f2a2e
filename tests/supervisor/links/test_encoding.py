"""Where the nodes of cluster.toml listen, and what may cross between them."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.errors import ERRORS_BY_CODE, ActorLost, AskerLeft, BadRequest, PeerViolation, RequestError
from protocol.link import codec
from protocol.link.frames import Fail
from protocol.messages.generation import HAND_OFF_BYTES_MAX, Generate, Started, Tokens
from protocol.messages.kind import Message
from protocol.messages.media import Encode
from protocol.weight_versions import VERSION_CHARACTERS_MAX
from supervisor.engines.kinds import read_cluster
from supervisor.links.encoding import (
    DETAIL_CHARACTERS_MAX,
    PARAM_CHARACTERS_MAX,
    reply_rules,
    request_error,
)
from tests.rig.assembly import built_assembly
from tests.rig.fake_engine import generate
from tests.rig.tensors import pixels
from tests.supervisor.config.test_load import GOOD, Written, mistakes

TWO = """
[gateway]
node = "front"
[node.front]
host = "one"
listen = "{}"
[node.back]
host = "{}"
listen = "{}"
"""
ONE_HOST = {
    ("0.0.0.0:7401", "one", "0.0.0.0:7401"): True,
    ("0.0.0.0:7401", "one", "[::]:7401"): True,
    ("0.0.0.0:7401", "two", "0.0.0.0:7401"): False,
    ("0.0.0.0:7401", "one", "0.0.0.0:7402"): False,
}


def text(*places: str) -> str:
    return GOOD.replace('model = "tiny"', 'model = "tiny"\nnode = "back"') + TWO.format(*places)


@pytest.mark.parametrize(("places", "wrong"), ONE_HOST.items(), ids=str)
def test_two_nodes_may_not_listen_at_one_address(places: tuple[str, str, str], wrong: bool, written: Written) -> None:
    path = written(text(*places))
    if not wrong:
        read_cluster(path)
        return
    ((line, message),) = mistakes(path)
    assert message == "node.back.listen: is where node front listens"
    assert path.read_text().splitlines()[line - 1] == f'listen = "{places[2]}"'


def test_a_node_that_listens_at_every_address_is_dialed_at_its_host(written: Written) -> None:
    cluster = read_cluster(written(text("0.0.0.0:7401", "two", "[::]:7402")))
    front, back = (built_assembly(cluster, name)[0] for name in ("front", "back"))
    assert front.directory.nodes["back"].address == "two:7402"
    assert back.directory.nodes["front"].address == "one:7401"
    assert back.links is not None
    assert back.links.host == "two"


@pytest.mark.parametrize("policy", ["least_loaded", "kv"])
def test_a_link_has_streams_for_all_slots_and_watched_engines_behind_it(policy: str, written: Written) -> None:
    file = text("a:7401", "two", "b:7401").replace("[model.tiny]", f'[model.tiny]\npolicy = "{policy}"')
    needed, watched = (17, " and 1 of its engines to watch") if policy == "kv" else (16, "")
    read_cluster(written(f"{file}[cluster]\nstreams_max = {needed}\n"))
    ((_, message),) = mistakes(written(f"{file}[cluster]\nstreams_max = {needed - 1}\n"))
    assert message == f"cluster.streams_max: is {needed - 1}, and node back has 16 slots to ask for{watched}"


# What may cross -----------------------------------------------------------------------------


@pytest.mark.parametrize("row", [row for row in codec.ROWS.values() if row.result is not None], ids=str)
def test_every_reply_and_result_that_a_row_does_not_name_is_refused(row: Any) -> None:
    made: dict[type[Message], Message] = {Generate: generate(), Encode: Encode("a", pixels())}
    request = made.get(row.message) or row.message.__new__(row.message)
    for other in codec.ROWS:
        answer = other.__new__(other)
        if other is not row.result:
            with pytest.raises(PeerViolation, match=f"a {other.__name__} ends an answer"):
                reply_rules(request).end(answer)
        if other not in row.replies:
            with pytest.raises(PeerViolation, match=f"a {other.__name__} for 1 units"):
                reply_rules(request).reply(answer, 1)


def test_a_hand_off_longer_than_its_limit_is_refused() -> None:
    reply_rules(generate()).reply(Started(hand_off=bytes(HAND_OFF_BYTES_MAX)), 0)
    with pytest.raises(PeerViolation, match=f"a hand-off of {HAND_OFF_BYTES_MAX + 1} bytes"):
        reply_rules(generate()).reply(Started(hand_off=bytes(HAND_OFF_BYTES_MAX + 1)), 0)


@pytest.mark.parametrize(
    "reply",
    [
        Started(version="x" * (VERSION_CHARACTERS_MAX + 1)),
        Tokens((), version="x" * (VERSION_CHARACTERS_MAX + 1)),
        Tokens((7,), version="step-1"),
    ],
)
def test_a_version_that_is_too_long_or_comes_with_tokens_is_refused(reply: Started | Tokens) -> None:
    rules = reply_rules(generate())
    if isinstance(reply, Tokens):
        rules.reply(Started(version="x" * VERSION_CHARACTERS_MAX), 0)
        rules.reply(Tokens((), version="x" * VERSION_CHARACTERS_MAX), 0)
    with pytest.raises(PeerViolation, match=r"cannot be|a version of 129 characters"):
        rules.reply(reply, codec.units_of(reply))


def test_an_answer_that_ends_as_left_though_its_asker_has_not_is_retryable() -> None:
    lost = request_error(Fail(1, AskerLeft.code, "x"), asker_left=False)
    assert isinstance(lost, ActorLost)
    assert lost.retry_after_s is not None
    assert isinstance(request_error(Fail(1, AskerLeft.code, "x"), asker_left=True), AskerLeft)


def test_the_error_of_another_node_reaches_a_client_at_a_limited_length() -> None:
    error = request_error(Fail(1, BadRequest.code, "x" * 100_000, "y" * 100_000), asker_left=False)
    assert (len(error.detail), error.param) == (DETAIL_CHARACTERS_MAX, "y" * PARAM_CHARACTERS_MAX)


BY_GATEWAY = {  # about a client's own key, connection, path, body or whole answer, which no worker knows
    *("invalid_api_key", "forbidden", "rate_limit_exceeded", "concurrency_limit_exceeded", "slow_client"),
    *("not_found", "model_not_found", "method_not_allowed", "upgrade_required", "unsupported_media_type"),
    *("previous_response_not_found", "invalid_stream_id", "answer_invalid"),
    *("websocket_stream_limit_reached", "websocket_connection_limit_reached"),
}


@pytest.mark.parametrize("code", ERRORS_BY_CODE)
def test_what_only_a_gateway_may_say_comes_from_no_other_node(code: str) -> None:
    error: RequestError = request_error(Fail(1, code, "the key is wrong", "key"), asker_left=True)
    if code in BY_GATEWAY:
        assert isinstance(error, ActorLost), "a request goes on elsewhere"
        assert (error.param, "the key is wrong" in error.detail) == (None, False)
    else:
        assert (error.code, error.param) == (code, "key")
