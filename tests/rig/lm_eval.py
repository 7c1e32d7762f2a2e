"""EleutherAI's lm-evaluation-harness, which runs evaluations against a server: in an environment of its own.

`python -m tests.rig.lm_eval` makes the environment from `lm-eval.txt`, in `build/lm-eval/`: some minutes and 850 MB.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from attrs import frozen

from bench.peers.install import install
from bench.rig.node import MODEL, ROOT

NAME, ENVIRONMENTS = "lm-eval", ROOT / "build"
RUN_WITHIN_S = 600.0


@frozen
class LogLikelihood:
    """The log probability of a continuation behind its context, and whether a greedy answer would be the same."""

    value: float
    is_greedy: bool


def make_environment() -> None:
    """Install the harness, if it is not there; raises `CalledProcessError` if a package cannot be had."""
    install(NAME, ENVIRONMENTS, Path(__file__).parent)


def log_likelihoods(
    port: int, tokenizer: Path, pairs: Iterable[tuple[str, str]], folder: Path, *, concurrent: int, batch: int
) -> list[LogLikelihood]:
    """Return the log-likelihood of each continuation behind its context, by a task of the harness below `folder`.

    The harness sends `batch` prompts in a request, and so many requests at once.
    """
    examples, task, output = folder / "pairs.jsonl", folder / "pairs.yaml", folder / "output"
    lines = [json.dumps({"context": context, "continuation": continuation}) for context, continuation in pairs]
    examples.write_text("\n".join(lines) + "\n")
    task.write_text(
        "task: pairs\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: '{examples}'}}}}\n"
        "test_split: test\n"
        "output_type: loglikelihood\n"
        "doc_to_text: '{{context}}'\n"
        "doc_to_target: '{{continuation}}'\n"
        "target_delimiter: ''\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    of_client = {
        "model": MODEL,
        "base_url": f"http://127.0.0.1:{port}/v1/completions",
        "tokenizer": tokenizer,
        "num_concurrent": concurrent,
    }
    done = subprocess.run(
        [
            *(ENVIRONMENTS / NAME / "bin" / "lm_eval", "run", "--model", "local-completions"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in of_client.items())),
            *("--tasks", "pairs", "--include_path", folder, "--output_path", output, "--log_samples"),
            *("--batch_size", str(batch)),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=RUN_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (samples,) = output.glob("**/samples_pairs_*.jsonl")
    by_number: dict[int, LogLikelihood] = {}
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        [[(value, greedy)]] = sample["resps"]
        by_number[sample["doc_id"]] = LogLikelihood(float(value), str(greedy) == "True")
    return [by_number[number] for number in sorted(by_number)]


if __name__ == "__main__":
    make_environment()
