"""Keys of clients: where they are read from, how the key of a request is found, and its limits."""

from __future__ import annotations

import hmac
import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from protocol.dialects.http import error_body, error_headers
from protocol.errors import ConcurrencyLimited, Forbidden, RateLimited, StartFailed, Unauthorized
from supervisor import command_line
from supervisor.config.keyfile import KeySection
from supervisor.gateway.admission import AdmissionGate
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.keys import key_sources as module
from supervisor.gateway.keys.key_sources import ADMIN, KEYS, KeySources
from supervisor.gateway.keys.keys import ClientKey, Keys
from supervisor.gateway.limits import GatewayLimits
from supervisor.gateway.listening import GatewayPort
from supervisor.gateway.origins import Origins
from supervisor.gateway.ports import NO_ADMINISTRATION, GatewayRuntime, Probes
from supervisor.gateway.requests import RequestRunner
from supervisor.telemetry.metrics import Metrics
from tests.rig.files import read_inline
from tests.rig.keys import sha
from tests.rig.log_records import log_records

UNUSED: Any = None  # what no request of these tests reaches
SECRET = "sk-quetzalcoatl-0123456789"
Write = Callable[..., Path]


def bearer(secret: str = SECRET) -> list[Any]:
    return [(b"host", b"localhost"), (b"authorization", f"Bearer {secret}".encode())]


@pytest.fixture
def file(tmp_path: Path) -> Write:
    def write(*sections: tuple[str, ...]) -> Path:
        """Write a section for each name, secret and further lines."""
        path = tmp_path / "keys.toml"
        texts = ("\n".join([f"[key.{name}]", f'sha256 = "{sha(secret)}"', *lines]) for name, secret, *lines in sections)
        path.write_text("\n".join(texts))
        return path

    return write


def loaded(path: Path | None = None, /, **environment: str) -> Keys:
    keys = Keys(KeySources(path, environment))
    keys.load()
    return keys


def make_gateway(keys: Keys | None = None, **limits: int) -> Gateway:
    metrics = Metrics()
    return Gateway(
        runner=RequestRunner({}, metrics, 60.0, 600.0),
        gate=AdmissionGate(8, 5.0, 8, lambda: None),
        limits=GatewayLimits(**limits),
        origins=Origins(frozenset({"localhost"})),
        keys=keys or Keys(),
        port=GatewayPort(),
        runtime=GatewayRuntime(new_id=str, now=float),
        probes=Probes(unready=lambda: None, metrics_text=UNUSED),
        administration=NO_ADMINISTRATION,
    )


# Priorities --------------------------------------------------------------------------------


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
def test_a_request_may_have_the_priority_of_its_key_or_a_lower_one(
    asked: int | None, key: int | None, given: int
) -> None:
    assert ClientKey(section=KeySection(sha256="", priority=key)).clamp_priority(asked) == given


def test_a_key_without_a_priority_has_at_most_0_and_without_keys_any_priority_is_allowed(file: Write) -> None:
    keys = loaded(file(("alice", "a")), **{KEYS: "bob=b"})
    for secret in "ab":
        assert [keys.find(bearer(secret)).clamp_priority(asked) for asked in (-2, 0, 9)] == [-2, 0, 0]
    assert loaded().find([]).clamp_priority(9) == 9
    assert loaded(**{ADMIN: "a"}).find([]).clamp_priority(9) == 9  # an admin key alone sets no limit for others


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
def test_a_key_is_found_in_each_header_that_clients_use(headers: list[tuple[bytes, bytes]], file: Write) -> None:
    keys = loaded(file(("alice", SECRET)))
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
def test_a_missing_or_wrong_key_is_refused_without_further_information(headers: Sequence[Any], file: Write) -> None:
    keys = loaded(file(("alice", SECRET)))
    with pytest.raises(Unauthorized) as caught:
        keys.find(headers)
    error = caught.value
    assert (error.http_status, error.close_code, error.retry_after_s) == (401, 1008, None)
    assert (b"www-authenticate", b"Bearer") in error_headers(error)
    assert b"invalid_api_key" in error_body(error)
    assert SECRET not in str(error)
    assert "alice" not in str(error)


