"""Who may ask is decided by a hash, limited by the clock, changed by a signal, and no secret is ever told."""

from __future__ import annotations

import hashlib
import hmac
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from protocol.dialects.http import error_body, error_headers
from protocol.errors import ConcurrencyLimited, EngineLost, Forbidden, RateLimited, StartFailed, Unauthorized
from protocol.strict.mistakes import Mistakes
from supervisor.config import keyfile
from supervisor.config.keyfile import KeySection
from supervisor.config.limits import GatewayLimits
from supervisor.files.reading import read_inline
from supervisor.gateway import keys as module
from supervisor.gateway.access_log import AccessLog, LineRateLimit
from supervisor.gateway.admission import AdmissionGate
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.keys import ADMIN, KEYS, Key, Keys, KeySources, presented_secret
from supervisor.gateway.origins import Origins
from supervisor.gateway.requests import RequestRecord, RequestRunner, ServedModel
from supervisor.gateway.token_bucket import TokenBucket
from supervisor.telemetry.metrics import Metrics
from tests.rig.log_records import log_records

ROOT = Path(__file__).parents[3]
SECRET = "sk-quetzalcoatl-0123456789"


def sha(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def bearer(secret: str = SECRET):
    return [(b"host", b"localhost"), (b"authorization", f"Bearer {secret}".encode())]


@pytest.fixture
def file(tmp_path: Path):
    def write(*sections: tuple[str, str]) -> Path:
        path = tmp_path / "keys.toml"
        path.write_text("".join(f"[key.{name}]\n{text}\n" for name, text in sections))
        return path

    return write


def loaded(path=None, **environment: str) -> Keys:
    keys = Keys(KeySources(path, environment))
    keys.load()
    return keys


def gateway(keys: Keys | None = None, **limits: int) -> Gateway:
    metrics = Metrics()
    return Gateway(
        runner=RequestRunner({}, metrics, 60.0, 600.0),
        gate=AdmissionGate(8, 5.0, 8, lambda: None),
        limits=GatewayLimits(**limits),
        origins=Origins(frozenset({"localhost"})),
        unready=lambda: None,
        metrics_text=None,
        new_id=str,
        now=float,
        keys=keys or Keys(),
        certificate=None,
        tls=None,
    )


# The file ----------------------------------------------------------------------------------


def test_a_file_says_what_each_key_may() -> None:
    text = {
        "sha256": sha("a"),
        "rate_per_s": 0.5,
        "burst": 4,
        "concurrency_max": 2,
        "connections_max": 3,
        "priority": -7,
        "admin": True,
    }
    assert keyfile.read({"key": {"alice": text}}) == {"alice": KeySection(**text)}
    assert keyfile.read({}) == {}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({}, "key.a.sha256: is missing"),
        ({"sha256": SECRET}, "key.a.sha256: must be the 64 hexadecimal digits that `hash-key` prints"),
        ({"sha256": sha("a").upper()}, "key.a.sha256: must be"),
        ({"sha256": sha("a"), "secret": SECRET}, "key.a.secret: is not a key here"),
        ({"sha256": sha("a"), "rate_per_s": 0}, "key.a.rate_per_s: must be at least 1e-06"),
        ({"sha256": sha("a"), "rate_per_s": "5"}, "key.a.rate_per_s: expected a number"),
        ({"sha256": sha("a"), "burst": 5}, "key.a.burst: means nothing without rate_per_s"),
        ({"sha256": sha("a"), "concurrency_max": 0}, "key.a.concurrency_max: must be at least 1"),
        ({"sha256": sha("a"), "priority": 10**9}, "key.a.priority: must be at least"),
        ({"sha256": sha("a"), "admin": "false"}, "key.a.admin: expected true or false"),
        ({"sha256": sha("b")}, "key.a.sha256: is the secret of b too"),
    ],
)
def test_a_mistake_in_the_file_is_named_and_no_secret_is_repeated(section: dict[str, Any], said: str) -> None:
    with pytest.raises(Mistakes) as caught:
        keyfile.read({"key": {"b": {"sha256": sha("b")}, "a": section}})
    assert said in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["", "a b", "-a", "é", "x" * 65])
def test_a_name_that_a_log_line_could_not_carry_is_a_mistake(name: str) -> None:
    with pytest.raises(Mistakes, match="must be 1 to 64 letters"):
        keyfile.read({"key": {name: {"sha256": sha("a")}}})


