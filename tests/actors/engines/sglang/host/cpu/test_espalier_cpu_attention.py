"""Attention of new tokens, beside the plain formula over every position of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ATTENTION = import_module("actors.engines.sglang.host.cpu.espalier_cpu_attention")
PLACES, HEADS, SIZE = 4096, 4, 16
SCALE = 0.37  # not the one that is used where none is given

# Several threads wait for each other longer than they compute, where other tests run beside.
torch.set_num_threads(1)


class Batch:
    """The arguments of a batch of sequences, each of (cached tokens, new tokens), at places in no order."""

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        kv_heads: int = HEADS,
        value_size: int = SIZE,
        dtype: Any = torch.float32,
    ) -> None:
        chance = torch.Generator().manual_seed(1)
        self.lengths = lengths
        self.keys, self.values = (
            torch.randn((PLACES, kv_heads, size), generator=chance, dtype=torch.float32).to(dtype)
            for size in (SIZE, value_size)
        )
        new, places = sum(new for _, new in lengths), torch.randperm(PLACES, generator=chance, dtype=torch.int32)
        self.query = torch.randn((new, HEADS, SIZE), generator=chance, dtype=torch.float32)
        self.table = torch.zeros((len(lengths) + 1, 1024), dtype=torch.int32)
        for request, length in enumerate(map(sum, lengths)):
            self.table[request + 1, :length], places = places[:length], places[length:]

    def attended(self, sglang: Any = None, encoder_lens: Any = None, **options: Any) -> torch.Tensor:
        prefixes, new = (torch.tensor(each) for each in zip(*self.lengths, strict=True))
        lengths = torch.arange(1, len(self.lengths) + 1), prefixes + new, prefixes, new
        output = torch.full((*self.query.shape[:2], self.values.shape[2]), torch.nan)
        caches, named = (self.keys, self.values), {"scaling": SCALE, "enable_gqa": True, "causal": True}
        result: torch.Tensor = ATTENTION.attend_new(
            sglang, "backend", self.query, output, *caches, self.table, *lengths, encoder_lens, **named | options
        )
        return result

    def expected(self, window: int = 10**6) -> torch.Tensor:
        """Return the formula's: softmax(scale q k) v over the keys that a position sees."""
        query, rows = iter(self.query.double()), list[torch.Tensor]()
        for request, (prefix, new) in enumerate(self.lengths):
            for position in range(prefix, prefix + new):
                places = self.table[request + 1, max(0, position - window) : position + 1]
                keys, values = (
                    cache[places].double().repeat_interleave(HEADS // cache.shape[1], dim=1)
                    for cache in (self.keys, self.values)
                )
                weights = torch.einsum("hd,khd->kh", next(query), keys).mul(SCALE).softmax(0)
                rows.append(torch.einsum("kh,khd->hd", weights, values))
        return torch.stack(rows)


BATCHES = [
    [(0, 1)],
    [(0, 300)],
    [(37, 1)],
    [(511, 3)],
    [(16, 600)],  # with what is cached
    [(310, 600)],  # in three pieces
    [(0, 20), (100, 7), (0, 1), (700, 257), (1, 2)],
]


@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("kv_heads", [HEADS, 1])
@pytest.mark.parametrize("window", [None, -1, 0, 5, 300])
def test_new_tokens_see_what_is_cached_and_what_comes_before_them(
    lengths: list[tuple[int, int]], kv_heads: int, window: int | None
) -> None:
    batch = Batch(lengths, kv_heads)
    seen = {} if window is None or window < 0 else {"window": window}
    found = batch.attended(sliding_window_size=window).double()
    torch.testing.assert_close(found, batch.expected(**seen), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", BATCHES)
def test_values_may_be_shorter_than_keys(lengths: list[tuple[int, int]]) -> None:
    batch = Batch(lengths, 1, SIZE // 2)
    torch.testing.assert_close(batch.attended().double(), batch.expected(), rtol=1e-4, atol=1e-5)


def test_a_cache_of_another_type_is_read_as_the_queries_are() -> None:
    batch = Batch([(40, 9)], dtype=torch.bfloat16)
    torch.testing.assert_close(batch.attended().double(), batch.expected(), rtol=1e-4, atol=1e-5)


def test_a_sequence_without_new_tokens_leaves_the_others_their_places() -> None:
    batch = Batch([(0, 0), (10, 4), (6, 0), (0, 5)])
    torch.testing.assert_close(batch.attended().double(), batch.expected(), rtol=1e-4, atol=1e-5)


def test_only_new_positions_are_computed_and_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, compute = list[tuple[int, int, bool]](), torch.nn.functional.scaled_dot_product_attention

    def counted(query: Any, keys: Any, values: Any, **options: Any) -> Any:
        computed.append((query.shape[2], keys.shape[2], options.get("attn_mask") is None))
        return compute(query, keys, values, **options)

    monkeypatch.setattr(ATTENTION, "scaled_dot_product_attention", counted)
    Batch([(900, 3), (0, 600), (160, 300)]).attended()
    assert computed == [(3, 903, False), (600, 600, True), (256, 416, False), (44, 460, False)]


def test_what_is_behind_a_sliding_window_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read, compute = list[int](), torch.nn.functional.scaled_dot_product_attention
    batch = Batch([(900, 3), (0, 300)])
    batch.table[1, : 900 - 10] = PLACES  # which is none

    def counted(query: Any, keys: Any, values: Any, **options: Any) -> Any:
        read.append(keys.shape[2])
        return compute(query, keys, values, **options)

    monkeypatch.setattr(ATTENTION, "scaled_dot_product_attention", counted)
    batch.attended(sliding_window_size=10)
    assert read == [13, 256, 54]


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"is_cross_attn": True},
        {"encoder_lens": torch.tensor([2])},
        {"causal": False, "sliding_window_size": 7, "enable_gqa": False},
    ],
)
def test_what_is_not_causal_or_has_an_encoders_part_is_left_to_sglang(options: dict[str, Any]) -> None:
    batch, passed = Batch([(3, 4)]), list[Any]()

    def sglang(backend: str, query: torch.Tensor, output: torch.Tensor, *rest: Any, **named: Any) -> str:
        keys, values, table, requests, lengths, prefixes, new, encoder = rest
        assert query is batch.query
        assert output.shape == query.shape
        assert (keys is batch.keys, values is batch.values, table is batch.table) == (True, True, True)
        assert (requests.tolist(), lengths.tolist(), prefixes.tolist(), new.tolist()) == ([1], [7], [3], [4])
        passed.append((backend, named | {"encoder_lens": encoder}))
        return "its own"

    given = {"scaling": SCALE, "enable_gqa": True, "causal": True, "is_cross_attn": False}
    assert batch.attended(sglang, **options) == "its own"
    assert passed == [("backend", {**given, "sliding_window_size": None, "encoder_lens": None, **options})]