def test_a_secret_is_compared_with_every_key(file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(b) or compare(a, b))  # type: ignore[func-returns-value]
    keys = loaded(file(*((f"k{n}", f"s{n}") for n in range(5))))
    for secret in ("s0", "s4"):
        compared.clear()
        assert keys.find(bearer(secret)).name == f"k{secret[1]}"
        assert len(compared) == 5


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


def test_without_an_admin_key_nobody_may_use_admin_routes() -> None:
    keys = loaded(**{KEYS: "alice=alices"})
    with pytest.raises(Forbidden, match=f"there is no admin key; set {ADMIN}"):
        keys.find(bearer("alices"), admin=True)


def test_an_admin_key_alone_closes_admin_routes_only() -> None:
    keys = loaded(**{ADMIN: "the-admins"})
    assert keys.find([]) is keys.anonymous
    with pytest.raises(Unauthorized):
        keys.find([], admin=True)
    assert keys.find(bearer("the-admins"), admin=True).name == "admin"


def test_a_key_of_the_file_can_be_an_admin_key(file: Write) -> None:
    keys = loaded(file(("root", "r", "admin = true"), ("alice", "a")))
    assert keys.find(bearer("r"), admin=True).name == "root"
    assert (keys.names(admin=True), keys.names(admin=False)) == (["root"], ["alice"])


# The environment -----------------------------------------------------------------------------


def test_the_environment_names_keys_and_tolerates_spaces() -> None:
    keys = loaded(**{KEYS: f" alice={SECRET} , bob=b=b==,"})
    assert keys.find(bearer()).name == "alice"
    assert keys.find(bearer("b=b==")).name == "bob"


