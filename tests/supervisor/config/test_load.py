"""What people write in `cluster.toml` is read strictly, and every mistake is named at once with its line."""

from __future__ import annotations

import socket
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

from protocol.errors import StartFailed
from supervisor.config import placement
from supervisor.config.load import Loaded
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import read_cluster
from supervisor.gateway import client_keys
from supervisor.launcher import preflight
from supervisor.node import node, preview
from supervisor.telemetry.logs import Terminal
from tests.rig import certificate

ROOT = Path(__file__).parents[3]
TINY = ROOT / "examples" / "tiny"
GOOD = f"""
[model.tiny]
path = "{TINY}"

[engine.tiny-0]
model = "tiny"
device = "cpu"
kv_tokens_max = 4096
"""


@pytest.fixture
def written(tmp_path: Path):
    def write(text) -> Path:
        (tmp_path / "cluster.toml").write_text(text)
        return tmp_path / "cluster.toml"

    return write


def mistakes(path):
    """What is said of each mistake, by its line."""
    with pytest.raises(StartFailed) as caught:
        read_cluster(path)
    first, *lines = str(caught.value).splitlines()
    assert first == f"{path} has {len(lines)} mistake{'s'[: len(lines) > 1]}:"
    assert all(line.startswith("  line ") for line in lines)
    numbered = [line.removeprefix("  line ").partition(": ") for line in lines]
    return [(int(number), said) for number, _, said in numbered]


def test_the_least_that_is_a_cluster(written) -> None:
    cluster = read_cluster(written(GOOD))
    assert cluster.model_path("tiny") == TINY
    assert list(cluster.engines_on("main")) == ["tiny-0"]
    assert (cluster.gateway.port, cluster.gateway.host, cluster.node["main"].drain_s) == (8000, "127.0.0.1", 30.0)


def test_every_mistake_is_named_at_once_with_its_line(written) -> None:
    said = mistakes(
        written(
            f"""# port = "not here"
[gateway]
port = "8000"
tls = "false"

[gateway.limits]
idle_s = -1
conections_max = 5   # one n too few
head_bytes_max = 1.5

[model."qwen-2.5"]
path = "{TINY}"
queue_max = true

[engine.a]
model = "qwen-2.5"
device = "tpu"
slots = 0
memory_fraction = 2
deadlines.gap_s = "20"

[engine.a.ladder]
terms_s = 1
"""
        )
    )
    assert set(said) == {
        (13, 'model["qwen-2.5"].queue_max: expected an integer, got true'),
        (17, 'engine.a.device: expected "cpu" or "cuda", got "tpu"'),
        (18, "engine.a.slots: must be at least 1 and at most 1000000000, got 0"),
        (15, "engine.a.kv_tokens_max: is missing"),
        (19, "engine.a.memory_fraction: must be above 0 and at most 1, got 2"),
        (20, 'engine.a.deadlines.gap_s: expected a number, got "20"'),
        (23, "engine.a.ladder.terms_s: is not a key here; did you mean term_s?"),
        (3, 'gateway.port: expected an integer, got "8000"'),
        (7, "gateway.limits.idle_s: must be above 0 and at most 1000000, got -1"),
        (9, "gateway.limits.head_bytes_max: expected an integer, got 1.5"),
        (8, "gateway.limits.conections_max: is not a key here; did you mean connections_max?"),
        (4, "gateway.tls: is not a key here"),
    }
    assert len(said) == 12