def test_there_are_never_more_keys_than_one_request_may_be_compared_with() -> None:
    def some(count: int):
        return {"key": {f"k{n}": {"sha256": sha(str(n))} for n in range(count)}}

    assert len(keyfile.read(some(keyfile.KEYS_MAX))) == keyfile.KEYS_MAX
    with pytest.raises(Mistakes, match="at most 1024 items"):
        keyfile.read(some(keyfile.KEYS_MAX + 1))


# The rate ----------------------------------------------------------------------------------

rates = st.floats(0.001, 1e4)
waits = st.lists(st.floats(0, 100), max_size=60)


@given(rates, st.integers(1, 50), waits)
def test_a_bucket_never_gives_more_than_its_burst_and_its_rate(rate: float, burst: int, pauses: list[float]) -> None:
    now, given_at = 0.0, []
    bucket = TokenBucket.full(rate, burst, now)
    for pause in pauses:
        now += pause
        if bucket.take(now) == 0:
            given_at.append(now)
    for first in range(len(given_at)):
        for last in range(first, len(given_at)):
            assert last - first + 1 <= (burst + rate * (given_at[last] - given_at[first])) * (1 + 1e-9) + 1e-9


@given(rates, st.integers(1, 50), waits)
def test_a_bucket_that_says_no_says_when_and_keeps_its_word(rate: float, burst: int, pauses: list[float]) -> None:
    now = 0.0
    bucket = TokenBucket.full(rate, burst, now)
    for pause in pauses:
        now += pause
        wait = bucket.take(now)
        assert 0 <= wait <= 1 / rate
        if wait:
            now += wait * (1 + 1e-9) + 1e-9
            assert bucket.take(now) == 0


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    bucket = TokenBucket.full(1.0, 2, 100.0)
    assert [bucket.take(now) for now in (100, 100)] == [0, 0]
    assert bucket.take(100) == 1
    assert bucket.take(50) == 1
    assert bucket.take(101) == 0


def test_a_burst_is_what_is_written_or_one_seconds_worth() -> None:
    assert [KeySection(sha256="", rate_per_s=rate).burst_max for rate in (0.1, 1, 2.5)] == [1, 1, 3]
    assert KeySection(sha256="", rate_per_s=0.1, burst=9).burst_max == 9


@pytest.mark.parametrize(
    ("asked", "key", "given"),
    [
        (None, None, 0),
        (0, None, 0),
        (5, None, 5),
        (10**9, None, 10**6),
        (None, 3, 3),
        (0, 3, 0),
        (5, 3, 3),
        (2, 3, 2),
        (-2, 3, -2),
        (None, -3, -3),
        (0, -3, -3),
    ],
)
def test_a_priority_is_the_clients_as_far_as_the_key_allows(asked: int | None, key: int | None, given: int) -> None:
    assert Key(section=KeySection(sha256="", priority=key)).clamp_priority(asked) == given


def test_a_key_without_a_priority_climbs_over_nobody_and_where_there_are_no_keys_everybody_may_name_any(file) -> None:
    keys = loaded(file(("alice", f'sha256 = "{sha("a")}"')), **{KEYS: "bob=b"})
    for secret in "ab":
        assert [keys.find(bearer(secret)).clamp_priority(asked) for asked in (-2, 0, 9)] == [-2, 0, 0]
    assert loaded().find([]).clamp_priority(9) == 9
    assert loaded(**{ADMIN: "a"}).find([]).clamp_priority(9) == 9  # an admin's key locks nobody out


# Finding a key -----------------------------------------------------------------------------


def test_without_keys_everybody_may_do_everything() -> None:
    keys = loaded()
    assert keys.find([]) is keys.find(bearer(), admin=True) is keys.anonymous
    assert not keys.wanted


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer " + SECRET.encode())],
        [(b"authorization", b"bearer   " + SECRET.encode() + b" ")],
        [(b"api-key", SECRET.encode())],
        [(b"x-api-key", SECRET.encode())],
        [(b"authorization", b"Basic eDp5"), (b"x-api-key", SECRET.encode())],
    ],
)
def test_a_key_is_found_in_every_header_of_the_field(headers: list[tuple[bytes, bytes]], file) -> None:
    keys = loaded(file(("alice", f'sha256 = "{sha(SECRET)}"')))
    assert keys.find(headers).name == "alice"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(""),
        bearer(SECRET + "x"),
        bearer(SECRET[:-1]),
        bearer(sha(SECRET)),
        [(b"authorization", SECRET.encode())],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer \xff\x00")],
        bearer("x" * 100_000),
        [(b"cookie", SECRET.encode())],
    ],
)
def test_whoever_has_no_key_is_told_so_and_nothing_else(headers, file) -> None:
    keys = loaded(file(("alice", f'sha256 = "{sha(SECRET)}"')))
    with pytest.raises(Unauthorized) as caught:
        keys.find(headers)
    error = caught.value
    assert (error.http_status, error.close_code, error.retryable) == (401, 1008, False)
    assert (b"www-authenticate", b"Bearer") in error_headers(error)
    assert b"invalid_api_key" in error_body(error)
    assert SECRET not in str(error)
    assert "alice" not in str(error)


