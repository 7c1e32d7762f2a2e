"""Evaluations: log-likelihoods by completions that echo their prompts are those of the library transformers.

The engine computes in float32, as the library does here: in bfloat16 either rounds by a tenth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import httpx2
import pytest

from bench.rig.node import MODEL, ROOT, SGLANG, Node, node, short_folder
from tests.rig.gateway import TINY, ids
from tests.rig.lm_eval import LogLikelihood, log_likelihoods, make_environment
from tests.rig.transformers_alone import Row, prompt_rows

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

FOLDER = ROOT / "examples" / MODEL
EXACT = 'settings.dtype = "float32"\n'
DIFFERENCE_MAX = 0.01

PROMPTS = (
    "The oak is a bright tree. The willow is",
    "<|im_start|>user\nTell me about the oak.<|im_end|>\n<|im_start|>assistant\nThe oak is a bro",
    "a b c 123 %&! 日本語 🙂 wörld",
    "The oak is " * 120,  # more than a piece of a prompt, and more than a reply of the processor
)


@pytest.fixture(scope="module")
def served() -> Iterator[Node]:
    with short_folder() as folder, node(folder, engine=SGLANG + EXACT) as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> list[list[Row]]:
    return prompt_rows(FOLDER, list(map(ids, PROMPTS)))


def asked(served: Node, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "temperature": 0, **fields}
    answer = httpx2.post(f"http://127.0.0.1:{served.port}/v1/completions", json=body, timeout=60).json()
    assert "choices" in answer, answer
    choices: list[dict[str, Any]] = answer["choices"]
    return choices


def check(table: dict[str, Any], prompt: str, rows: Sequence[Row], *, answered: int) -> None:
    """Check the table of log probabilities of one choice against the rows of transformers."""
    count = len(rows) + 1
    assert {len(column) for column in table.values()} == {count + answered}
    assert (table["token_logprobs"][0], table["top_logprobs"][0]) == (None, None)
    for index, row in enumerate(rows, start=1):
        own, top = table["token_logprobs"][index], table["top_logprobs"][index]
        assert abs(own - row.logprob) < DIFFERENCE_MAX
        assert abs(max(top.values()) - row.likeliest) < DIFFERENCE_MAX
        assert (own == max(top.values())) is row.is_likeliest  # as lm-eval finds out what a greedy answer would be
    for begin, token in zip(table["text_offset"], table["tokens"], strict=True):
        assert token.startswith("bytes:") or (prompt + " ").startswith(token, begin) or begin >= len(prompt)


def test_the_body_of_lm_eval_gets_the_log_probabilities_of_transformers(
    served: Node, expected: list[list[Row]]
) -> None:
    body = {"prompt": list(map(ids, PROMPTS)), "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    for _ in range(2):  # the second time the prompts are in the prefix cache
        choices = asked(served, **body)
        assert [choice["index"] for choice in choices] == list(range(len(PROMPTS)))
        for choice, prompt, rows in zip(choices, PROMPTS, expected, strict=True):
            assert choice["text"].startswith(prompt)
            check(choice["logprobs"], prompt, rows, answered=1)


@pytest.mark.parametrize("likeliest", [0, 20])
def test_texts_and_no_answer_get_the_same(likeliest: int, served: Node, expected: list[list[Row]]) -> None:
    choices = asked(served, prompt=PROMPTS, max_tokens=0, logprobs=max(1, likeliest), n=2, echo=True)
    for index, choice in enumerate(choices):
        prompt = PROMPTS[index // 2]
        assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
        check(choice["logprobs"], prompt, expected[index // 2], answered=0)


def test_a_text_that_ends_at_once_keeps_an_entry_for_its_end(served: Node) -> None:
    """The client drops the last entry: without that of the end it would drop one of the prompt."""
    (end, *_) = TINY.eos_token_ids
    forced = asked(served, prompt="The oak", max_tokens=1, logprobs=1, echo=True, logit_bias={str(end): 100})
    assert (forced[0]["finish_reason"], forced[0]["text"]) == ("stop", "The oak")
    assert forced[0]["logprobs"]["tokens"] == ["The", " oak", TINY.tokenizer.id_to_token(end)]


def test_without_a_prompt_a_text_begins(served: Node) -> None:
    (choice,) = asked(served, max_tokens=2, logprobs=1, echo=True)
    assert choice["logprobs"]["tokens"][0] == "<|endoftext|>"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == 3


# The client of EleutherAI's harness ---------------------------------------------------------

PAIRS = (
    ("The oak is", " a bright tree."),
    ("The oak is", " a bro"),
    ("The oak is a bro", "ad tree"),
    ("Tell me about the willow. The willow", " is old"),
    ("", "The oak"),
    ("日本 🙂", " wörld"),
    *((f"The oak is {place}. " * 20 + "The oak is", f" {place}.") for place in ("old", "tall", "a tree", "green")),
)


def expected_likelihoods() -> list[LogLikelihood]:
    """Return what transformers makes of the pairs, cut into tokens as the harness cuts them."""
    prompts, lengths, first = [], [], TINY.first_token
    assert first is not None
    for context, continuation in PAIRS:
        whole = ids(context + continuation)
        own = whole[len(ids(context)) :]
        # An empty context is the token that begins a text.
        prompts.append(whole if context else [first, *own])
        lengths.append(len(own))
    rows = [rows[-length:] for rows, length in zip(prompt_rows(FOLDER, prompts), lengths, strict=True)]
    return [LogLikelihood(sum(row.logprob for row in each), all(row.is_likeliest for row in each)) for each in rows]


@pytest.mark.parametrize(("concurrent", "batch"), [(1, 1), (4, 3)])
def test_lm_eval_finds_the_log_likelihoods_of_transformers(
    concurrent: int, batch: int, served: Node, tmp_path: Path
) -> None:
    try:
        make_environment()
    except CalledProcessError as error:
        pytest.skip(f"an environment for lm-eval cannot be made here: {error}")
    found = log_likelihoods(served.port, FOLDER, PAIRS, tmp_path, concurrent=concurrent, batch=batch)
    for pair, own, theirs in zip(PAIRS, found, expected_likelihoods(), strict=True):
        assert abs(own.value - theirs.value) < DIFFERENCE_MAX, pair
        assert own.is_greedy is theirs.is_greedy, pair
    assert {each.is_greedy for each in found} == {True, False}