@pytest.mark.parametrize(
    ("old", "new", "path", "said"),
    [
        ('device = "cpu"', 'device = "cpu"\ntensor_parallel = 2', "engine.tiny-0.tensor_parallel", "one rank"),
        ("kv_tokens_max = 4096", "kv_tokens_max = 47", "engine.tiny-0.kv_tokens_max", "less than three pages of 16"),
        ("kv_tokens_max = 4096", "kv_tokens_max = 4096\ncontext_max = 1", "engine.tiny-0.context_max", "no room"),
        ('model = "tiny"', 'model = "other"', "engine.tiny-0.model", "there is no model other; there is tiny"),
        ('model = "tiny"', 'model = "tiny"\nnode = "b"', "engine.tiny-0.node", "there is no node b; there is main"),
        (str(TINY), "nowhere", "model.tiny.path", "there is no folder"),
        (f'"{TINY}"', f'"{TINY}"\ntemplate = "no.jinja"', "model.tiny.template", "there is no file"),
        ("[model.tiny]", '[gateway]\nhost = "0.0.0.0"\n[model.tiny]', "gateway.allowed_hosts", "is every address"),
        ("[model.tiny]", '[gateway]\nkeys = "none.toml"\n[model.tiny]', "gateway.keys", "there is no file"),
        ("[model.tiny]", '[gateway]\ntls_key = "k.pem"\n[model.tiny]', "gateway.tls_key", "there is no file"),
        (
            "[model.tiny]",
            '[gateway]\ntls_key = "cluster.toml"\n[model.tiny]',
            "gateway.tls_key",
            "means nothing without tls_certificate",
        ),
        (
            "[model.tiny]",
            '[gateway]\ntls_certificate = "cluster.toml"\n[model.tiny]',
            "gateway.tls_certificate",
            "means nothing without tls_key",
        ),
        (
            "[model.tiny]",
            '[gateway]\nallowed_origins = ["*", "https://a.b/path"]\n[model.tiny]',
            "gateway.allowed_origins[1]",
            "without a path",
        ),
        (
            "[model.tiny]",
            "[gateway]\nprompt_tokens_max = 0\n[model.tiny]",
            "gateway.prompt_tokens_max",
            "must be at least 1",
        ),
        ("[model.tiny]", '[gateway]\nnode = "b"\n[model.tiny]', "gateway.node", "there is no node b"),
        (
            "4096",
            "4096\ndeadlines.release_s = -3",
            "engine.tiny-0.deadlines.release_s",
            "must be above 0 and finite, got -3",
        ),
        ("4096", "4096\nladder.kill_s = 0", "engine.tiny-0.ladder.kill_s", "must be above 0"),
        ("tiny-0]", "zygote]", "engine.zygote", "is the name of another part of the tree"),
        ("tiny-0]", "router-tiny]", "engine.router-tiny", "is the name of another part of the tree"),
        ("[model.tiny]", "[cluster]\nretry_min_s = 10\n[model.tiny]", "cluster.retry_min_s", "at most retry_max_s (5)"),
        ("[model.tiny]", "[cluster]\nstalled_s = 2\n[model.tiny]", "cluster.stalled_s", "at least silent_s (3)"),
        ("[model.tiny]", "[cluster]\nheartbeat_s = 1e-6\n[model.tiny]", "cluster.heartbeat_s", "at least 0.01"),
        ("tiny-0]", '"a/b"]', "engine", "must be letters, digits"),
        ("4096", "4096\nprefill_chunk = inf", "engine.tiny-0.prefill_chunk", "expected"),
    ],
)
def test_keys_that_disagree_are_mistakes_too(written, old: str, new: str, path: str, said: str) -> None:
    assert old in GOOD
    for line, each in mistakes(written(GOOD.replace(old, new))):
        if each.startswith(path) and said in each:
            text = GOOD.replace(old, new).splitlines()[line - 1]
            wanted = path.rpartition(".")[2].partition("[")[0]
            assert wanted.rpartition("-")[0] in text or wanted in text or "[gateway]" in text
            return
    pytest.fail(f"{path}: {said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "model: is missing"),
        (GOOD + '[node."B"]\n', "lower-case"),
        (GOOD + "[node.main]\ndrain_s = nan\n", "finite"),
        (GOOD + "[nodes.main]\n", "did you mean node?"),
        ("[model]\n[engine]\n", "must not be empty"),
        (GOOD + '[node.main]\nlisten = "127.0.0.1:65536"\n', "must be like 127.0.0.1:7401"),
        (GOOD + f'[model."a/b"]\npath = "{TINY}"\n[model."a:b"]\npath = "{TINY}"\n', "by nothing but / and :"),
    ],
)
def test_what_cannot_be_meant_is_a_mistake(written, text: str, said: str) -> None:
    assert any(said in each for _, each in mistakes(written(text)))


