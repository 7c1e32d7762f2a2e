"""The law of formats: any cut of a text into pieces gives the calls, the reasoning and the text of the whole."""

from __future__ import annotations

import random

import pytest

from actors.text.formats.answer import Expected
from actors.text.formats.stage import CallPiece, Piece, ReasoningPiece
from actors.text.formats.table import TOOLS, make_stage
from actors.text.formats.tool_table import ToolTable
from tests.actors.text.formats.mixtures import MIXTURES, Mixture

CUTS = 20_000
CUTS_A_NIGHT = 1_000_000
CUTS_A_TEXT = 40
NAMES = sorted(MIXTURES)
OFFER = ToolTable({"f": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}, "g": {}})


def result(mixture: Mixture, offer: Expected, parts: list[str], *, cut: bool) -> list[tuple[object, ...]]:
    """Return what a text becomes that comes in these parts: its pieces, those of one kind and one call joined."""
    stage = make_stage(mixture.answers, offer)
    out = list[tuple[object, ...]]()
    fed = given = 0

    def add(pieces: list[Piece]) -> None:
        nonlocal given
        for piece in pieces:
            if isinstance(piece, CallPiece):
                if piece.name:
                    out.append(("call", piece.index, piece.name, piece.arguments))
                else:
                    out[-1] = (*out[-1][:3], f"{out[-1][3]}{piece.arguments}")
                continue
            kind = "reasoning" if isinstance(piece, ReasoningPiece) else "text"
            given += len(piece.text)
            if out and out[-1][0] == kind:
                out[-1] = kind, f"{out[-1][1]}{piece.text}"
            else:
                out.append((kind, piece.text))

    for part in parts:
        watched = stage.watched
        if watched is not None and not stage.held and watched.isdisjoint(part):
            # Such text may skip the stage.
            if out and out[-1][0] == "text":
                out[-1] = "text", f"{out[-1][1]}{part}"
            else:
                out.append(("text", part))
            continue
        fed += len(part)
        add([*stage.feed(part)])
        assert 0 <= stage.held <= fed
    add([*stage.end(cut=cut)])
    assert stage.held == 0
    assert given <= fed
    return out


def differences(name: str, seed: object, cuts: int) -> list[str]:
    """Return the texts of which a cut gives something else than the whole text, as reasons."""
    rng, found = random.Random(f"{name} {seed}"), list[str]()
    mixture = MIXTURES[name]
    for number in range(cuts // CUTS_A_TEXT):
        text = mixture.text(rng)
        offer = Expected(OFFER if rng.random() < 0.9 else ToolTable(), thinking=rng.random() < 0.3)
        cut = rng.random() < 0.5
        whole = result(mixture, offer, [text], cut=cut)
        for index in range(CUTS_A_TEXT):
            # Mostly one cut or two: more of them hide nothing that the cut at every character does not show.
            most = 2 if rng.random() < 0.8 else 8
            each = index == 0 and number % 4 == 0  # a cut at every character takes as long as forty others
            count = len(text) - 1 if each else rng.randint(1, min(len(text) - 1, most)) if len(text) > 1 else 0
            places = sorted(rng.sample(range(1, len(text)), max(0, count))) if len(text) > 1 else []
            parts = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
            if (other := result(mixture, offer, parts, cut=cut)) != whole:
                found.append(f"{parts} gives {other}, and whole {whole}")
                break
    return found


def test_every_format_of_calls_has_a_mixture() -> None:
    assert {mixture.answers.tools for mixture in MIXTURES.values()} >= set(TOOLS)


@pytest.mark.parametrize("name", NAMES)
def test_any_cut_gives_the_same(name: str) -> None:
    assert differences(name, 1, CUTS) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_any_of_a_million_cuts_gives_the_same(name: str) -> None:
    seed = random.SystemRandom().getrandbits(32)
    assert differences(name, seed, CUTS_A_NIGHT) == [], f"seed {seed}"
