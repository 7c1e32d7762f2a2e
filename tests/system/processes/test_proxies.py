"""A node behind the proxies of docs/operating.md, with the configurations that stand there, and behind nginx with its defaults.

They need Debian's nginx, haproxy and caddy (`apt-get install nginx-light haproxy caddy`), which are run as child processes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from itertools import pairwise
from pathlib import Path

import pytest
from websockets.sync.client import connect

from bench.rig.node import ROOT, Node, free_port, node, wait_until

pytestmark = [pytest.mark.realtime, pytest.mark.nightly]

NAME = "llm.example.org"
SEED = 1  # of an answer in which each token is a text of its own, and so an event
# A token each 0.1 s; the model `slow` takes 0.5 s for each token of the prompt, and an answer of `stalls` fails by a gap.
ENGINE = """\
kind = "simulated"
kv_tokens_max = 65536
[engine.tiny-0.simulated.costs]
fixed_s = 0.1
[model.slow]
path = "{path}"
[engine.slow-0]
model = "slow"
kind = "simulated"
kv_tokens_max = 65536
simulated.costs.fixed_s = 0.1
simulated.costs.per_prefill_token_s = 0.5
[model.stalls]
path = "{path}"
[engine.stalls-0]
model = "stalls"
kind = "simulated"
kv_tokens_max = 65536
deadlines.gap_s = 1.0
simulated.costs.fixed_s = 0.1
simulated.faults.stall = 0.1
simulated.faults.stall_s = 3
"""
GATEWAY = f'allowed_hosts = ["127.0.0.1", "localhost", "{NAME}"]\nkeepalive_s = 1'
LONG = "The oak is old and the river runs by it. " * 2
NGINX = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log info;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {servers}
}}
"""
DEFAULTS = "server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://127.0.0.1:{upstream}; {more} }} }}"


def program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def documented(language: str, **changes: str) -> str:
    """Return the configuration that docs/operating.md has for a proxy, with some of its texts replaced."""
    page = (ROOT / "docs" / "operating.md").read_text()
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    assert isinstance(text, str)
    return text


def nginx(folder: Path, port: int, upstream: int, *, more: str | None) -> list[str]:
    """Write a configuration of nginx and return its command: its defaults and `more`, or that of the document."""
    if more is not None:
        servers = DEFAULTS.format(port=port, upstream=upstream, more=more)
    else:
        changes = {"10.0.0.11:8000": f"127.0.0.1:{upstream}", "    server 10.0.0.12:8000;\n": ""}
        changes |= {"listen 443 ssl": f"listen 127.0.0.1:{port}"}
        servers = re.sub(r"ssl_\w+ \S+;", "", documented("nginx", **changes))
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, servers=servers))
    return ["nginx", "-p", f"{folder}/", "-c", f"{folder}/nginx.conf"]


def haproxy(folder: Path, port: int, upstream: int) -> list[str]:
    """Write the configuration of the document and return HAProxy's command."""
    changes = {":443 ssl crt /etc/ssl/llm.pem": f"127.0.0.1:{port}", "10.0.0.11:8000": f"127.0.0.1:{upstream}"}
    changes |= {"    server b 10.0.0.12:8000 check inter 2s\n": ""}
    (folder / "haproxy.cfg").write_text(documented("haproxy", **changes))
    return ["haproxy", "-db", "-f", f"{folder}/haproxy.cfg"]


def caddy(folder: Path, port: int, upstream: int) -> list[str]:
    """Write the configuration of the document and return Caddy's command."""
    changes = {NAME: f"http://{NAME}:{port}", "10.0.0.11:8000 10.0.0.12:8000": f"127.0.0.1:{upstream}"}
    text = "{\nadmin off\nauto_https off\n}\n" + documented("caddy", **changes)
    (folder / "Caddyfile").write_text(text)
    return ["caddy", "run", "--config", f"{folder}/Caddyfile", "--adapter", "caddyfile"]


Configure = Callable[[Path, int, int], list[str]]
PLAIN = pytest.param("nginx", partial(nginx, more=""), id="nginx-defaults")
IMPATIENT = pytest.param("nginx", partial(nginx, more="proxy_read_timeout 2s;"), id="nginx-2-s")
DOCUMENTED = [
    pytest.param("nginx", partial(nginx, more=None), id="nginx"),
    pytest.param("haproxy", haproxy, id="haproxy"),
    pytest.param("caddy", caddy, id="caddy"),
]
each_documented = pytest.mark.parametrize(("name", "configure"), DOCUMENTED)
each = pytest.mark.parametrize(("name", "configure"), [PLAIN, *DOCUMENTED])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    engine = ENGINE.format(path=ROOT / "examples" / "tiny")
    with node(tmp_path_factory.mktemp("node"), engine=engine, gateway=GATEWAY) as each_node:
        yield each_node