@pytest.mark.parametrize(
    ("text", "said"), [(b"[model", "is not TOML: Expected"), (b"\xff", "cannot be read"), (None, "cannot be read")]
)
def test_a_file_that_is_none_is_one_sentence(tmp_path: Path, text: bytes | None, said: str) -> None:
    path = tmp_path / "cluster.toml"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(StartFailed, match=said):
        read_cluster(path)


SEVERAL = (
    GOOD
    + """
[gateway]
node = "a"
port = 0
[node.main]
listen = "127.0.0.1:{port}"
[node.a]
[node.far]
host = "192.0.2.7"
listen = "192.0.2.7:7402"
[node.b]
host = "{host}"
listen = "127.0.0.1:7403"
"""
)


def several(written, host: str = "localhost", port=7401) -> Cluster:
    return read_cluster(written(SEVERAL.format(host=host, port=port)))


def test_the_only_node_of_a_file_runs_wherever_it_is_asked_to(written) -> None:
    for text in (GOOD, GOOD + '[node.main]\nhost = "192.0.2.7"\n'):
        cluster = read_cluster(written(text))
        assert placement.select_nodes(cluster, None) == placement.select_nodes(cluster, "main") == ("main",)
    with pytest.raises(StartFailed, match="there is no node other; there is main"):
        placement.select_nodes(cluster, "other")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.10", "::1", socket.gethostname()])
def test_of_several_nodes_those_of_this_host_run(host: str, written) -> None:
    cluster = several(written, host)
    assert placement.select_nodes(cluster, None) == ("main", "a", "b")
    assert placement.select_nodes(cluster, "far") == ("far",)  # who says so knows better


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid", "0.0.0.0", "", "a" * 300])
def test_a_host_that_is_not_this_one(host: str) -> None:
    assert not placement.is_local_host(host)


def test_a_file_that_places_nothing_here_says_where_its_nodes_are(written) -> None:
    text = GOOD + '[node.main]\nhost = "192.0.2.7"\nlisten = "192.0.2.7:1"\n[node.b]\nhost = "192.0.2.8"\n'
    with pytest.raises(
        StartFailed, match=r"no node on this host, .*: main on 192\.0\.2\.7, b on 192\.0\.2\.8; or name"
    ):
        placement.select_nodes(read_cluster(written(text)), None)


# What is known before anything starts --------------------------------------------------------------


def test_a_check_prints_the_tree_and_the_limits() -> None:
    lines = preview.describe_node(read_cluster(ROOT / "examples" / "quickstart.toml"), "main", {}).splitlines()
    names = [line.split("─ ")[1].split()[0] for line in lines if "─ " in line]
    checks = ["grammars-tiny-0", "turns", "process"]
    served = ["router-tiny", "processor-tiny"]
    assert names == ["gateway", "zygote", "process", "tiny-0", "engine", "decode", *checks, *served]
    text = " ".join(line.strip("│├└─ ") for line in lines)
    for wanted in (
        "clients at http://127.0.0.1:8000",
        "tiny on cpu",
        "KV tokens 16,384 · slots 16",
        "requests 256 · prompt tokens 262,144",
        "to a worker of tiny, chosen by least_loaded",
        "queue 64 · prefill tokens min 0 · resumes 3",
        "connections max 1,024",
        "body bytes max 4,194,304",
        "backlog bytes max 1,048,576",
        "lanes max 32",
        "websocket running max 16",
        "key connections max 256",
        "history bytes max 8,388,608",
        "websocket idle s 900",
        "permanent · starts within 120 s",
    ):
        assert wanted in " ".join(text.split()), wanted


