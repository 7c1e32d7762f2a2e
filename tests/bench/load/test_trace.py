"""A trace is read as Mooncake writes it, and what is no trace is refused with its line."""

from pathlib import Path

import pytest

from bench.load.plan import TracedRequest
from bench.load.trace import read_trace

MOONCAKE = """\
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 2353]}
"""


def test_times_count_from_the_first_line_in_seconds(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(MOONCAKE + '\n{"timestamp": 0, "input_length": 3, "output_length": 1, "chat_id": 9}\n')
    assert read_trace(file) == (
        TracedRequest(0.0, 3, 1),
        TracedRequest(27.482, 6955, 52, (46, 47, 48)),
        TracedRequest(30.535, 6472, 26, (46, 47, 2353)),
    )


def test_lengths_are_scaled_and_times_and_blocks_are_not(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(MOONCAKE)
    assert read_trace(file, 0.1)[1] == TracedRequest(3.053, 647, 3, (46, 47, 2353))


@pytest.mark.parametrize("line", ["{", "3", '{"timestamp": 1}', '{"timestamp": 1, "input_length": -1, "output_length": 1}', '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}'])  # fmt: skip
def test_a_line_that_is_none_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(f"{MOONCAKE}{line}\n")
    with pytest.raises(ValueError, match=r"t\.jsonl:3"):
        read_trace(file)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        read_trace(tmp_path / "t.jsonl")