@pytest.mark.parametrize(
    ("environment", "message"),
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
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(StartFailed) as caught:
        loaded(**environment)
    assert message in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_of_file_and_environment_add_up_and_may_share_no_name_or_secret(file: Write) -> None:
    path = file(("alice", "a"))
    keys = loaded(path, **{KEYS: "bob=b"})
    assert keys.names(admin=False) == ["alice", "bob"]
    with pytest.raises(StartFailed, match=r"alice stands in .* and in the environment"):
        loaded(path, **{KEYS: "alice=b"})
    with pytest.raises(StartFailed, match="is the secret of alice too"):
        loaded(path, **{KEYS: "bob=a"})


# Reload --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"", b"[key", b"\xff", b"[key.a]\nsha256 = 'no'", b"x = 1", b" " * 2_000_000, None])
async def test_a_broken_file_keeps_the_old_keys_and_logs_one_line(
    text: bytes | None, file: Write, caplog: pytest.LogCaptureFixture
) -> None:
    path = file(("alice", "a"))
    gateway = make_gateway(loaded(path))
    key = gateway.keys.find(bearer("a"))
    if text is None:
        path.unlink()
    else:
        path.write_bytes(text)
    with caplog.at_level(logging.INFO):
        await gateway.reload(read_inline)
    assert [(record.levelname, record.message) for record in log_records(caplog)] == [
        ("ERROR", "the keys stay as they were")
    ]
    assert str(path) in log_records(caplog)[0].reason
    assert "\n" not in log_records(caplog)[0].reason
    assert gateway.keys.find(bearer("a")) is key
    assert not key.revoked


async def test_a_key_that_stays_keeps_its_counts_and_its_rate_limit(file: Write, autojump_clock: MockClock) -> None:
    path = file(("alice", "a", "rate_per_s = 1\nburst = 2"))
    keys = loaded(path)
    key = keys.find(bearer("a"))
    key.charge()
    with key.generating():
        file(("alice", "a", "rate_per_s = 1\nburst = 5\nconcurrency_max = 1"))
        keys.load()
        assert keys.find(bearer("a")) is key
        with pytest.raises(ConcurrencyLimited), key.generating():
            pass
    key.charge()  # one was left of the old burst
    with pytest.raises(RateLimited):
        key.charge()


def test_a_key_that_is_gone_or_has_another_secret_is_revoked(file: Write) -> None:
    path = file(*((name, name) for name in "abc"))
    keys = loaded(path)
    a, b, c = (keys.find(bearer(name)) for name in "abc")
    file(("a", "a"), ("b", "new"))
    keys.load()
    assert [a.revoked, b.revoked, c.revoked] == [False, True, True]
    assert keys.find(bearer("new")) is not b
    for key in (b, c):
        with pytest.raises(Unauthorized, match="is not valid any more"), key.generating():
            pytest.fail("it may not ask")


def test_removing_the_last_key_locks_everybody_out(file: Write) -> None:
    keys = loaded(file(("a", "a", "admin = true")))
    keys.replace({})
    for admin in (False, True):
        with pytest.raises(Unauthorized):
            keys.find([], admin=admin)
    with pytest.raises(Unauthorized, match="wants a key"), keys.anonymous.generating():
        pytest.fail("it may not ask")


# Limits of a key -------------------------------------------------------------------------------


async def test_gateways_divide_the_rate_of_a_key_but_not_what_it_may_have_at_once(autojump_clock: MockClock) -> None:
    section = KeySection(sha256=sha(SECRET), rate_per_s=8, burst=6, concurrency_max=8)
    keys = Keys(gateways=4)
    keys.replace({"alice": section})
    key = keys._match(SECRET.encode())  # noqa: SLF001  # `find` asks for no key where no file has any
    assert key is not None
    assert (key.rate_per_s, key.burst_max) == (2, 2)
    key.charge()
    key.charge()
    with pytest.raises(RateLimited, match=r"may ask 2 times a second here, at one of 4 gateways; .* in 0\.5 s"):
        key.charge()
    with key.generating(8):
        pass


def test_connections_are_counted_for_the_key_that_uses_them(file: Write) -> None:
    path = file(("a", "a", "connections_max = 2"), ("b", "b"))
    gateway = make_gateway(loaded(path), key_connections_max=1)
    first, second, third = boxes = list[Any](object() for _ in range(3))
    a = gateway.authorize(first, bearer("a"))
    assert gateway.authorize(first, bearer("a")) is gateway.authorize(second, bearer("a")) is a
    assert a.connections == 2
    with pytest.raises(ConcurrencyLimited, match="'a' has 2 connections"):
        gateway.authorize(third, bearer("a"))
    b = gateway.authorize(second, bearer("b"))  # the same connection with another key
    assert (a.connections, b.connections) == (1, 1)
    with pytest.raises(ConcurrencyLimited, match="'b' has 1 connections"):
        gateway.authorize(third, bearer("b"))
    gateway.authorize(third, bearer("a"))
    for box in boxes:
        gateway.connections.remove(box)
    assert (a.connections, b.connections) == (0, 0)


def test_connections_without_a_key_are_not_limited_as_those_of_a_key() -> None:
    gateway = make_gateway(key_connections_max=1)
    boxes: list[Any] = [object(), object()]
    for box in boxes:
        assert gateway.authorize(box, [(b"host", b"localhost:8000")]) is gateway.keys.anonymous
        gateway.connections.remove(box)


# Requests of a key -----------------------------------------------------------------------------


# The command --------------------------------------------------------------------------------


def test_hash_key_prints_the_lines_of_a_file_of_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hashed(secret: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{secret}\n"))
        return command_line.hash_key("alice"), *capsys.readouterr()

    assert hashed(SECRET) == (0, f'[key.alice]\nsha256 = "{sha(SECRET)}"\n', "")
    _, _, short = hashed("abc")
    assert "3 characters can be guessed" in short
    assert "abc" not in short
    code, printed, none = hashed("")
    assert (code, printed) == (1, "")
    assert none.startswith("espalier: a key is 1 to 1024")


@pytest.mark.parametrize("name", ["alice", "a.b", "a@b.c", "7", "a-b_c", "1-2"])
def test_the_lines_of_a_key_are_toml_for_every_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(module.key_file_lines(name, SECRET))
    assert loaded(path).find(bearer()).name == name
    with pytest.raises(StartFailed):
        module.key_file_lines("a\nb", SECRET)
