"""The tiny model after a short training on a few conversations with tools, made once and kept.

It has learned these conversations (`tool_turns.py`) by heart and calls no other tool rightly. It is there to have a real
engine that writes calls by itself, with every token of its own choice: tests of servers and clients need no more.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attrs import evolve

from protocol.messages.text import Rendering, Role, Turn
from protocol.messages.tools import Tool
from tests.rig.random_vision_models import CPU_PATCHES, ROOT, TINY
from tests.rig.tool_turns import Conversation, asked_by_clients, probed

TEMPLATE = ROOT / "examples" / "hermes.jinja"
INPUTS = (Path(__file__), Path(__file__).with_name("tool_turns.py"), TEMPLATE, *sorted(TINY.iterdir()))
MADE_WITHIN_S = 600.0
SEED, STEPS, ROWS = 47, 120, 5
RATE = 2e-3
IGNORED = -100  # as a label: no loss
SYSTEMS = ("", "", "You are a helpful assistant.", "Be brief.", "Answer the user's questions by the tools.")
WORDS = ("tell", "the", "weather", "of", "a", "city", "get", "current", "return", "name", "save", "note", "for", "any")


def tool_model() -> Path:
    """Return the model's folder, which the first call makes in a process of its own."""
    digest = blake2b(b"".join(path.read_bytes() for path in INPUTS), digest_size=6)
    cache = ROOT / "build" / "tool-models"
    folder = cache / digest.hexdigest()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two runs of tests, one makes it
        if not folder.exists():
            with TemporaryDirectory(dir=cache) as temporary:
                _make_in_process(Path(temporary) / folder.name)
                (Path(temporary) / folder.name).rename(folder)
    return folder


def _make_in_process(folder: Path) -> None:
    # torch and transformers take some 500 MB and seconds to import, which the process of the tests is spared.
    path = os.pathsep.join(map(str, (ROOT, CPU_PATCHES)))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.rig.tool_model", str(folder)]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=MADE_WITHIN_S, check=False
    )
    assert done.returncode == 0, done.stderr


def varied(conversation: Conversation, chance: random.Random) -> Conversation:
    """Return a conversation as another client would send it: with a system text, other descriptions, or more keys."""
    system = chance.choice(SYSTEMS)
    turns = (Turn(Role.SYSTEM, system), *conversation.turns) if system else conversation.turns
    tools = conversation.tools if chance.random() < 0.4 else tuple(_varied(tool, chance) for tool in conversation.tools)
    return Conversation(turns, tools, conversation.answer)


def _varied(tool: Tool, chance: random.Random) -> Tool:
    schema = json.loads(tool.parameters)
    if chance.random() < 0.5:
        schema |= {"additionalProperties": False}
    if chance.random() < 0.3:
        schema |= {"title": f"{tool.name}_args"}
        for name, each in schema["properties"].items():
            each |= {"title": name.title()}
    if chance.random() < 0.5:
        keys = [*schema]
        chance.shuffle(keys)
        schema = {key: schema[key] for key in keys}
    words = " ".join(chance.choices(WORDS, k=chance.randrange(2, 9))).capitalize() + "."
    description = chance.choice((tool.description, words, None))
    return evolve(tool, parameters=json.dumps(schema), description=description)


def examples(tokenizer: Any, chance: random.Random) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens of prompts, each with those of its answer, without end."""
    from tests.rig.tools import SHOWING

    conversations = [*probed(), *asked_by_clients()]
    while True:
        chance.shuffle(conversations)
        for plain in conversations:
            conversation = varied(plain, chance)
            prompt = SHOWING.render(conversation.turns, Rendering(tools=conversation.tools))
            yield tokenizer.encode(prompt), tokenizer.encode(conversation.answer + tokenizer.eos_token)


def train(model: Any, batches: Iterator[Sequence[tuple[list[int], list[int]]]]) -> None:
    """Train a model on the answers of the examples alone."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20, (STEPS - step) / STEPS * 2)
    )
    for batch in batches:
        longest = max(len(prompt) + len(answer) for prompt, answer in batch)
        rows = [(prompt + answer + [0] * longest)[:longest] for prompt, answer in batch]
        labels = [([IGNORED] * len(prompt) + answer + [IGNORED] * longest)[:longest] for prompt, answer in batch]
        # Behind the end of a row nothing is learned, and a causal model does not look there.
        loss = model(input_ids=torch.tensor(rows), labels=torch.tensor(labels)).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def make(folder: Path) -> None:
    """Write the model into a folder."""
    import espalier_sglang_cpu

    espalier_sglang_cpu.prepare()  # before torchvision is imported

    import torch
    import transformers

    torch.manual_seed(SEED)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    made = examples(tokenizer, random.Random(SEED))
    train(model, ([next(made) for _ in range(ROWS)] for _ in range(STEPS)))
    model.to(dtype=torch.bfloat16).save_pretrained(folder)
    for path in TINY.iterdir():
        if path.name != "model.safetensors":
            shutil.copyfile(path, folder / path.name)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