def test_every_key_is_compared_whichever_fits(file, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(b) or compare(a, b))
    keys = loaded(file(*((f"k{n}", f'sha256 = "{sha(f"s{n}")}"') for n in range(5))))
    for secret in ("s0", "s4"):
        compared.clear()
        assert keys.find(bearer(secret)).name == f"k{secret[1]}"
        assert len(compared) == 5


def test_no_secret_stays_in_memory(file) -> None:
    keys = loaded(None, **{KEYS: f"alice={SECRET}"})
    assert keys.find(bearer()).section.sha256 == sha(SECRET)
    assert SECRET not in repr(keys)


# The admin's key -----------------------------------------------------------------------------


def test_admin_routes_take_an_admin_key() -> None:
    keys = loaded(**{KEYS: "alice=alices", ADMIN: "the-admins"})
    assert keys.find(bearer("the-admins"), admin=True).name == "admin"
    assert keys.find(bearer("the-admins")).name == "admin"
    assert keys.find(bearer("alices")).name == "alice"
    with pytest.raises(Forbidden, match="'alice' may not do this; it takes an admin key"):
        keys.find(bearer("alices"), admin=True)
    for headers in ([], bearer("guess")):
        with pytest.raises(Unauthorized):
            keys.find(headers, admin=True)


def test_where_keys_are_wanted_and_none_is_the_admins_nobody_is_the_admin() -> None:
    keys = loaded(**{KEYS: "alice=alices"})
    with pytest.raises(Forbidden, match=f"there is no admin key; set {ADMIN}"):
        keys.find(bearer("alices"), admin=True)


def test_an_admin_key_alone_closes_only_what_is_the_admins() -> None:
    keys = loaded(**{ADMIN: "the-admins"})
    assert keys.find([]) is keys.anonymous
    with pytest.raises(Unauthorized):
        keys.find([], admin=True)
    assert keys.find(bearer("the-admins"), admin=True).name == "admin"


def test_a_file_makes_admins_too(file) -> None:
    keys = loaded(file(("root", f'sha256 = "{sha("r")}"\nadmin = true'), ("alice", f'sha256 = "{sha("a")}"')))
    assert keys.find(bearer("r"), admin=True).name == "root"
    assert (keys.names(admin=True), keys.names(admin=False)) == (["root"], ["alice"])


# The environment -----------------------------------------------------------------------------


def test_the_environment_names_keys_and_tolerates_spaces() -> None:
    keys = loaded(**{KEYS: f" alice={SECRET} , bob=b=b==,"})
    assert keys.find(bearer()).name == "alice"
    assert keys.find(bearer("b=b==")).name == "bob"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({KEYS: ""}, "is set, but holds no name=secret"),
        ({KEYS: " , "}, "is set, but holds no name=secret"),
        ({KEYS: SECRET}, "entry 1 is not name=secret"),
        ({KEYS: f"a=b,{SECRET}="}, "entry 2 is not name=secret"),
        ({KEYS: f"{SECRET}=="}, "entry 1 is not name=secret"),
        ({KEYS: f"a b={SECRET}"}, "entry 1 is not name=secret"),
        ({KEYS: f"a={SECRET} {SECRET}"}, "entry 1: a key is 1 to 1024 visible ASCII"),
        ({KEYS: f"a={SECRET},a=other"}, "entry 2 has the name of another one"),
        ({KEYS: f"a={SECRET},b={SECRET}"}, "is the secret of a too"),
        ({KEYS: "admin=x", ADMIN: SECRET}, f"which is the name of {ADMIN}"),
        ({ADMIN: ""}, f"{ADMIN}: a key is"),
        ({ADMIN: "é" + SECRET}, f"{ADMIN}: a key is"),
    ],
)
def test_a_mistake_in_the_environment_is_one_sentence_without_the_secret(
    environment: dict[str, str], said: str
) -> None:
    with pytest.raises(StartFailed) as caught:
        loaded(**environment)
    assert said in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_and_environment_add_up_and_may_not_disagree(file) -> None:
    path = file(("alice", f'sha256 = "{sha("a")}"'))
    keys = loaded(path, **{KEYS: "bob=b"})
    assert keys.names(admin=False) == ["alice", "bob"]
    with pytest.raises(StartFailed, match=r"alice stands in .* and in the environment"):
        loaded(path, **{KEYS: "alice=b"})
    with pytest.raises(StartFailed, match="is the secret of alice too"):
        loaded(path, **{KEYS: "bob=a"})


