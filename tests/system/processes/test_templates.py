"""Models with a template for tools on a node with simulated engines, from the folders of both shapes to each door."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from bench.rig.node import ROOT, SIMULATED, Node, node, short_folder
from tests.rig import templates

pytestmark = pytest.mark.realtime

NAMES = ("listed", "beside")
MODELS = """
[model.{name}]
path = "{name}"
[engine.{name}-0]
model = "{name}"
kind = "simulated"
context_max = 8192
kv_tokens_max = 8_000_000
"""
FUNCTION = {"name": "find", "description": "Finds.", "parameters": {"type": "object", "properties": {}}}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
SAID: Any = [{"role": "user", "content": "Hi"}]
PLAIN = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
SHOWN = f"<|im_start|>system\n<tools> {json.dumps(FUNCTION)} </tools><|im_end|>\n{PLAIN}"


def write_models(folder: Path) -> None:
    """Write a model with its templates in a list, and one with each in a file of its own."""
    listed, beside = (Path(shutil.copytree(ROOT / "examples" / "tiny", folder / name)) for name in NAMES)
    both = {"default": templates.PLAIN, "tool_use": templates.FOR_TOOLS}
    (listed / "chat_template.jinja").unlink()
    config = json.loads((listed / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": name, "template": source} for name, source in both.items()]
    (listed / "tokenizer_config.json").write_text(json.dumps(config))
    (beside / "chat_template.jinja").write_text(both["default"])
    (beside / "additional_chat_templates").mkdir()
    (beside / "additional_chat_templates" / "tool_use.jinja").write_text(both["tool_use"])


@pytest.fixture(scope="module")
def served() -> Iterator[Node]:
    with short_folder() as folder:
        write_models(folder)
        engines = SIMULATED + "".join(MODELS.format(name=name) for name in NAMES)
        with node(folder, engine=engines) as running:
            yield running


def post(served: Node, path: str, **body: Any) -> Any:
    connection = HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


@pytest.mark.parametrize("model", NAMES)
def test_requests_with_tools_get_the_template_for_tools_at_every_door(served: Node, model: str) -> None:
    for tools, choice, prompt in ((None, None, PLAIN), (TOOLS, "auto", SHOWN), (TOOLS, "none", PLAIN)):
        given: dict[str, Any] = {} if tools is None else {"tools": tools, "tool_choice": choice}
        ids = post(served, "/tokenize", model=model, messages=SAID, **given)["tokens"]
        assert post(served, "/detokenize", model=model, tokens=ids)["text"] == prompt
        flat: dict[str, Any] = (
            {} if tools is None else {"tools": [{"type": "function", **FUNCTION}], "tool_choice": choice}
        )
        with OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0) as client:
            chat: Any = client.chat.completions.create(model=model, messages=SAID, max_tokens=4, **given)
            response: Any = client.responses.create(model=model, input="Hi", max_output_tokens=16, **flat)
        assert chat.usage.prompt_tokens == response.usage.input_tokens == len(ids)


def test_the_check_prints_the_formats_of_both_templates(served: Node) -> None:
    words = [sys.executable, "-m", "supervisor", str(served.folder / f"{served.port}.toml"), "--check"]
    printed = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    for name in NAMES:
        assert f"answers of {name} without tools: calls in no known format; reasoning in no known format\n" in printed
        assert f"answers of {name} with tools: calls hermes; reasoning in no known format\n" in printed
    assert "answers of tiny: calls in no known format; reasoning in no known format\n" in printed
