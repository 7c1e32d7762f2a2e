"""The log probabilities of prompts by the library transformers alone, in float32: what our engines are compared with.

`python -m tests.rig.transformers_alone` reads a model's folder and prompts of token ids from its input, and writes the
rows of each prompt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from supervisor.engines.host.spawn import ROOT
from supervisor.engines.sglang.spawn import host_environment

COMPUTED_WITHIN_S = 400.0


@frozen
class Row:
    """One token of a prompt: its log probability behind those before it, and that of the likeliest token there."""

    logprob: float
    likeliest: float
    is_likeliest: bool


def prompt_rows(model: Path, prompts: Sequence[Sequence[int]]) -> list[list[Row]]:
    """Return the rows of each prompt, without its first token, by a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.rig.transformers_alone"],
        env={**host_environment(os.environ, "cpu"), "TMPDIR": "/tmp"},
        cwd=ROOT,
        input=json.dumps({"model": str(model), "prompts": list(map(list, prompts))}),
        capture_output=True,
        text=True,
        timeout=COMPUTED_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [[Row(*row) for row in rows] for rows in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    import espalier_sglang_cpu

    espalier_sglang_cpu.prepare()  # torchvision cannot be imported without it on a CPU
    import torch
    from transformers import AutoModelForCausalLM

    asked = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    given = []
    for prompt in asked["prompts"]:
        with torch.no_grad():
            rows = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        own = rows[range(len(prompt) - 1), prompt[1:]].tolist()
        values, ids = rows.max(-1)
        given.append([*zip(own, values.tolist(), (ids == torch.tensor(prompt[1:])).tolist(), strict=True)])
    sys.stdout.write(json.dumps(given) + "\n")


if __name__ == "__main__":
    main()