# Reading anew --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"[key", b"\xff", b"[key.a]\nsha256 = 'no'", b"x = 1", b" " * 2_000_000, None])
async def test_a_broken_file_keeps_the_old_keys_and_says_one_line(
    text: bytes | None, file, caplog: pytest.LogCaptureFixture
) -> None:
    path = file(("alice", f'sha256 = "{sha("a")}"'))
    made = gateway(loaded(path))
    key = made.authenticate(bearer("a"))
    if text is None:
        path.unlink()
    else:
        path.write_bytes(text)
    with caplog.at_level(logging.INFO):
        await made.reload(read_inline)
    assert [(record.levelname, record.message) for record in log_records(caplog)] == [
        ("ERROR", "the keys stay as they were")
    ]
    assert str(path) in log_records(caplog)[0].reason
    assert "\n" not in log_records(caplog)[0].reason
    assert made.authenticate(bearer("a")) is key
    assert not key.revoked


async def test_a_key_that_stays_keeps_what_it_has_used_up(file, autojump_clock: trio.testing.MockClock) -> None:
    path = file(("alice", f'sha256 = "{sha("a")}"\nrate_per_s = 1\nburst = 2'))
    keys = loaded(path)
    key = keys.find(bearer("a"))
    key.charge()
    with key.generating():
        file(("alice", f'sha256 = "{sha("a")}"\nrate_per_s = 1\nburst = 5\nconcurrency_max = 1'))
        keys.load()
        assert keys.find(bearer("a")) is key
        with pytest.raises(ConcurrencyLimited), key.generating():
            pass
    key.charge()  # one was left of the old burst
    with pytest.raises(RateLimited):
        key.charge()


def test_a_key_that_is_gone_or_has_another_secret_is_revoked(file) -> None:
    path = file(*((name, f'sha256 = "{sha(name)}"') for name in "abc"))
    keys = loaded(path)
    a, b, c = (keys.find(bearer(name)) for name in "abc")
    file(("a", f'sha256 = "{sha("a")}"'), ("b", f'sha256 = "{sha("new")}"'))
    keys.load()
    assert [a.revoked, b.revoked, c.revoked] == [False, True, True]
    assert keys.find(bearer("new")) is not b
    for key in (b, c):
        with pytest.raises(Unauthorized, match="is not valid any more"), key.generating():
            pytest.fail("it may not ask")


def test_taking_the_last_key_away_lets_nobody_in(file) -> None:
    keys = loaded(file(("a", f'sha256 = "{sha("a")}"\nadmin = true')))
    file()
    keys.load()
    for admin in (False, True):
        with pytest.raises(Unauthorized):
            keys.find([], admin=admin)
    with pytest.raises(Unauthorized, match="wants a key"), keys.anonymous.generating():
        pytest.fail("it may not ask")


# Limits of a key -------------------------------------------------------------------------------


async def test_a_rate_admits_at_it_and_refuses_above_it_with_when_to_come_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    key = Key("alice", KeySection(sha256="", rate_per_s=0.25, burst=3))
    for _ in range(3):
        key.charge()
    with pytest.raises(RateLimited, match=r"may ask 0\.25 times a second; the next time is in 4 s") as caught:
        key.charge()
    assert (b"retry-after", b"4") in error_headers(caught.value)
    assert caught.value.retryable
    assert RateLimited("x").retry_after_s == 1  # it was this error's own, and not its class's
    await trio.sleep(4)
    key.charge()
    with pytest.raises(RateLimited):
        key.charge()


