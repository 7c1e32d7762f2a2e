"""A file of any content is read or refused with all its mistakes: none raises a traceback, and none hides another."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.text.template_files import TITLE
from protocol.errors import StartFailed
from supervisor import command_line
from supervisor.cluster import link_credentials
from supervisor.config.certificate import Certificate, expires_at
from supervisor.engines.kinds import read_cluster
from supervisor.files import permissions, reading
from supervisor.gateway.keys.key_sources import KeySources, key_file_lines
from supervisor.gateway.keys.keys import Keys
from supervisor.node.reload import file_checks
from tests.rig import certificate
from tests.rig.pools import WHOLES
from tests.rig.templates import ON_BY_DEFAULT
from tests.supervisor.config.test_load import GOOD, ROOT, TINY, Written

SECRET = "alices-secret-of-32-characters-01"


def refused(file: Path, environment: Mapping[str, str] | None = None) -> str:
    """Return the report of the mistakes in a file."""
    with pytest.raises(StartFailed) as caught:
        read_cluster(file, (), partial(file_checks.mistakes, environment=environment or {}))
    return str(caught.value)


def test_no_mistake_hides_another_and_all_are_in_the_order_of_their_lines(written: Written, tmp_path: Path) -> None:
    (tmp_path / "no.jinja").write_text("{% for %}")
    for name in ("a", "b"):
        certificate.make(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
    report = refused(
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
    rows = [row.partition(": ") for row in report.splitlines()[1:]]
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


def test_a_mere_consequence_of_a_mistake_is_not_reported(written: Written) -> None:
    report = refused(written(f"{GOOD}[gateway]\nhost = '0.0.0.0'\nallowed_hosts = ['x']\nkeys = 3\n"))
    assert report.splitlines()[1:] == ["  line 12: gateway.keys: expected a string, got 3"]
    report = refused(written(f"{GOOD}[gateway]\nhost = '0.0.0.0'\nallowed_hosts = ['x']\nkyes = 'keys.toml'\n"))
    assert [row for row in report.splitlines()[1:] if "host" in row] == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('[engine.tiny-0.environment]\n"A=B" = "c"', "is no name of a variable"),
        ('[engine.tiny-0.environment]\nZ = "x\\u0000y"', "has a character that cannot be printed"),
        ("[engine.tiny-0.deadlines]\ngap_s = 700", "can never pass before total_s, 600"),
        ('[gateway]\nhost = "[::1]"', "an address without brackets"),
        ('[gateway]\nallowed_hosts = ["a:8000"]', "allowed_hosts[0]: must be a host without scheme or port"),
        ("[gateway]\nfirst_token_s = 100\ntotal_s = 1", "can never pass before total_s, 1"),
        ("[gateway]\nadmit_s = 1e-320", "which no clock tells from nothing"),
        ('[model."a\\u0007\\u001b[31m"]\npath = "."', "the name has a character"),
        ('[node.main]\nlogs = "/etc/passwd"', "is no folder"),
        ('[node.main]\nlisten = "10.0.0.1:7400"\n[cluster]\njoin = ["10.0.0.1:7400"]', "is where node main of this"),
        (
            '[gateway]\nhost = "::1"\nport = 23400\n[node.main]\nlisten = "localhost:23400"',
            "gateway.port: is where node main listens",
        ),
        (
            '[gateway]\nport = 23400\n[node.main]\nmetrics = "0.0.0.0:23400"',
            "node.main.metrics: is where the gateway is",
        ),
        ('[cluster]\nsecret = "."', "is a folder, not a file"),
    ],
)
def test_a_value_that_would_only_fail_later_is_a_mistake(written: Written, lines: str, message: str) -> None:
    report = refused(written(f"{GOOD}{lines}\n"))
    assert message in report
    assert report.replace("\n", "").isprintable()


def test_an_expired_certificate_is_a_mistake_and_one_that_expires_soon_a_warning(
    written: Written, tmp_path: Path
) -> None:
    certificate.make(tmp_path / "a.pem", tmp_path / "a.key")
    file = written(f'{GOOD}[gateway]\ntls_certificate = "a.pem"\ntls_key = "a.key"\n')
    expires = expires_at((tmp_path / "a.pem").read_text())
    output = subprocess.run(
        ["openssl", "x509", "-in", tmp_path / "a.pem", "-noout", "-enddate", "-dateopt", "iso_8601"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output == f"notAfter={datetime.fromtimestamp(expires, UTC):%Y-%m-%d %H:%M:%SZ}\n"
    cluster = read_cluster(file)
    assert list(file_checks.expired(cluster, expires - 1)) == []
    assert [mistake.path for mistake in file_checks.expired(cluster, expires)] == ["gateway.tls_certificate"]
    soon = [mistake for mistake in file_checks.warnings(cluster, expires - 3 * 86_400) if "expires" in mistake]
    assert soon == [f"the certificate {tmp_path / 'a.pem'} expires in 3 days"]
    assert [mistake for mistake in file_checks.warnings(cluster, expires - 30 * 86_400) if "expires" in mistake] == []


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 3_000 + "]" * 3_000,
        GOOD.replace(str(TINY), "a\\u0000b"),
        GOOD.replace(str(TINY), "~nosuchuser/x"),
        b"\xff\xfe",
        "model = 3\nengine = []\n",
        "a" * 70_000,
    ],
    ids=range(6),
)
def test_a_file_of_any_content_is_refused_without_a_traceback(
    written: Callable[[str | bytes], Path], text: str | bytes
) -> None:
    assert refused(written(text))


def test_a_folder_a_device_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/zero"), tmp_path / "none"):
        assert "cannot be read" in refused(path)


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(written: Written) -> None:
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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PIECES, max_size=12))
def test_a_file_of_any_lines_is_read_or_refused_in_printable_text(tmp_path: Path, pieces: list[Any]) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("\n".join(pieces))
    try:
        read_cluster(file, (), partial(file_checks.mistakes, environment={}))
    except StartFailed as error:
        assert str(error).replace("\n", "").isprintable()  # noqa: PT017


# Secrets ---------------------------------------------------------------------------------


def test_a_file_of_keys_that_others_may_write_is_refused_at_a_reload_too(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(key_file_lines("alice", SECRET))
    file.chmod(0o600)
    keys = Keys(KeySources(file))
    keys.load()
    file.chmod(0o602)
    with pytest.raises(StartFailed, match=f"every user of this host may write {file}: chmod o-w {file}"):
        keys.load()
    assert keys.names(admin=False) == ["alice"]


def test_a_file_that_others_may_replace_in_its_folder_cannot_be_trusted(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "secret"
    file.write_text("x")
    file.chmod(0o600)
    assert permissions.writable_by_others(file) is None
    (tmp_path / "a").chmod(0o777)
    assert (
        permissions.writable_by_others(file) == f"every user of this host may replace {file}: chmod o-w {file.parent}"
    )
    (tmp_path / "a").chmod(0o1777)  # as /tmp: users may remove their own files only
    assert permissions.writable_by_others(file) is None


def test_a_secret_that_others_may_read_is_a_warning_and_one_that_they_may_write_a_mistake(
    written: Written, tmp_path: Path
) -> None:
    file = written(f'{GOOD}[cluster]\nsecret = "secret"\n[gateway]\nkeys = "keys.toml"\n')
    for name, text in (("secret", "a-secret-that-nobody-guesses"), ("keys.toml", key_file_lines("alice", SECRET))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o644)
    assert list(file_checks.warnings(read_cluster(file), 0.0)) == [
        f"every user of this host may read {tmp_path / name}: chmod o-r {tmp_path / name}"
        for name in ("secret", "keys.toml")
    ]
    text = command_line.check_report(file, (), None)
    assert f"warning: every user of this host may read {tmp_path / 'secret'}" in text
    (tmp_path / "secret").chmod(0o666)
    (tmp_path / "keys.toml").chmod(0o666)
    rows = refused(file).splitlines()[1:]
    assert [row.partition(": ")[2].partition(":")[0] for row in rows] == ["cluster.secret", "gateway.keys"]


def test_a_target_of_a_key_that_no_model_reads_is_a_warning(written: Written, tmp_path: Path) -> None:
    targets = "\nttft_target_ms = 200\nitl_target_ms = 20\n"
    (tmp_path / "keys.toml").write_text(key_file_lines("alice", SECRET) + targets)
    (tmp_path / "keys.toml").chmod(0o600)
    keys = '[gateway]\nkeys = "keys.toml"\n'

    def warned(file: str) -> list[str]:
        return [sentence.partition(" ")[0] for sentence in file_checks.warnings(read_cluster(written(file)), 0.0)]

    assert warned(GOOD + keys) == ["ttft_target_ms", "itl_target_ms"]
    assert warned(WHOLES + keys) == ["itl_target_ms"]


NO_MODEL = "has no tokenizer.json and no config.json: it is no folder of a model"
NO_WEIGHTS = "(*.safetensors, *.bin, *.pt): copy or download the whole folder of the model"


def test_every_folder_without_a_model_is_a_mistake(written: Written, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    other = GOOD.replace(str(TINY), str(tmp_path / "two")).replace("tiny", "other")
    file = written(GOOD.replace(str(TINY), str(tmp_path / "one")) + other)
    with pytest.raises(StartFailed) as caught:
        command_line.check_report(file, (), None)
    assert str(caught.value).splitlines() == [
        f"{file} has 4 mistakes:",
        f"  line 3: model.tiny.path: {tmp_path / 'one'} {NO_MODEL}",
        f"  line 3: model.tiny.path: there are no weights in {tmp_path / 'one'} {NO_WEIGHTS}",
        f"  line 11: model.other.path: {tmp_path / 'two'} {NO_MODEL}",
        f"  line 11: model.other.path: there are no weights in {tmp_path / 'two'} {NO_WEIGHTS}",
    ]


REMOTE = '[node.main]\nhost = "192.0.2.1"\nlisten = "192.0.2.1:7401"\n[node.front]\n[gateway]\nnode = "front"\n'


@pytest.mark.parametrize(
    ("change", "reports"),
    [
        (lambda text: text, True),
        (lambda text: text.replace("[engine", "[node.main]\n[engine"), True),
        (lambda text: f"{text}settings.load_format = 'dummy'\n", False),
        (lambda text: text.replace('device = "cpu"', 'kind = "simulated"'), False),
        (lambda text: f'{text}node = "main"\n{REMOTE}', False),
    ],
    ids=["the only node", "a node here", "dummy weights", "a simulated engine", "an engine elsewhere"],
)
def test_weights_are_looked_for_where_an_engine_of_this_host_reads_them(
    written: Written, tmp_path: Path, change: Callable[[str], str], reports: bool
) -> None:
    folder = Path(shutil.copytree(TINY, tmp_path / "copy"))
    (folder / "model.safetensors").unlink()
    file = written(change(GOOD.replace(str(TINY), str(folder))))
    environment = {"ESPALIER_CLUSTER_SECRET": "a-secret-that-nobody-guesses"}
    if reports:
        assert "model.tiny.path: there are no weights in" in refused(file, environment)
    else:
        cluster = read_cluster(file, (), partial(file_checks.mistakes, environment=environment))
        named = [
            mistake.path for mistake in file_checks.mistakes(cluster, environment, "main")
        ]  # as `--node` or a reload
        assert named == (["model.tiny.path"] if "front" in cluster.node else [])


NAMED = '{"chat_template": [{"name": "rag", "template": "{{ messages[0].content }}"}]}'

WITH_TOOLS = """{"chat_template": [
    {"name": "default", "template": "{{ messages[0].content }}"}, {"name": "rag", "template": "{{ messages }}"},
    {"name": "tool_use", "template": "{% for tool in tools %}{{ tool }}{% endfor %}{{ messages[0].content }}"}
]}"""


@pytest.mark.parametrize(
    ("content", "keys", "mistake"),
    [
        (
            "{{ raise_exception('no user turn') }}",
            'template = "FILE"',
            "template: .* plain conversation .no user turn.; it may",
        ),
        (
            WITH_TOOLS,
            'template = "FILE"\ntemplate_name = "tool_use"',
            (
                "template: .* renders no plain conversation .'NoneType' object is not iterable.; it may need tools:"
                " name another one by `template_name` .'default', 'rag'., or none"
            ),
        ),
        (
            WITH_TOOLS.replace("endfor", "endif"),
            'template = "FILE"',
            "template: the model's chat template 'tool_use' cannot be read: ",
        ),
        (
            WITH_TOOLS.replace("{% endfor %}{{ messages[0].content }}", "{% endfor %}"),
            'template = "FILE"',
            (
                "template: .* not in what the model's chat template 'tool_use' renders:"
                " name another one by `template_name` .'default', 'rag'.$"
            ),
        ),
        ("{% if %}", 'template = "FILE"', "template: the model's chat template cannot be read: "),
        ("Read me.", 'template = "FILE"', "template: .* this is no chat template: "),
        ("Read me.", 'template.file = "FILE"', r"template\.file: .* this is no chat template: "),
        ('{"sep_style": "CHATML"}', 'template = "FILE"', "template: the file is JSON without `chat_template`"),
        (NAMED, 'template = "FILE"', "template_name: .* choose one by name: 'rag' in the file"),
        (NAMED, 'template = "FILE"\ntemplate_name = "x"', "template_name: .* no chat template is named 'x'"),
        (NAMED, 'template = {file = "FILE", name = "x"}', r"template\.name: .* no chat template is named 'x'"),
        (
            NAMED,
            'template = {file = "FILE", name = "rag"}\ntemplate_name = "rag"',
            "template_name: cannot stand beside",
        ),
        ("", 'template_name = "x"', "template_name: .* no chat template is named 'x'; there are 'default' in chat_"),
    ],
)
def test_a_template_that_cannot_be_used_is_a_mistake_at_its_own_key(
    content: str, keys: str, mistake: str, written: Written, tmp_path: Path
) -> None:
    (tmp_path / "FILE").write_text(content)
    file = written(GOOD.replace("[engine", f"{keys}\n\n[engine", 1))
    with pytest.raises(StartFailed, match=rf"line \d: model\.tiny\.{mistake}"):
        command_line.check_report(file, (), None)


def test_variables_that_the_template_does_not_read_are_mistakes_at_their_own_lines(written: Written) -> None:
    section = "[model.tiny.template]\nenable_thinking = false\ntools = []\n\n"
    file = written(GOOD.replace("[engine", f"{section}[engine", 1))
    assert refused(file).splitlines()[1:] == [
        "  line 6: model.tiny.template.enable_thinking: the model's chat template reads no such variable; it reads none",
        "  line 7: model.tiny.template.tools: is set by the conversation, the model or this server alone",
    ]


def test_a_switch_of_a_wrong_type_is_a_mistake_at_its_line(written: Written, tmp_path: Path) -> None:
    (tmp_path / "FILE").write_text(ON_BY_DEFAULT)
    section = '[model.tiny.template]\nfile = "FILE"\nenable_thinking = "false"\n\n'
    assert refused(written(GOOD.replace("[engine", f"{section}[engine", 1))).splitlines()[1:] == [
        '  line 7: model.tiny.template.enable_thinking: takes true or false alone, got "false"',
    ]


def test_a_variable_of_either_template_is_taken_and_one_of_none_is_a_mistake(written: Written, tmp_path: Path) -> None:
    templates = {"default": ON_BY_DEFAULT, "tool_use": "{{ style }}" + ON_BY_DEFAULT}
    (tmp_path / "FILE").write_text(json.dumps({"chat_template": templates}))
    section = '[model.tiny.template]\nfile = "FILE"\nstyle = "x"\nenable_thinking = "false"\nother = 1\n\n'
    assert refused(written(GOOD.replace("[engine", f"{section}[engine", 1))).splitlines()[1:] == [
        '  line 8: model.tiny.template.enable_thinking: takes true or false alone, got "false"',
        f"  line 9: model.tiny.template.other: {TITLE} 'default' reads no such variable; it reads enable_thinking",
    ]


def test_a_variable_of_the_template_is_json(written: Written) -> None:
    section = "[model.tiny.template]\nsince = [1, {day = 2024-01-01}]\nfile = 5\n\n"
    rows = refused(written(GOOD.replace("[engine", f"{section}[engine", 1))).splitlines()[1:]
    wanted = "expected a string, a number, true or false, a list or an object, got a date"
    assert rows == [
        f"  line 6: model.tiny.template.since[1].day: {wanted}",
        "  line 7: model.tiny.template.file: expected a string, got 5",
    ]


def test_one_of_several_templates_is_chosen_by_name(written: Written, tmp_path: Path) -> None:
    (tmp_path / "FILE").write_text(NAMED)
    file = written(GOOD.replace("[engine", 'template = "FILE"\ntemplate_name = "rag"\n\n[engine', 1))
    assert command_line.check_report(file, (), None)


# Commands --------------------------------------------------------------------------------


def run_shell(written: Written, folder: Path, pipeline: str) -> subprocess.CompletedProcess[str]:
    """Run a command for a node that does not run, by a shell pipeline in which SUPERVISOR stands for the program."""
    file = written(f'{GOOD}[node.main]\nlisten = "127.0.0.1:1"\n')  # where nothing listens
    pipeline = pipeline.replace("SUPERVISOR", f"{sys.executable} -m supervisor {file}")
    command, environment = ["bash", "-c", f"set -o pipefail; {pipeline}"], os.environ | {"TMPDIR": str(folder)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.realtime
@pytest.mark.parametrize(("option", "beginning"), [("--json", '{"cluster"'), ("", "")])
def test_a_closed_output_ends_status_without_a_traceback(
    written: Written, tmp_path: Path, option: str, beginning: str
) -> None:
    done = run_shell(written, tmp_path, f"SUPERVISOR status --watch {option} | head -n 2")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (141, "", 2)
    assert done.stdout.startswith(beginning)


HASH_KEY = f"echo {SECRET} | {sys.executable} -m supervisor hash-key"


@pytest.mark.parametrize("command", ["SUPERVISOR --check", "SUPERVISOR status", "SUPERVISOR status --json", HASH_KEY])
def test_output_that_cannot_be_written_ends_a_command_with_a_sentence(
    command: str, written: Written, tmp_path: Path
) -> None:
    done = run_shell(written, tmp_path, f"{command} > /dev/full")
    assert done.stderr == "espalier: the answer cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.fixture
def alarmed() -> Iterator[None]:
    """End a test that blocks in opening a pipe."""

    def ring(*_: object) -> NoReturn:
        raise AssertionError("it waits for the writer of a pipe")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_pipe_in_place_of_a_file_is_refused_without_waiting_for_its_writer(
    written: Written, tmp_path: Path, alarmed: None
) -> None:
    certificate.make(tmp_path / "a.pem", tmp_path / "a.key")
    file, pipe = written(GOOD), tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    cluster, at = read_cluster(file), str(pipe)
    secret = evolve(cluster, cluster=evolve(cluster.cluster, secret=at))
    tls = evolve(cluster, cluster=evolve(cluster.cluster, tls_certificate=at, tls_key=at, tls_authority=at))
    for read in (
        partial(read_cluster, pipe),
        Keys(KeySources(pipe)).load,
        Certificate(pipe, tmp_path / "a.key").context,
        Certificate(tmp_path / "a.pem", pipe).context,
        partial(link_credentials.cluster_secret, secret, {}),
        partial(link_credentials.link_tls, tls),
    ):
        with pytest.raises(StartFailed, match="is a pipe or a device, not a file"):
            read()


def test_a_file_is_read_up_to_a_limit_of_bytes(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert reading.read(file, 5) == b"12345"
    with pytest.raises(OSError, match="longer than 4 bytes"):
        reading.read(file, 4)
