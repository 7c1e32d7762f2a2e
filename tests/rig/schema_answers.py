"""Answers that the grammar backend's own matcher lets end, for the schemas that an engine gets.

`python -m tests.rig.schema_answers 1000` draws so many schemas and prints what became of them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random

import jsonschema
import numpy as np
import xgrammar
from attrs import Factory, define

from protocol.schemas.enforceable import Unenforceable, enforceable
from tests.rig.varied_schemas import Draw

TOKENIZER = Path(__file__).parents[2] / "examples" / "tiny" / "tokenizer.json"
END = 2  # the token that ends an answer
TOKENS_MAX = 500
CLOSING = (b"}", b"]", b'"', b",", b":")
MANNERS = ("shortest", "random", "rare", "single", "digits", "shortest", "random", "rare")


@define
class Trial:
    """The results of many schemas."""

    accepted: int = 0
    answers: int = 0
    unended: int = 0
    refused: Counter[str] = Factory(Counter)  # schemas by keyword
    backend_refused: list[str] = Factory(list)
    bad: list[str] = Factory(list)  # answers that ended and do not validate

    def __str__(self) -> str:
        drawn = self.accepted + self.refused.total()
        keywords = ", ".join(f"{keyword} {count}" for keyword, count in self.refused.most_common())
        refused = f"refused {self.refused.total()} ({self.refused.total() / drawn:.1%}): {keywords}"
        return (
            f"{drawn} schemas, {self.accepted} accepted, {len(self.backend_refused)} of these refused by the backend;"
            f" {self.answers} answers ended, {len(self.bad)} of these do not validate, {self.unended} did not end; {refused}"
        )


@cache
def tokens() -> xgrammar.TokenizerInfo:
    data = json.loads(TOKENIZER.read_text())
    ids = {**data["model"]["vocab"], **{token["content"]: token["id"] for token in data["added_tokens"]}}
    vocabulary = sorted(ids, key=ids.__getitem__)
    return xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[END])


@cache
def compiler() -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(tokens(), max_threads=1, cache_enabled=False)


def compiled(text: str) -> xgrammar.CompiledGrammar:
    """Return the grammar of an engine's schema; raises `RuntimeError` if the backend refuses it."""
    return compiler().compile_json_schema(text, any_whitespace=False)


def answer(grammar: xgrammar.CompiledGrammar, rng: Random, manner: str) -> str | None:
    """Return an answer that may end where it ends, None if there is none of `TOKENS_MAX` tokens."""
    matcher, words = xgrammar.GrammarMatcher(grammar), tokens().decoded_vocab
    mask = xgrammar.allocate_token_bitmask(1, len(words))
    hurry_after, written = rng.choice([20, 60, 150]), b""
    for step in range(TOKENS_MAX):
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8).ravel(), bitorder="little")
        ids = [int(token) for token in np.flatnonzero(bits[: len(words)])]
        hurry = manner == "shortest" or step > hurry_after
        if END in ids and (len(ids) == 1 or hurry or rng.random() < 0.3):
            return written.decode(errors="replace")
        if not ids:
            raise AssertionError(f"nothing may follow {written!r}")
        token = _chosen({token: words[token] for token in ids if token != END}, rng, "shortest" if hurry else manner)
        if not matcher.accept_token(token):
            raise AssertionError(f"{words[token]!r} is allowed behind {written!r}, and then refused")
        written += words[token]
    return None


def _chosen(words: dict[int, bytes], rng: Random, manner: str) -> int:
    """Return a token: one that closes, one of rare characters, one of few bytes, or any."""
    preferred: list[int] = []
    match manner:
        case "shortest":
            preferred = next(filter(None, ([t for t in words if words[t][:1] == sign] for sign in CLOSING)), [])[:1]
        case "rare" if rng.random() < 0.5:
            preferred = [token for token, word in words.items() if word[:1] in b'\\"-eE.0' or word[0] >= 0x80]
        case "single":
            preferred = [token for token, word in words.items() if len(word) == 1]
        case "digits" if rng.random() < 0.7:
            preferred = [token for token, word in words.items() if word[:1] in b"019-.eE"]
        case _:
            pass
    return rng.choice(preferred or list(words))


def fault(schema: str, text: str) -> str | None:
    """Return why an answer does not validate, None if it does."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return str(error)
    found = next(jsonschema.Draft202012Validator(json.loads(schema)).iter_errors(value), None)
    return None if found is None else found.message


def run(seeds: range, answers: int) -> Trial:
    """Draw a schema of each seed, and several answers to it."""
    trial = Trial()
    for seed in seeds:
        rng = Random(seed)
        schema = Draw(rng).text()
        try:
            text = enforceable(schema)
        except Unenforceable as error:
            trial.refused[error.keyword] += 1
            continue
        trial.accepted += 1
        try:
            grammar = compiled(text)
        except RuntimeError as error:
            trial.backend_refused.append(f"{seed}: {error}: {text}")
            continue
        for manner in MANNERS[:answers]:
            try:
                written = answer(grammar, rng, manner)
            except AssertionError as error:
                trial.bad.append(f"{seed}, {manner}: {error}")
                continue
            if written is None:
                trial.unended += 1
                continue
            trial.answers += 1
            if (reason := fault(schema, written)) is not None:
                trial.bad.append(f"{seed}, {manner}: {written[:200]}: {reason[:200]}")
    return trial


if __name__ == "__main__":
    result = run(range(int(sys.argv[1])), len(MANNERS))
    sys.stdout.write("\n".join([str(result), *result.backend_refused, *result.bad, ""]))
    sys.exit(bool(result.backend_refused or result.bad))
