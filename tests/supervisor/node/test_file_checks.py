"""A file of any shape is read or refused with all its mistakes: nothing in it is a traceback, and nothing hides another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.errors import StartFailed
from supervisor import __main__
from supervisor.cluster import link_credentials
from supervisor.config.certificate import Certificate, expires_at
from supervisor.engines.kinds import read_cluster
from supervisor.files import permissions, reading
from supervisor.gateway.keys import Keys, KeySources, key_file_lines
from supervisor.node import file_checks
from tests.rig import certificate
from tests.supervisor.config.test_load import GOOD, ROOT, TINY

SECRET = "alices-secret-of-32-characters-01"


def refused(file, environment=None) -> str:
    with pytest.raises(StartFailed) as caught:
        read_cluster(file, (), partial(file_checks.mistakes, environment=environment or {}))
    return str(caught.value)


def test_o6_no_mistake_hides_another_and_each_has_its_line_in_order(written, tmp_path: Path) -> None:
    (tmp_path / "no.jinja").write_text("{% for %}")
    for name in ("a", "b"):
        certificate.make(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
    said = refused(
        written(
            f"""[node.main]
listen = "0.0.0.0:7400"
metrics = "0.0.0.0:7402"
[cluster]
'secret' = "short"
[gateway]
bogus = 1
host = "0.0.0.0"
allowed_hosts = ["x"]
port = "8000"
tls_certificate = "a.pem"
tls_key = "b.key"
[model.tiny]
path = "/nope"
template = "no.jinja"
[engine.tiny-0]
model = "tiny"
device = "cpu"
[engine.tiny-1]
model = "tiny"
kind = "simulated"
kv_tokens_max = 8
[model.other]
path = "{TINY}"
"""
        )
    )
    rows = [row.partition(": ") for row in said.splitlines()[1:]]
    assert [(head.strip(), rest.partition(":")[0]) for head, _, rest in rows] == [
        ("line 3", "node.main.metrics"),
        ("line 5", "cluster.secret"),
        ("line 7", "gateway.bogus"),
        ("line 8", "gateway.host"),
        ("line 10", "gateway.port"),
        ("line 11", "gateway.tls_certificate"),
        ("line 14", "model.tiny.path"),
        ("line 15", "model.tiny.template"),
        ("line 16", "engine.tiny-0.kv_tokens_max"),
        ("line 22", "engine.tiny-1.kv_tokens_max"),
        ("line 23", "model.other"),
    ]


def test_what_follows_from_a_mistake_alone_is_not_told(written) -> None:
    said = refused(written(f"{GOOD}[gateway]\nhost = '0.0.0.0'\nallowed_hosts = ['x']\nkeys = 3\n"))
    assert said.splitlines()[1:] == ["  line 12: gateway.keys: expected a string, got 3"]
    said = refused(written(f"{GOOD}[gateway]\nhost = '0.0.0.0'\nallowed_hosts = ['x']\nkyes = 'keys.toml'\n"))
    assert [row for row in said.splitlines()[1:] if "host" in row] == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("4096", '4096\n[engine.tiny-0.environment]\n"A=B" = "c"', "is no name of a variable"),
        ("4096", '4096\n[engine.tiny-0.environment]\n"" = "c"', "is no name of a variable"),
        ("4096", '4096\n[engine.tiny-0.environment]\nZ = "x\\u0000y"', "has a character that cannot be printed"),
        ("[model", '[gateway]\nhost = "[::1]"\n[model', "an address without brackets"),
        ("[model", '[gateway]\nhost = ""\n[model', "an empty host is every address"),
        (
            "[model",
            '[gateway]\nallowed_hosts = ["a:8000"]\n[model',
            "allowed_hosts[0]: must be a host without scheme or port",
        ),
        (
            "[model",
            '[gateway]\nallowed_hosts = ["a", ""]\n[model',
            "allowed_hosts[1]: must be a host without scheme or port",
        ),
        ("[model", '[gateway]\nallowed_hosts = ["https://b"]\n[model', "must be a host without scheme or port"),
        ("[model", '[gateway]\nallowed_hosts = ["a b"]\n[model', "must be a host without scheme or port"),
        ("[model", '[model."a\\u0007\\u001b[31m"]\npath = "."\n[model', "the name has a character"),
        ("[model", '[node.main]\nlogs = "/etc/passwd"\n[model', "is no folder"),
        ("[model", "[gateway]\nfirst_token_s = 100\ntotal_s = 1\n[model", "can never pass before total_s, 1"),
        ("4096", "4096\ndeadlines.gap_s = 700", "can never pass before total_s, 600"),
        ("[model", "[gateway]\nadmit_s = 1e-320\n[model", "which no clock tells from nothing"),
        (
            "[model",
            '[node.main]\nlisten = "10.0.0.1:7400"\n[cluster]\njoin = ["10.0.0.1:7400"]\n[model',
            "is where node main of this file listens",
        ),
        (
            "[model",
            '[gateway]\nhost = "::1"\nport = 23400\n[node.main]\nlisten = "localhost:23400"\n[model',
            "gateway.port: is where node main listens",
        ),
        (
            "[model",
            '[gateway]\nport = 23400\n[node.main]\nmetrics = "0.0.0.0:23400"\n[model',
            "node.main.metrics: is where the gateway is",
        ),
        (str(TINY), "~nosuchuser/x", "is no folder"),
        ("[model", '[cluster]\nsecret = "."\n[model', "is a folder, not a file"),
        ("[model", '[cluster]\nsecret = "/dev/null"\n[model', "is a device, not a file"),
    ],
)
def test_o7_what_could_only_fail_later_is_a_mistake(written, old: str, new: str, said: str) -> None:
    told = refused(written(GOOD.replace(old, new, 1)))
    assert said in told
    assert told.replace("\n", "").isprintable()


def test_o7_an_address_of_the_other_kind_collides_with_nobody(written) -> None:
    read_cluster(written(f'{GOOD}[gateway]\nhost = "::1"\nport = 23400\n[node.main]\nlisten = "127.0.0.1:23400"\n'))


def test_o7_a_certificate_that_has_ended_is_a_mistake_and_one_that_ends_soon_a_warning(
    written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate.make(tmp_path / "a.pem", tmp_path / "a.key")
    file = written(f'{GOOD}[gateway]\ntls_certificate = "a.pem"\ntls_key = "a.key"\n')
    ends_at = expires_at((tmp_path / "a.pem").read_text())
    told = subprocess.run(
        ["openssl", "x509", "-in", tmp_path / "a.pem", "-noout", "-enddate", "-dateopt", "iso_8601"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert told == f"notAfter={_iso(ends_at)}\n"
    cluster = read_cluster(file)
    assert list(file_checks.expired(cluster, ends_at - 1)) == []
    assert [each.path for each in file_checks.expired(cluster, ends_at)] == ["gateway.tls_certificate"]
    soon = [each for each in file_checks.warnings(cluster, ends_at - 3 * 86_400) if "expires" in each]
    assert soon == [f"the certificate {tmp_path / 'a.pem'} expires in 3 days"]
    assert [each for each in file_checks.warnings(cluster, ends_at - 30 * 86_400) if "expires" in each] == []


def _iso(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 3_000 + "]" * 3_000,
        GOOD.replace(str(TINY), "a\\u0000b"),
        GOOD.replace(str(TINY), "~nosuchuser/x"),
        b"\xff\xfe",
        b"\0",
        "[model]\n",
        "model = 3\nengine = []\n",
        "[[engine]]\n[[model]]\n",
        "a" * 70_000,
    ],
    ids=range(9),
)
def test_o8_no_file_is_a_traceback(written, text: str | bytes) -> None:
    assert refused(written(text))


def test_o8_a_folder_or_a_device_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, "/dev/zero", tmp_path / "none"):
        assert "cannot be read" in refused(type(tmp_path)(path))


def test_o18_a_byte_order_mark_and_windows_lines_are_read(written) -> None:
    assert read_cluster(written("\ufeff" + GOOD.replace("\n", "\r\n"))).model_path("tiny") == TINY


PIECES = st.sampled_from(
    [
        "[model.tiny]", "[engine.a]", "[node.main]", "[gateway]", "[cluster]", "[gateway.limits]", "[engine.a.settings]",
        f'path = "{TINY}"', 'model = "tiny"', 'kind = "simulated"', 'device = "cpu"', "kv_tokens_max = 4096", "slots = -1",
        'listen = "127.0.0.1:1"', "listen = 3", 'host = "::"', 'allowed_hosts = ["*"]', "allowed_hosts = [1]", 'keys = "x"', "drain_s = nan",
        'ranks_on = ["main"]', 'leg = "prefill"', "port = 70000", 'template = "\\u001b"', "deadlines = 1", "ladder = {}",
        'join = ["a:1"]', 'secret = "/"', "silent_s = 1e-300", "tls_key = ''", '[model."\\u0000"]', "[[engine.a]]", "x.y.z = 1",
    ]
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.lists(PIECES, max_size=12))
def test_o8_nearly_right_files_are_read_or_refused(tmp_path: Path, pieces) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("\n".join(pieces))
    try:
        read_cluster(file, (), partial(file_checks.mistakes, environment={}))
    except StartFailed as error:
        assert str(error).replace("\n", "").isprintable()  # noqa: PT017


# Secrets ---------------------------------------------------------------------------------


def test_o5_a_file_of_keys_that_others_may_write_is_refused_also_when_it_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(key_file_lines("alice", SECRET))
    file.chmod(0o600)
    keys = Keys(KeySources(file))
    keys.load()
    file.chmod(0o602)
    with pytest.raises(StartFailed, match=f"every user of this host may write {file}: chmod o-w {file}"):
        keys.load()
    assert keys.names(admin=False) == ["alice"]


def test_o5_a_file_in_a_folder_that_others_may_write_can_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "secret"
    file.write_text("x")
    file.chmod(0o600)
    assert permissions.writable_by_others(file) is None
    (tmp_path / "a").chmod(0o777)
    assert (
        permissions.writable_by_others(file) == f"every user of this host may replace {file}: chmod o-w {file.parent}"
    )
    (tmp_path / "a").chmod(0o1777)  # as /tmp: each may remove what is theirs alone
    assert permissions.writable_by_others(file) is None


def test_o5_a_secret_that_others_may_read_is_a_warning_and_one_that_they_may_write_a_mistake(
    written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(f'{GOOD}[cluster]\nsecret = "secret"\n[gateway]\nkeys = "keys.toml"\n')
    for name, text in (("secret", "a-secret-that-nobody-guesses"), ("keys.toml", key_file_lines("alice", SECRET))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o644)
    assert list(file_checks.warnings(read_cluster(file), 0.0)) == [
        f"every user of this host may read {tmp_path / name}: chmod o-r {tmp_path / name}"
        for name in ("secret", "keys.toml")
    ]
    text = __main__.check_report(file, (), None)
    assert f"warning: every user of this host may read {tmp_path / 'secret'}" in text
    (tmp_path / "secret").chmod(0o666)
    (tmp_path / "keys.toml").chmod(0o666)
    said = refused(file)
    assert [row.partition(": ")[2].partition(":")[0] for row in said.splitlines()[1:]] == [
        "cluster.secret",
        "gateway.keys",
    ]


# Commands --------------------------------------------------------------------------------


@pytest.mark.realtime
def test_o9_a_reader_of_status_that_has_had_enough_ends_it_without_a_traceback(written, tmp_path: Path) -> None:
    text = f'{GOOD}[node.main]\nlisten = "127.0.0.1:1"\n'  # where nobody listens
    for arguments, head in (("--json", '{"cluster"'), ("", "")):
        shell = f"{sys.executable} -m supervisor {written(text)} status --watch {arguments} | head -n 2"
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {shell}"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        )  # fmt: skip
        assert done.stderr == ""
        assert done.stdout.count("\n") == 2
        assert done.stdout.startswith(head)
        assert done.returncode == 141


@pytest.mark.parametrize("arguments", ["--check", "status", "status --json"])
def test_what_cannot_be_written_ends_a_command_with_a_sentence(arguments: str, written, tmp_path: Path) -> None:
    text = f'{GOOD}[node.main]\nlisten = "127.0.0.1:1"\n'  # where nobody listens
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m supervisor {written(text)} {arguments} > /dev/full"],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=False, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stderr == "espalier: the answer cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.fixture
def alarmed() -> Iterator[None]:
    """End what waits for a writer that never comes: a pipe that is opened is waited for without a word of Python's."""

    def ring(*_: int):
        raise AssertionError("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_pipe_in_the_place_of_a_file_is_refused_and_never_waited_for(written, tmp_path: Path, alarmed: None) -> None:
    certificate.make(tmp_path / "a.pem", tmp_path / "a.key")
    file, pipe = written(GOOD), tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(StartFailed, match="is a pipe or a device, not a file"):
        read_cluster(pipe)
    keys = Keys(KeySources(pipe))
    with pytest.raises(StartFailed, match="is a pipe or a device, not a file"):
        keys.load()
    for pair in (Certificate(pipe, tmp_path / "a.key"), Certificate(tmp_path / "a.pem", pipe)):
        with pytest.raises(StartFailed, match="is a pipe or a device, not a file"):
            pair.context()
    linked = evolve(read_cluster(file).cluster, secret=str(pipe))
    cluster = evolve(read_cluster(file), cluster=linked)
    with pytest.raises(StartFailed, match="is a pipe or a device, not a file"):
        link_credentials.cluster_secret(cluster, {})
    linked = evolve(linked, secret=None, tls_certificate=str(pipe), tls_key=str(pipe), tls_authority=str(pipe))
    with pytest.raises(StartFailed, match="is a pipe or a device, not a file"):
        link_credentials.link_tls(evolve(cluster, cluster=linked))


@pytest.mark.parametrize(("bytes_max", "held"), [(5, True), (4, False)])
def test_a_file_is_read_up_to_a_size(tmp_path: Path, bytes_max: int, held: bool) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    if held:
        assert reading.read(file, bytes_max) == b"12345"
    else:
        with pytest.raises(OSError, match="longer than 4 bytes"):
            reading.read(file, bytes_max)


def test_what_a_process_has_imported_is_no_collection_s_work(tmp_path: Path) -> None:
    script = """
import gc, sys
from supervisor import __main__ as main
async def run():
    print(gc.get_freeze_count() > len(gc.get_objects()))
    return 0
main._run_function = lambda *_: run
sys.argv[1:] = [sys.argv[1], "--node", "main"]
sys.exit(main.main())
"""
    file = tmp_path / "cluster.toml"
    file.write_text(GOOD)
    command = [sys.executable, "-c", script, file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "True" in done.stdout) == (0, True), done.stdout + done.stderr
