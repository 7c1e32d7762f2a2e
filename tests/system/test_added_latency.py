"""What `added_latency` computes from the times of a node and of its bare engine."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from bench.peers.peer import MODEL_FOLDER
from tests.system.added_latency import LOADS, Times, prompts, table, with_text


def test_only_tokens_with_text_count() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    special = next(token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)
    first, second = tokenizer.encode("oak tree", add_special_tokens=False).ids[:2]
    assert with_text(tokenizer, [(0.1, [first]), (0.2, [special]), (0.3, [special, second]), (0.4, [])]) == [0.1, 0.3]


def test_the_first_token_has_a_difference_and_gaps_have_a_ratio() -> None:
    bare, node = Times([[0.010, 0.020, 0.030]]), Times([[0.012, 0.032, 0.052]])
    rows = {
        row[0]: [value for cell in row if isinstance(cell, list) for value in cell]
        for row in table({1: [(bare, node)]}).rows
    }
    assert rows["first token p50 ms, 1 client"] == pytest.approx([10.0, 12.0, 2.0])
    assert rows["gap p99 ms, 1 client"] == pytest.approx([10.0, 20.0, 2.0])


def test_each_round_has_other_prompts_and_both_sides_the_same() -> None:
    load = LOADS[0]
    assert prompts(load, 0, [3]) == prompts(load, 0, [3])
    assert prompts(load, 0, [3]) != prompts(load, 1, [3])
    assert prompts(load, 0, [3]) != prompts(load, 0, [4])
