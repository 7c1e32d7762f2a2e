"""Each process of a server is in the group that its command line names."""

from __future__ import annotations

import pytest

from bench.cost.groups import APART, groups
from bench.rig.processes import ProcessEntry

PYTHON = "/venv/bin/python"
ZYGOTE = f"{PYTHON} -m actors.engines.sglang.host.zygote 29 10"


def entry(pid: int, command: str, parent: int = 1) -> ProcessEntry:
    return ProcessEntry(pid, parent, pid, "0", "S", command)


@pytest.mark.parametrize(
    ("command", "group"),
    [
        (f"{PYTHON} -m supervisor cluster.toml", "node"),
        ("/venv/bin/python /venv/bin/espalier cluster.toml", "node"),
        (f"{PYTHON} -m supervisor cluster.toml --node front --launched 12", "node front"),
        ("/venv/bin/espalier cluster.toml --node worker-0 --launched 12", "node worker-0"),
        (f"{PYTHON} -m actors.engines.sglang.host --rank 1", "engine host"),
        (ZYGOTE, "zygote"),
        ("espalier::grammars", "grammars"),
        ("sglang::scheduler", APART),
        ("sglang::scheduler_TP0", APART),
        ("sglang::detokenizer", "detokenizer"),
        (f"{PYTHON} -m sglang.launch_server --model-path tiny", "server"),
        (f"{PYTHON} -m dynamo.frontend --http-port 1", "frontend"),
        (f"{PYTHON} -m dynamo.sglang --model-path tiny", "worker"),
        (f"{PYTHON} -m dynamo.mocker --model-path tiny", "mocker"),
        (f"{PYTHON} -m smg launch --port 1", "gateway"),
        (f"{PYTHON} /src/bench/turns/smg_worker.py 1 model tiny", "worker"),
        ("smg::router", "gateway"),
        (f"{PYTHON} -c from multiprocessing.resource_tracker import main;main(6)", "helpers"),
        ("/src/espalier/.venv/bin/python -c from multiprocessing.spawn import main", "helpers"),
        (f"{PYTHON} -m vllm.entrypoints.openai.api_server --port 1", "vllm.entrypoints.openai.api_server"),
        ("/usr/bin/nginx -g daemon", "nginx"),
        ("", "unknown"),
    ],
)
def test_a_command_line_names_its_group(command: str, group: str) -> None:
    assert groups([entry(5, command)]) == {5: group}


def test_what_a_zygote_forked_and_did_not_rename_is_an_engine_host() -> None:
    several = [entry(10, f"{PYTHON} -m supervisor c.toml"), entry(11, ZYGOTE, 10), entry(12, ZYGOTE, 11)]
    several += [entry(13, "espalier::grammars", 11), entry(14, "sglang::scheduler", 12)]
    assert groups(several) == {10: "node", 11: "zygote", 12: "engine host", 13: "grammars", 14: APART}


def test_a_command_that_has_started_nodes_is_a_launcher() -> None:
    several = [entry(10, f"{PYTHON} -m supervisor c.toml")]
    several += [entry(11, f"{PYTHON} -m supervisor c.toml --node front --launched 1", 10)]
    assert groups(several) == {10: "launcher", 11: "node front"}