async def test_a_concurrency_counts_what_runs_and_what_waits_but_not_what_has_ended() -> None:
    key = Key("alice", KeySection(sha256="", concurrency_max=2))
    with key.generating():
        with key.generating():
            with (
                pytest.raises(ConcurrencyLimited, match="has 2 answers running, and asks for 1 more") as caught,
                key.generating(),
            ):
                pass
            assert caught.value.http_status == 429
        with pytest.raises(KeyError), key.generating():
            raise KeyError
        with key.generating():
            assert key.running == 2
    assert key.running == 0


def test_connections_are_counted_for_the_key_that_uses_them(file) -> None:
    path = file(("a", f'sha256 = "{sha("a")}"\nconnections_max = 2'), ("b", f'sha256 = "{sha("b")}"'))
    made = gateway(loaded(path), key_connections_max=1)
    first, second, third = boxes = [object() for _ in range(3)]
    a = made.authorize(first, bearer("a"))
    assert made.authorize(first, bearer("a")) is made.authorize(second, bearer("a")) is a
    assert a.connections == 2
    with pytest.raises(ConcurrencyLimited, match="'a' has 2 connections"):
        made.authorize(third, bearer("a"))
    b = made.authorize(second, bearer("b"))  # somebody else speaks on it now
    assert (a.connections, b.connections) == (1, 1)
    with pytest.raises(ConcurrencyLimited, match="'b' has 1 connections"):
        made.authorize(third, bearer("b"))
    made.authorize(third, bearer("a"))
    for box in boxes:
        made.connections.remove(box)
    assert (a.connections, b.connections) == (0, 0)


def test_nobodys_connections_are_limited_together_and_not_as_a_keys() -> None:
    made = gateway(key_connections_max=1)
    for box in (object(), object()):
        assert made.authorize(box, [(b"host", b"localhost:8000")]) is made.keys.anonymous
        made.connections.remove(box)


# What is told ---------------------------------------------------------------------------------


def test_a_sieve_tells_so_many_a_second_and_how_many_it_left_out() -> None:
    limit = LineRateLimit(2)
    kinds = [("invalid_api_key", "-"), ("too_large", "alice")]
    assert [limit.passes(kinds[0], 7.1) for _ in range(5)] == [True, True, False, False, False]
    assert limit.passes(kinds[1], 7.2)
    assert limit.has_dropped
    assert limit.passes(kinds[0], 8.0)
    assert list(limit.take_dropped()) == [(kinds[0], 3)]
    assert not limit.has_dropped


