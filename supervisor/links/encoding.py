"""Encoding for a link, with its checks: bodies fit a frame, replies fit their request, deadlines are the time left.

The clocks of two nodes differ, so a deadline crosses as milliseconds from now. A reply must be allowed by the row of
its request in the message table and have possible numbers: the other end may be wrong, and the asker relies on both.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import ceil, inf

import trio
from attrs import define

from protocol.errors import (
    ERRORS_BY_CODE,
    ActorLost,
    AskerLeft,
    InternalError,
    PeerViolation,
    RequestError,
    TooLarge,
    from_code,
)
from protocol.link import codec
from protocol.link.frames import FRAME_BYTES_MAX, STEP_TOKENS_MAX, Fail, Item, Step
from protocol.messages.cluster import COUNT_MAX
from protocol.messages.generation import HAND_OFF_BYTES_MAX, Finished, Generate, PromptScores, Started, Tokens
from protocol.messages.kind import Message
from protocol.messages.kv_events import REPLY_BYTES_MAX, WatchBlocks
from protocol.messages.media import Encode, Encoded, MediaItem
from protocol.messages.operations import GrammarChecked
from protocol.weight_versions import VERSION_CHARACTERS_MAX

log = logging.getLogger(__name__)

WITHIN_MS_MAX = 2**31 - 1
BODY_BYTES_MAX = FRAME_BYTES_MAX - 4096  # the rest of a frame is short
TOKEN_IDS = 2**31  # ids from 0 to below this
FREE_REPLIES_MAX = 4096  # replies without credit to one request
# Texts of other nodes that clients get.
DETAIL_CHARACTERS_MAX, PARAM_CHARACTERS_MAX = 4096, 256
MATCHED_CHARACTERS_MAX = 256


@define(eq=False)
class ReplyRules:
    """The replies that may still answer one request, by its row."""

    replies: tuple[type[object], ...]
    result: type[object]
    first: type[object] | None  # the reply that comes once, before all others and before the result
    takes_tokens: bool  # `replies` has `Tokens`
    body_bytes_max: int = BODY_BYTES_MAX  # the limit of a reply
    likeliest_max: int | None = None  # requested alternatives a token; None: no log probabilities
    scored_tokens: int | None = None  # of the prompt, with as many alternatives; None: no log probabilities
    tokens_max: int = COUNT_MAX  # the limit of the answer
    free_left: int = FREE_REPLIES_MAX  # replies without units that may still come
    begun: bool = False  # `first` has come, or there is none
    left: bool = False  # the asker has left: a reply with an attachment is dropped on its way, `first` as well
    item: MediaItem | None = None  # the item to encode
    attached: memoryview | None = None  # the attachment of the next result
    shared: bool = False  # tensors came in shared memory of the other end
    failure: RequestError | None = None  # the error of taking the tensors

    def __attrs_post_init__(self) -> None:
        self.begun = self.first is None

    def reply(self, reply: Message, units: int) -> None:
        """Count a reply; raises `PeerViolation` if the row, the credit or its own numbers forbid it."""
        if self.attached is not None:
            raise PeerViolation(f"a {type(reply).__name__} after the tensors of a result")
        if not isinstance(reply, self.replies) or units != codec.units_of(reply):
            raise PeerViolation(f"a {type(reply).__name__} for {units} units answers what was asked")
        if self.first is not None and self.begun is isinstance(reply, self.first) and not self.left:
            raise PeerViolation(f"a {type(reply).__name__} {'again' if self.begun else 'before an answer has begun'}")
        self.begun = True
        if isinstance(reply, Tokens) and not self._is_possible(reply):
            raise PeerViolation("token ids or log probabilities that cannot be")
        if isinstance(reply, Started):
            self._check_start(reply)
        self.free_left -= not units
        if self.free_left < 0:
            raise PeerViolation(f"more than {FREE_REPLIES_MAX} replies without units")

    def check_size(self, item: Item) -> None:
        """Raise `PeerViolation` for a reply above the limit, before it is decoded."""
        if len(item.body) > self.body_bytes_max:
            raise PeerViolation(f"a reply of {len(item.body)} bytes; the limit is {self.body_bytes_max}")

    def check_attached(self, item: Item) -> None:
        """Raise `PeerViolation` for the attachment of a reply or a result that has none, before its bytes come.

        The attachment of a result comes with an `Item` of its own, without a body or units.
        """
        if item.body:
            codec.check_attached(item.body, item.attached)
        elif self.attached is not None or item.units or self.result not in codec.WITH_TENSORS:
            raise PeerViolation(f"{item.attached} bytes of a result, which is a {self.result.__name__}")

    def attach(self, data: memoryview) -> None:
        """Keep the attachment of the result: no reply may follow. Raises `PeerViolation` if it is empty."""
        if not data:
            raise PeerViolation("an Item with neither a reply nor the tensors of a result")
        self.attached, self.takes_tokens = data, False

    def end(self, result: Message | None) -> None:
        """Raise `PeerViolation` if the row or the result's own numbers forbid it."""
        if not isinstance(result, self.result):
            raise PeerViolation(f"a {type(result).__name__} ends an answer that ends in a {self.result.__name__}")
        if isinstance(result, Encoded) and (self.item is None or _identity(result.item) != _identity(self.item)):
            raise PeerViolation("another item was encoded than the one that was asked for")
        if not (self.begun or self.left):
            raise PeerViolation(f"a {type(result).__name__} ends an answer that has not begun")
        if isinstance(result, Finished):
            self._check_end(result)
        if isinstance(result, GrammarChecked) and len(result.refusal) > DETAIL_CHARACTERS_MAX:
            raise PeerViolation(f"a grammar is refused in {len(result.refusal)} characters")

    def check_gathered(self, stream: int) -> None:
        """Raise `PeerViolation` if tokens without log probabilities may not answer the request on `stream` now."""
        if not self.takes_tokens:
            raise PeerViolation(f"tokens on stream {stream}, where a {self.result.__name__} was asked for")
        begun = self.begun or self.left
        if not begun or self.likeliest_max is not None:
            why = "without their log probabilities" if begun else "before its answer has begun"
            raise PeerViolation(f"tokens on stream {stream} {why}")

    def _check_start(self, started: Started) -> None:
        if not 0 <= started.cached_tokens <= COUNT_MAX:
            raise PeerViolation("a number of cached tokens that cannot be")
        if len(started.hand_off) > HAND_OFF_BYTES_MAX:
            raise PeerViolation(f"a hand-off of {len(started.hand_off)} bytes; the limit is {HAND_OFF_BYTES_MAX}")
        if started.scores is not None and not self._are_possible(started.scores):
            raise PeerViolation("log probabilities of a prompt that were not asked for")
        if len(started.version) > VERSION_CHARACTERS_MAX:
            raise PeerViolation(f"weights of a version of {len(started.version)} characters")

    def _check_end(self, finished: Finished) -> None:
        usage, matched = finished.usage, finished.matched
        counts = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        if min(counts) < 0 or max(counts) > COUNT_MAX or usage.completion_tokens > self.tokens_max:
            raise PeerViolation("a usage that cannot be")
        if isinstance(matched, str) and len(matched) > MATCHED_CHARACTERS_MAX:
            raise PeerViolation(f"an answer was ended by a text of {len(matched)} characters")
        if isinstance(matched, int) and not 0 <= matched < TOKEN_IDS:
            raise PeerViolation("an answer was ended by a token id that cannot be")

    def _is_possible(self, tokens: Tokens) -> bool:
        ids = tokens.ids
        if tokens.version and (ids or len(tokens.version) > VERSION_CHARACTERS_MAX):
            return False
        if self.likeliest_max is not None:
            if len(tokens.logprobs) != len(ids) or any(len(each.top) > self.likeliest_max for each in tokens.logprobs):
                return False
            ids += tuple(token for each in tokens.logprobs for token, _ in each.top)
        elif tokens.logprobs:
            return False
        return not ids or (min(ids) >= 0 and max(ids) < TOKEN_IDS)

    def _are_possible(self, scores: PromptScores) -> bool:
        tokens, likeliest = scores.top_ids.shape
        return tokens == self.scored_tokens and likeliest <= (self.likeliest_max or 0)