def test_the_gpu_example_is_a_cluster() -> None:
    text = preview.describe_node(read_cluster(ROOT / "examples" / "gpu.toml"), "main", {})
    assert "qwen3-32b on cuda" in text
    assert "zygote" not in text
    assert "KV tokens 400,000 · slots 256" in text


def test_the_example_of_prefill_and_decode_apart_is_three_nodes_of_this_host() -> None:
    cluster = read_cluster(ROOT / "examples" / "disagg.toml")
    assert placement.select_nodes(cluster, None) == ("front", "prefill", "decode")
    assert [each.leg for each in cluster.engine.values()] == ["prefill", "decode"]


def test_a_model_without_what_it_needs_is_one_sentence(written, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cluster = read_cluster(written(GOOD.replace(str(TINY), "empty")))
    with pytest.raises(StartFailed, match=r"model tiny in .*/empty: .*no tokenizer.json and no config.json"):
        preview.describe_node(cluster, "main", {})


def test_a_port_in_use_is_one_sentence(written) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cluster = read_cluster(written(f"{GOOD}[gateway]\nport = {port}\n"))
        with pytest.raises(StartFailed, match=rf"port {port} of 127\.0\.0\.1 cannot be had: .* name another"):
            preflight.check_can_start(cluster, "main")


def test_a_port_for_links_that_is_in_use_is_one_sentence(written) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cluster = several(written, port=taken.getsockname()[1])
        with pytest.raises(StartFailed, match=r"port \d+ of 127\.0\.0\.1 cannot be had: .* as node\.main\.listen"):
            preflight.check_can_start(cluster, "a", "main")
        preflight.check_can_start(cluster, "a")


def test_the_engines_of_all_nodes_of_a_host_need_their_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = read_cluster(ROOT / "examples" / "disagg.toml")
    monkeypatch.setattr(preflight, "_check_port", lambda *_: None)
    monkeypatch.setattr(preflight, "_available", lambda: preflight.ENGINE_BYTES * 3 // 2)
    preflight.check_can_start(cluster, "prefill")
    with pytest.raises(StartFailed, match="too little memory: 2 engines on the CPU need"):
        preflight.check_can_start(cluster, "front", "prefill", "decode")


@pytest.mark.parametrize(("available", "enough"), [(1 << 40, True), (1 << 20, False), (None, True)])
def test_too_little_memory_is_one_sentence(
    written, monkeypatch: pytest.MonkeyPatch, available: int | None, enough: bool
) -> None:
    monkeypatch.setattr(preflight, "_available", lambda: available)
    cluster = read_cluster(written(f"{GOOD}[gateway]\nport = 0\n"))
    if enough:
        preflight.check_can_start(cluster, "main")
        return
    with pytest.raises(StartFailed, match=r"too little memory: 1 engines? on the CPU needs? about 0\.7 GiB") as caught:
        preflight.check_can_start(cluster, "main")
    assert "\n" not in str(caught.value)


# Who may come in -----------------------------------------------------------------------------------

DIGEST = "[key.alice]\nsha256 = '" + "a" * 64 + "'\n"


def gateway(written, lines: str, keys: str = DIGEST) -> Cluster:
    path = written(f"{GOOD}[gateway]\n{lines}\n")
    (path.parent / "keys.toml").write_text(keys)
    return read_cluster(path)


def test_loopback_needs_no_keys_and_answers_to_loopbacks_names(written) -> None:
    cluster = gateway(written, "")
    assert not client_keys.client_keys(cluster, {}).wanted
    assert set(cluster.gateway.allowed_hosts) == {"127.0.0.1", "::1", "localhost"}
    assert (cluster.keys, cluster.certificate) == (None, None)


@pytest.mark.parametrize("environment", [{}, {"ESPALIER_ADMIN_KEY": "the-admins"}])
def test_beyond_loopback_a_server_without_keys_for_clients_does_not_start(environment: dict[str, str], written) -> None:
    cluster = gateway(written, 'host = "10.0.0.7"')
    with pytest.raises(StartFailed, match=r"10\.0\.0\.7 is not loopback, so clients need keys: .*ESPALIER_API_KEYS"):
        client_keys.client_keys(cluster, environment)
    with pytest.raises(StartFailed, match="so clients need keys"):
        preview.describe_node(cluster, "main", environment)


@pytest.mark.parametrize(
    ("lines", "environment"),
    [('host = "10.0.0.7"\nkeys = "keys.toml"', {}), ('host = "10.0.0.7"', {"ESPALIER_API_KEYS": "alice=abc"})],
)
def test_beyond_loopback_a_server_with_keys_answers_to_its_address(
    lines: str, environment: dict[str, str], written
) -> None:
    cluster = gateway(written, lines)
    assert client_keys.client_keys(cluster, environment).names(admin=False) == ["alice"]
    assert "10.0.0.7" in cluster.gateway.allowed_hosts


def test_names_that_are_given_are_all_the_names_and_case_means_nothing(written) -> None:
    cluster = gateway(
        written,
        'host = "::"\nkeys = "keys.toml"\nallowed_hosts = ["Llm.Example"]\nallowed_origins = ["https://App.example"]',
    )
    assert cluster.gateway.allowed_hosts == ("llm.example",)
    assert cluster.gateway.allowed_origins == ("https://app.example",)
    assert cluster.model_path("tiny") == TINY


@pytest.mark.parametrize("key", ["allowed_hosts", "allowed_origins"])
def test_everybodys_pages_may_come_only_where_there_are_keys(key: str, written) -> None:
    with pytest.raises(StartFailed, match=f"gateway.{key} = .* without keys"):
        client_keys.client_keys(gateway(written, f'{key} = ["*"]'), {})
    assert client_keys.client_keys(gateway(written, f'{key} = ["*"]\nkeys = "keys.toml"'), {}).wanted


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("", "there is no key, so nobody could use this server"),
        ("[key.a]\n", "key.a.sha256: is missing"),
        ("x", "is not TOML"),
    ],
)
def test_a_file_of_keys_that_is_of_no_use_is_one_sentence(keys: str, said: str, written) -> None:
    with pytest.raises(StartFailed, match=said) as caught:
        client_keys.client_keys(gateway(written, 'keys = "keys.toml"', keys), {})
    assert "\n" not in str(caught.value)


