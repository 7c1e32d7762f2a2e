"""The tokens behind which texts may be cut, by the description of their tokenizer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from actors.text.boundaries import boundaries, choose
from tests.rig.gateway import TINY

END = "<|im_end|>"


def described(*added: AddedToken, **parts: Any) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_tokens(list(added))
    description: dict[str, Any] = json.loads(tokenizer.to_str())
    return description


def raw(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, normalized=False, **flags)


def cut(*added: AddedToken, **parts: Any) -> set[str]:
    return set(boundaries(described(*added, **parts)))


def test_the_markers_of_a_model_are_boundaries_with_their_ids() -> None:
    found = boundaries(json.loads(TINY.tokenizer.to_str()))
    assert found
    assert found == {content: TINY.tokenizer.token_to_id(content) for content in found}


@pytest.mark.parametrize(("flag", "allowed"), [("single_word", False), ("lstrip", True), ("rstrip", True)])
def test_no_boundary_asks_for_the_character_behind_it(flag: str, allowed: bool) -> None:
    assert cut(raw(END, **{flag: True}), raw("<s>")) == ({END, "<s>"} if allowed else {"<s>"})


def test_a_normalized_token_is_a_boundary_where_nothing_is_normalized() -> None:
    token = AddedToken(END, normalized=True)
    nested = normalizers.Sequence([normalizers.Sequence([])])
    assert cut(token) == cut(token, normalizer=nested) == {END}
    assert (
        cut(token, normalizer=normalizers.NFC())
        == cut(token, normalizer=normalizers.Sequence([normalizers.NFC()]))
        == set()
    )
    assert cut(raw(END), normalizer=normalizers.NFC()) == {END}


@pytest.mark.parametrize(
    ("other", "boundary"),
    [
        (f"{END}\n", False),  # longer
        (f"x{END}", False),
        ("x<|", False),  # ends within it
        (f"x{END[:-1]}", False),
        ("<|", True),  # begins with it, and is shorter
        ("im", True),  # lies in it
        ("|>x", True),  # begins within it: the search prefers the left
        ("|>", True),
        ("x", True),
    ],
)
def test_no_other_token_may_take_a_part_of_a_boundary(other: str, boundary: bool) -> None:
    assert (END in cut(raw(END), raw(other))) == boundary
    assert (END in cut(raw(END), raw(other, single_word=True))) == boundary, "a refused match is passed over, too"
    assert (END in cut(AddedToken(END), AddedToken(other))) == boundary
    assert END in cut(raw(END), AddedToken(other)), "it is found in pieces between boundaries alone"


@pytest.mark.parametrize("other", [f"{END}\n", "x<|", "<|", "im", "|>x", "|>"])
def test_no_token_of_the_first_search_may_overlap_one_of_the_second(other: str) -> None:
    assert END not in cut(AddedToken(END), raw(other))
    assert END in cut(AddedToken(END), raw("x"))


@pytest.mark.parametrize("content", ["aa", "aba", "<|a<|", " x", "x ", "x\u00a0", "\n", "  "])
def test_no_boundary_overlaps_itself_or_has_spaces_at_its_ends(content: str) -> None:
    assert cut(raw(content)) == set()


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "Unknown"}},
        {"model": {"type": "BPE", "dropout": 0.1}},
        {"model": None},
        {"normalizer": {"type": "Unknown"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Unknown"}]}},
        {"normalizer": {"type": "Sequence"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Unknown"}]}},
        {"post_processor": {"type": "Unknown"}},
        {"truncation": {"max_length": 8}},
        {"padding": {}},
        {
            "added_tokens": [
                {"id": 5, "content": END, "normalized": False},
                {"id": 6, "content": END, "normalized": False},
            ]
        },
        {"added_tokens": [{"id": None, "content": END, "normalized": False}]},
    ],
)
def test_what_is_not_known_to_work_by_pieces_has_no_boundary(change: dict[str, Any]) -> None:
    description = described(raw(END))
    assert boundaries(description) == {END: 2}
    assert boundaries({**description, **change}) == {}


def test_a_template_may_only_add_special_tokens() -> None:
    def template(single: str) -> Any:
        return processors.TemplateProcessing(single=single, pair="$A $B", special_tokens=[("a", 0)])

    nothing = processors.Sequence([processors.ByteLevel(), template("a $A a")])
    assert cut(raw(END), post_processor=nothing) == {END}
    for single in ("$A $A", "a"):
        assert cut(raw(END), post_processor=template(single)) == set()
        assert cut(raw(END), post_processor=processors.Sequence([template(single)])) == set()


def test_a_model_with_thousands_of_tokens_is_decided_at_once() -> None:
    added = [raw(f"<unused{number}>") for number in range(3_000)]
    assert len(cut(*added, pre_tokenizer=pre_tokenizers.Metaspace())) == 3_000


def test_the_boundary_is_the_most_frequent_one() -> None:
    found = {"<s>": 1, "<e>": 2, "<u>": 3}
    assert choose(found, ["<s><e><e>", "<e>"]) == "<e>"
    assert choose(found, ["none"]) is None
    assert choose({}, ["<s>"]) is None