def check_gathered(step: Step, rules: Mapping[int, ReplyRules]) -> None:
    """Raise `PeerViolation` for a `Step` of another node with too many tokens, impossible ones, or anything else."""
    if step.begun or step.ended or step.logprobs:
        raise PeerViolation("a Step with more than tokens, which only an engine's host may send")
    if not 0 < len(step.tokens) <= STEP_TOKENS_MAX or min(step.counts) < 1:
        raise PeerViolation(f"a Step of {len(step.tokens)} tokens for {len(step.streams)} streams")
    if min(step.tokens) < 0 or max(step.tokens) >= TOKEN_IDS:
        raise PeerViolation("token ids that cannot be")
    for stream in step.streams:
        rules[stream].check_gathered(stream)


def _identity(item: MediaItem) -> tuple[object, ...]:
    return item.modality, item.digest, item.grid, item.tokens, item.seconds_per_grid


def reply_rules(request: Message) -> ReplyRules:
    """Return the rules of the answer to a request; raises `TypeError` for any other message."""
    row = codec.request_row(request)
    assert row.result is not None
    rules = ReplyRules(row.replies, row.result, row.first, issubclass(Tokens, row.replies))
    if isinstance(request, Generate):
        rules.likeliest_max, rules.tokens_max = request.logprobs, request.sampling.tokens_max
        if request.prompt_logprobs:
            rules.scored_tokens = request.scored_tokens
    elif isinstance(request, Encode):
        rules.item = request.item.place
    elif isinstance(request, WatchBlocks):
        rules.body_bytes_max = REPLY_BYTES_MAX
    return rules


