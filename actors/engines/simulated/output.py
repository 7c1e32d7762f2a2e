"""The output of a simulated engine: sentences as token ids, or else ids drawn from the whole vocabulary.

Everything depends on the engine's seed, the prompt and, at a temperature above 0, the request's own seed or its id.
The `resumed_tokens` do not count as prompt, so that another engine continues an answer as the first one would have.
There is no clock and no state in here: a request's output can be computed anew at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain, count, cycle, islice, repeat
from math import log, log1p
from struct import unpack

from attrs import define, frozen

from actors.engines.simulated.spec import SimulatedSpec
from protocol.messages.generation import Generate, Logprob
from protocol.token_ids import ID_BYTES, TokenIds

PROMPT_TOKEN_BYTES = 8
FORCED = 100.0  # OpenAI: a bias of so much makes a token certain, and its opposite impossible
_HALF = log(0.5)
_LENGTH, _SENTENCE, _LOGPROB = range(3)  # the purposes of draws, so that they are independent


def pack_prompt(tokens: TokenIds) -> bytes:
    """Return the token ids of a prompt as bytes, `PROMPT_TOKEN_BYTES` each."""
    words = memoryview(bytearray(PROMPT_TOKEN_BYTES * len(tokens))).cast("I")
    words[:: PROMPT_TOKEN_BYTES // ID_BYTES] = memoryview(tokens.packed).cast("I")
    return words.tobytes()


@define(eq=False)
class OutputSequence:
    """One answer: its endless token ids, and the ids that end it."""

    ids: Iterator[int]
    ends: frozenset[int]
    key: bytes
    greedy: bool


@frozen
class OutputGenerator:
    """Makes the answers of one engine."""

    spec: SimulatedSpec
    sentences: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def from_sentences(cls, spec: SimulatedSpec, sentences: Sequence[Sequence[int]]) -> OutputGenerator:
        """Return the generator of these sentences without their eos tokens; raises `ValueError` for an unknown id."""
        without_eos = [tuple(token for token in sentence if token != spec.eos_id) for sentence in sentences]
        if any(not 0 <= token < spec.vocabulary_size for sentence in without_eos for token in sentence):
            raise ValueError(f"a line has a token id outside 0 to {spec.vocabulary_size - 1}")
        return cls(spec, tuple(filter(None, without_eos)))

    def answer(self, request: Generate, prompt: bytes) -> OutputSequence:
        """Return the rest of the answer to a request; `prompt` has its tokens, as `pack_prompt` packs them."""
        wanted, eos = request.sampling, self.spec.eos_id
        greedy = wanted.temperature <= 0
        own = "" if greedy else f"id {request.id}" if wanted.seed is None else f"seed {wanted.seed}"
        adapter = "" if request.adapter is None else f"adapter {request.adapter.name} {request.adapter.digest}\n"
        digest = blake2b(f"{self.spec.seed}\n{own}\n{adapter}".encode(), digest_size=16)
        digest.update(memoryview(prompt)[: len(prompt) - request.resumed_tokens * PROMPT_TOKEN_BYTES])
        key = digest.digest()
        ends = frozenset(wanted.stop_token_ids)
        if eos is not None and not wanted.ignore_eos:
            ends |= {eos}
        ids = self._biased(request, key, ends, request.resumed_tokens + wanted.tokens_min)
        return OutputSequence(islice(ids, request.resumed_tokens, None), ends, key, greedy)

    def logprob(self, sequence: OutputSequence, index: int, token: int, top: int) -> Logprob:
        """Return a plausible log probability for the token at an index, and those of the `top` likeliest.

        The likeliest has half of all probability or more, each further one half of the rest, so the sum is below 1.
        """
        vocabulary_size = self.spec.vocabulary_size
        drawn = _draw(sequence.key, _LOGPROB, index)
        likeliest = 0.5 + 0.499 * ((drawn & 0xFFFF) / 0xFFFF)
        # Each rank is half as likely as the one before it, as the number of zeros at the end of a number is.
        bits = drawn >> 16 & 0xFF | 0x100
        rank = 0 if sequence.greedy else min((bits & -bits).bit_length() - 1, vocabulary_size - 1)

        def value_of(rank: int) -> float:
            return log1p(-likeliest) + rank * _HALF if rank else log(likeliest)

        others = vocabulary_size - 1

        def candidate(other: int) -> int:
            """Return the token of a rank: all ranks have different ones."""
            if other == rank:
                return token
            return (token + 1 + (drawn + other - (other > rank)) % others) % vocabulary_size

        likeliest_tokens = tuple((candidate(number), value_of(number)) for number in range(min(top, vocabulary_size)))
        return Logprob(value_of(rank), likeliest_tokens)

    def _biased(self, request: Generate, key: bytes, ends: frozenset[int], tokens_min: int) -> Iterator[int]:
        """Return the ids of the whole answer: one forced id, repeated, or sentences without ids that are ruled out."""
        wanted = request.sampling
        never = frozenset(token for token, bias in wanted.logit_bias.items() if bias <= -FORCED)
        if (media := self.spec.media) is not None:  # a prompt that continues the answer may have no more placeholders
            never |= {token for token in (media.image_token, media.video_token) if token is not None}
        forced = [(-bias, token) for token, bias in wanted.logit_bias.items() if bias >= FORCED]
        if forced:
            ids: Iterator[int] = repeat(min(forced)[1])
        else:
            eos = self.spec.eos_id
            ids = self._sentence_ids(key, tokens_min, itself=eos in ends and eos not in never)
        if not never and not (ends and tokens_min):
            return ids
        return self._replaced(ids, never, ends, tokens_min)

    def _sentence_ids(self, key: bytes, tokens_min: int, *, itself: bool) -> Iterator[int]:
        """Yield the ids of sentences; if the answer ends by `itself`, eos tokens follow at its drawn length."""
        if not itself:
            yield from chain.from_iterable(self._sentences(key))
        spec, emitted = self.spec, 0
        drawn = spec.length_min + _draw(key, _LENGTH, 0) % (spec.length_max - spec.length_min + 1)
        length = max(drawn, tokens_min)
        for sentence in self._sentences(key):
            # A sentence is sent to its end; drawn ids may end anywhere.
            yield from sentence if self.sentences else sentence[: length - emitted]
            emitted += len(sentence)
            if emitted >= length:
                break
        assert spec.eos_id is not None
        yield from repeat(spec.eos_id)

    def _sentences(self, key: bytes) -> Iterator[tuple[int, ...]]:
        many = len(self.sentences)
        if not many:
            yield from self._drawn_ids(key)
        elif many == 1:
            yield from cycle(self.sentences)
        index = _draw(key, _SENTENCE, 0) % many
        for number in count(1):
            yield self.sentences[index]
            index = (index + 1 + _draw(key, _SENTENCE, number) % (many - 1)) % many  # never the same one twice in a row

    def _drawn_ids(self, key: bytes) -> Iterator[tuple[int, ...]]:
        """Yield drawn ids, eight at a time; the eos token is none of them."""
        size, eos = self.spec.vocabulary_size, self.spec.eos_id
        for number in count():
            block = blake2b(number.to_bytes(8), key=key).digest()
            ids = tuple(drawn % size for drawn in unpack("<8Q", block))
            yield tuple((token + 1) % size if token == eos else token for token in ids) if eos in ids else ids

    def _replaced(
        self, ids: Iterator[int], never: frozenset[int], ends: frozenset[int], tokens_min: int
    ) -> Iterator[int]:
        """Yield `ids`, with another id in place of a forbidden one or of an end of the answer before `tokens_min`.

        Where every id is forbidden, the ids stay as they are: all are equally unlikely then.
        """
        ruled_out = {*never, *ends, self.spec.eos_id}
        instead = next((token for token in range(self.spec.vocabulary_size) if token not in ruled_out), None)
        for number, token in enumerate(ids, start=1):
            wrong = token in never or (number <= tokens_min and token in ends)
            yield instead if wrong and instead is not None else token


def _draw(key: bytes, purpose: int, index: int) -> int:
    """Return a number of 64 bits that depends on the arguments alone."""
    return int.from_bytes(blake2b(index.to_bytes(8), key=key, digest_size=8, person=bytes((purpose,))).digest())