@contextmanager
def proxy(name: str, configure: Configure, folder: Path, upstream: int) -> Iterator[int]:
    """Run a proxy in front of a port, and yield its own; skips where the proxy is not installed."""
    found, port = program(name), free_port()
    if found is None:
        pytest.skip(f"needs Debian's {name}")
    _, *arguments = configure(folder, port, upstream)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [found, *arguments], stdout=output, stderr=output, env=os.environ | {"HOME": str(folder)}
        )
    try:
        assert wait_until(lambda: status(port, "GET", "/ready") == 200, 20, 0.1) is not None, (
            folder / "output"
        ).read_text()
        yield port
    finally:
        process.terminate()
        process.wait(10)


def status(port: int, method: str, path: str) -> int | None:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path, headers={"host": NAME})
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


@contextmanager
def asking(
    port: int, model: str = "tiny", prompt: str = "The", tokens: int = 24, *, stream: bool = True
) -> Iterator[HTTPConnection]:
    """Send a request for a completion, and yield its connection."""
    fields = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": stream, "ignore_eos": True}
    fields["seed"] = SEED
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(
        "POST", "/v1/completions", json.dumps(fields), {"host": NAME, "content-type": "application/json"}
    )
    try:
        yield connection
    finally:
        connection.close()


def read_events(answer: HTTPResponse) -> list[tuple[float, str]]:
    """Return the events and comments of a stream, each with the time of its coming."""
    with answer:
        return [(time.monotonic(), line.decode().strip()) for line in iter(answer.readline, b"") if line.strip()]


@each
def test_events_arrive_as_they_are_sent(name: str, configure: Configure, running: Node, tmp_path: Path) -> None:
    """26 events, 0.1 s apart: the last two come with the last token."""
    with proxy(name, configure, tmp_path, running.port) as port, asking(port) as connection:
        answer = connection.getresponse()
        assert answer.status == 200
        events = read_events(answer)
        assert len(events) == 26
        assert events[-1][1] == "data: [DONE]"
        times = [came_at for came_at, _ in events[:24]]
        assert times[-1] - times[0] == pytest.approx(2.3, abs=0.5)
        assert sum(later - earlier > 0.03 for earlier, later in pairwise(times)) >= 20


@pytest.mark.parametrize(("name", "configure"), [IMPATIENT])
def test_a_first_token_may_take_longer_than_a_proxy_waits(
    name: str, configure: Configure, running: Node, tmp_path: Path
) -> None:
    with proxy(name, configure, tmp_path, running.port) as port:
        began = time.monotonic()
        with asking(port, model="slow", prompt=LONG, tokens=3) as connection:
            answer = connection.getresponse()
            assert (answer.status, answer.getheader("x-route")) == (200, None)
            assert time.monotonic() - began < 2
            events = read_events(answer)
        first_at = next(came_at for came_at, line in events if line.startswith("data:"))
        assert first_at - began > 5
        assert {line for _, line in events if not line.startswith("data:")} == {": keep-alive"}
        assert events[-1][1] == "data: [DONE]"
        # An answer in one piece cannot be helped.
        with asking(port, model="slow", prompt=f"Not so. {LONG}", tokens=3, stream=False) as connection:
            assert connection.getresponse().status == 504


@each_documented
def test_a_websocket_passes(name: str, configure: Configure, running: Node, tmp_path: Path) -> None:
    with proxy(name, configure, tmp_path, running.port) as port:
        event = {"type": "response.create", "model": "tiny", "input": "The", "max_output_tokens": 3}
        dialed = socket.create_connection(("127.0.0.1", port))
        with dialed, connect(f"ws://{NAME}:{port}/v1/responses", sock=dialed, proxy=None) as session:
            session.send(json.dumps(event))
            types = [json.loads(session.recv(30))["type"]]
            while types[-1] != "response.incomplete":
                types.append(json.loads(session.recv(30))["type"])
            assert types.count("response.output_text.delta") == 3


@each
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(
    name: str, configure: Configure, stream: bool, running: Node, tmp_path: Path
) -> None:
    def runs() -> float:
        return running.metric("espalier_engine_running", engine="main/tiny-0")

    with proxy(name, configure, tmp_path, running.port) as port:
        with asking(port, tokens=600, stream=stream):
            assert wait_until(lambda: runs() == 1, 20, 0.05) is not None
            time.sleep(1)
        assert wait_until(lambda: runs() == 0, 10, 0.05) is not None


@each
def test_a_failed_stream_ends_in_an_error_and_without_its_last_chunk_over_http_1_1(
    name: str, configure: Configure, running: Node, tmp_path: Path
) -> None:
    with (
        proxy(name, configure, tmp_path, running.port) as port,
        asking(port, model="stalls", tokens=400) as connection,
        connection.getresponse() as answer,
    ):
        assert answer.status == 200
        whole = True
        try:
            body = answer.read()
        except IncompleteRead as cut:
            body, whole = cut.partial, False
        assert b'"code":"deadline_exceeded"' in body
        assert b"[DONE]" not in body
        # nginx speaks HTTP/1.0 by default, and Caddy ends the chunks itself.
        assert whole == (configure is PLAIN.values[1] or name == "caddy")


@each
def test_probes_pass(name: str, configure: Configure, running: Node, tmp_path: Path) -> None:
    with proxy(name, configure, tmp_path, running.port) as port:
        for method in ("GET", "HEAD"):
            for path in ("/ready", "/health"):
                assert status(port, method, path) == 200