async def test_a_flood_of_refusals_is_few_lines_and_one_number(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    made = gateway()
    with caplog.at_level(logging.INFO, "espalier.requests"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.runner.access.run)
            for _ in range(1000):
                made.log_refused(Unauthorized("no"), request_id="r", request_line="POST /v1/chat/completions")
            await trio.sleep(3)
            nursery.cancel_scope.cancel()
    *lines, last = log_records(caplog)
    assert len(lines) == 10
    assert (lines[0].status, lines[0].outcome, lines[0].key, lines[0].request_id) == (401, "invalid_api_key", "-", "r")
    assert (last.message, last.count, last.outcome) == ("more were refused", 990, "invalid_api_key")
    assert b'espalier_refusals_total{code="invalid_api_key"} 1000.0' in made.runner.metrics.render({})


async def test_an_error_is_told_once_however_often_it_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    made = gateway()
    error = Forbidden("no")
    with caplog.at_level(logging.INFO, "espalier.requests"):
        made.log_refused(error, request_id="r", request_line="GET /\x1b[2J" + "x" * 500, status=431)
        made.log_refused(error, request_id="r", request_line="again")
    (line,) = log_records(caplog)
    assert line.status == 431
    assert line.request.startswith("GET /\\x1b[2J")
    assert len(line.request) == 128


async def test_probes_are_told_at_debug_and_other_questions_at_info(caplog: pytest.LogCaptureFixture) -> None:
    made = gateway()
    with caplog.at_level(logging.DEBUG, "espalier.requests"):
        made.log_answered("r", "GET /health", 200, None, trio.current_time(), probe=True)
        made.log_answered("r", "HEAD /health", 200, None, trio.current_time(), probe=True)
        made.log_answered("r", "GET /v1/models", 200, Key("alice"), trio.current_time())
    assert [(each.levelname, each.key) for each in log_records(caplog)] == [
        ("DEBUG", "-"),
        ("DEBUG", "-"),
        ("INFO", "alice"),
    ]


async def test_a_request_that_its_key_forbids_is_told_once_and_asks_nobody(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    made = gateway()
    key = Key("alice", KeySection(sha256="", concurrency_max=1), running=1)
    counted = RequestRecord("r", "tiny", "chat", trio.current_time(), key=key, request_line="POST /v1/chat/completions")
    with caplog.at_level(logging.INFO, "espalier.requests"):
        with pytest.raises(ConcurrencyLimited) as caught:
            await made.answer(respond(), None, counted, None, None)
        made.log_refused(caught.value, request_id="r", request_line="POST /v1/chat/completions", key=key)
    (line,) = log_records(caplog)
    assert (line.key, line.status, line.outcome, line.waited_s) == ("alice", 429, "concurrency_limit_exceeded", None)
    assert (made.gate.inside, key.running) == (0, 1)


async def test_a_request_waits_and_runs_with_the_priority_that_its_key_gives_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    made, seen = gateway(), []
    made.gate.requests_max = 1

    class Model:
        @asynccontextmanager
        async def ask(self, request, _) -> AsyncIterator[None]:
            seen.append((request.id, request.priority))
            await trio.lowlevel.checkpoint()
            raise EngineLost("it is none")
            yield

    served = ServedModel(None, Model(), lambda: 10)
    keys = {
        "low": Key("low", KeySection(sha256="", priority=-1)),
        "high": Key("high", KeySection(sha256="", priority=3)),
        "plain": Key("plain", KeySection(sha256="")),
    }

    async def ask(name, priority: int = 0) -> None:
        counted = RequestRecord(name, "tiny", "chat", trio.current_time(), key=keys.get(name))
        with pytest.raises(EngineLost):
            await made.answer(evolve(respond(), id=name, priority=priority), served, counted, None, None)

    async with trio.open_nursery() as nursery, made.gate.admitted():
        for name, priority in (("low", 9), ("plain", 9), ("none", 2), ("high", 9)):
            nursery.start_soon(ask, name, priority)
            await trio.testing.wait_all_tasks_blocked()
    assert seen == [("high", 3), ("none", 2), ("plain", 0), ("low", -1)]


async def test_where_keys_are_wanted_a_request_without_one_is_refused_even_past_the_door(
    autojump_clock: trio.testing.MockClock,
) -> None:
    made = gateway(loaded(**{KEYS: "alice=a"}))
    with pytest.raises(Unauthorized):
        await made.answer(respond(), None, RequestRecord("r", "tiny", "chat", 0.0), None, None)


def respond():
    from protocol.text_messages import Respond

    return Respond("r")


def test_what_a_request_carries_as_its_key_is_bounded() -> None:
    assert presented_secret(bearer("x" * 1024)) == b"x" * 1024
    assert presented_secret(bearer("x" * 1025)) is None


async def test_dropped_clients_and_refusals_are_counted() -> None:
    metrics = Metrics()
    access = AccessLog(metrics)
    metrics.client_dropped("backlog")
    metrics.client_dropped("stalled")
    access.log_refused(Unauthorized("no"), request_id="r", request_line="connection", key="-", status=None)
    text = metrics.render({}).decode()
    for wanted in (
        'espalier_clients_dropped_total{reason="backlog"} 1.0',
        'espalier_clients_dropped_total{reason="stalled"} 1.0',
        'espalier_refusals_total{code="invalid_api_key"} 1.0',
    ):
        assert wanted in text


# The command --------------------------------------------------------------------------------


def hash_key(secret: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "supervisor", "hash-key", *arguments],
        input=secret,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.realtime
def test_the_command_makes_the_lines_that_the_file_wants(file) -> None:
    done = hash_key(f"{SECRET}\n", "alice")
    assert (done.returncode, done.stdout) == (0, f'[key.alice]\nsha256 = "{sha(SECRET)}"\n')
    assert done.stderr == ""
    short = hash_key("abc\n")
    assert "3 characters can be guessed" in short.stderr
    assert "abc" not in short.stderr
    none = hash_key("\n")
    assert (none.returncode, none.stdout) == (1, "")
    assert none.stderr.startswith("espalier: a key is 1 to 1024")


@pytest.mark.parametrize("name", ["alice", "a.b", "a@b.c", "7", "a-b_c", "1-2"])
def test_the_lines_are_toml_whatever_the_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(module.key_file_lines(name, SECRET))
    assert loaded(path).find(bearer()).name == name
    with pytest.raises(StartFailed):
        module.key_file_lines("a\nb", SECRET)