def encode_body(message: Message) -> bytes:
    """Return a message's body; raises `TooLarge` if it fits no frame."""
    body = codec.encode(message)
    if len(body) > BODY_BYTES_MAX:
        raise TooLarge(f"a {type(message).__name__} of {len(body)} bytes; the limit of a link is {BODY_BYTES_MAX}")
    return body


def decode_body(body: bytes, attached: memoryview, *, shared: bool = False, remote: bool = False) -> Message:
    """Return the message of a body; raises `PeerViolation` if there is none, or its tensors contradict it."""
    message = codec.decode(body, attached, shared=shared, remote=remote)
    if type(message) in codec.WITH_TENSORS:
        message.check_tensors()
    return message


def attachment(message: Message) -> tuple[memoryview, ...]:
    """Return the attachment of a message; raises `InternalError` for a tensor with too few or too many bytes."""
    try:
        return codec.attached(message)
    except PeerViolation as error:  # a bug in the maker of the message, not of a peer
        log.exception("a %s cannot be sent", type(message).__name__)
        raise InternalError("the node made a mistake; its log has the details") from error


def remaining_ms(until: float) -> int | None:
    """Return the time to a deadline on Trio's clock, None if it is infinite."""
    left_s = until - trio.current_time()  # -inf for a task that is cancelled already
    return None if left_s == inf else ceil(1000 * min(max(0.0, left_s), WITHIN_MS_MAX / 1000))


def fail_frame(stream: int, error: RequestError) -> Fail:
    """Return the frame of an error for the other end."""
    return Fail(stream, error.code, error.detail, error.param)


def request_error(fail: Fail, *, asker_left: bool) -> RequestError:
    """Return the error in a `Fail`.

    It is `ActorLost` if the `Fail` has the code of a left asker without cause, or a gateway's own code: a worker must
    not be able to refuse a client's valid key.
    """
    if fail.code == AskerLeft.code and not asker_left:
        return ActorLost("the answer was ended as if its asker had left")
    if ERRORS_BY_CODE.get(fail.code, RequestError).of_gateway:
        return ActorLost(f"the answer was ended with {fail.code}, which only a gateway may say")
    param = None if fail.param is None else fail.param[:PARAM_CHARACTERS_MAX]
    return from_code(fail.code, fail.detail[:DETAIL_CHARACTERS_MAX], param)