def test_a_check_says_who_may_come_in_and_no_secret(written) -> None:
    environment = {"ESPALIER_API_KEYS": "bob=quetzalcoatl", "ESPALIER_ADMIN_KEY": "xolotl"}
    said = preview.describe_node(
        gateway(written, 'keys = "keys.toml"\nallowed_origins = ["https://a.b"]'), "main", environment
    )
    assert "clients: alice, bob" in said
    assert "admin: admin" in said
    assert "web pages of: https://a.b; plain" in said
    assert "quetzalcoatl" not in said
    assert "xolotl" not in said
    assert "clients: everybody, no keys" in preview.describe_node(gateway(written, ""), "main", {})


async def test_what_a_node_starts_does_not_see_the_secrets(written, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def build(_, __, world, ___):
        seen.update(world.environment)
        raise StartFailed("that is enough")

    monkeypatch.setattr(node, "assemble", build)
    environment = {"ESPALIER_API_KEYS": "bob=quetzalcoatl", "ESPALIER_ADMIN_KEY": "xolotl", "HOME": "/root"}
    with pytest.raises(StartFailed, match="that is enough"):
        await node.run(
            Loaded(gateway(written, ""), Path("cluster.toml"), {}),
            "main",
            Terminal(sys.stderr, live=False),
            environment,
        )
    assert seen == {"HOME": "/root"}


def test_a_certificate_is_read_before_anything_starts(written, tmp_path: Path) -> None:
    made, key = certificate.files()
    lines = f'tls_certificate = "{made}"\ntls_key = "{key}"'
    assert f"TLS with {made}" in preview.describe_node(gateway(written, lines), "main", {})
    with pytest.raises(StartFailed, match="cannot be used"):
        preview.describe_node(
            gateway(written, lines.replace(str(key), "keys.toml").replace(str(made), "keys.toml")), "main", {}
        )


def run(*arguments) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "supervisor", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_command_checks_and_starts_nothing(written) -> None:
    good = run("--check", "examples/quickstart.toml")
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.startswith("main")
    bad = run("--check", written(GOOD + "[gateway]\nport = '8000'\n"))
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.startswith("espalier: ")
    assert "gateway.port: expected an integer" in bad.stderr
    assert "Traceback" not in bad.stderr


@pytest.mark.skipif(find_library("ibverbs") is None, reason="a pair wants Debian's libibverbs1, or is refused")
def test_the_command_checks_every_node_of_a_file_or_the_one_that_is_named() -> None:
    every = run("--check", "examples/disagg.toml")
    assert (every.returncode, every.stderr) == (0, "")
    trees = [text.split(maxsplit=1)[0] for text in every.stdout.split("\n\n")]
    assert trees == ["front", "prefill", "decode"]
    one = run("--check", "--node", "decode", "examples/disagg.toml")
    assert (one.returncode, one.stdout.rstrip()) == (0, every.stdout.split("\n\n")[2].rstrip())


def test_a_node_that_joins_needs_no_word_of_the_rest_of_the_cluster(written) -> None:
    path = written(
        GOOD.replace('model = "tiny"', 'model = "tiny"\nnode = "extra"') + '\n[node.extra]\nlisten = "[::1]:7413"\n'
    )
    assert mistakes(path) == [(1, "gateway.node: there is no node main; there is extra")]
    cluster = read_cluster(path, ["10.0.0.1:7411"])
    assert [str(each) for each in cluster.cluster.join] == ["10.0.0.1:7411"]
    path.write_text(path.read_text() + '[cluster]\njoin = ["b:1"]\n')
    joins = read_cluster(path, ["10.0.0.1:7411"]).cluster.join
    assert [str(each) for each in joins] == ["b:1", "10.0.0.1:7411"]
    with pytest.raises(StartFailed, match=r"cluster\.join\[1\]: must be like"):
        read_cluster(path, ["nowhere"])


@pytest.mark.parametrize(
    ("lines", "said"), [("cluster = 5\n", "cluster: "), ("[cluster]\njoin = 5\n", r"cluster\.join: ")]
)
def test_what_is_no_place_to_join_is_a_mistake_though_another_is_given(lines: str, said: str, written) -> None:
    with pytest.raises(StartFailed, match=said):
        read_cluster(written(lines + GOOD), ["10.0.0.1:7411"])


@pytest.mark.parametrize("origin", ["http://localhost:3000", "https://status.example", "tauri://localhost"])
def test_an_origin_may_be_any_hosts(written, origin: str) -> None:
    cluster = read_cluster(written(GOOD + f'[gateway]\nallowed_origins = ["{origin}"]\n'))
    assert cluster.gateway.allowed_origins == (origin,)


@pytest.mark.parametrize("origin", ["http://a.example/path", "a.example", "http://a b", "http://u@a.example"])
def test_what_is_no_origin_is_a_mistake(written, origin: str) -> None:
    assert mistakes(written(GOOD + f'[gateway]\nallowed_origins = ["{origin}"]\n'))[0][1].startswith(
        "gateway.allowed_origins[0]: must be like"
    )
