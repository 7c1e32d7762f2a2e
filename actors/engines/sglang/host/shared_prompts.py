"""Waiting prompts with the same beginning: one request computes it, and the others then find it in the cache.

SGLang computes as many waiting prompts in one step as fit, so a burst of requests with one beginning, which is in no
cache yet, computes it once each; its policy `lpm` avoids that where nearly nothing of a prompt is cached, and otherwise
does the same. Here a request waits for the next step if the present one, or the last one whose result is not known yet,
computes at least `SHARED_MIN` tokens that it would compute as well. Routers expect it so: what a worker is about to
compute counts as cached there.

A wait may be in vain, since caches differ in what of a prompt they keep and find. So a request that has found nothing
more after `WAITS_MAX` waits is computed, whatever is computed beside it. It loses nothing by a wait: later requests may
take part in the step, but not its KV memory and its slot, and none of them may begin a prompt that takes several steps.
Every rank of an engine decides the same, since all see the same requests in the same steps. Written for SGLang 0.5.23;
called in the scheduler's process.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from attrs import define, field, frozen

from protocol.cost import SHARED_MIN

WAITS_MAX = 2  # without finding more: a scheduler that runs ahead knows the result of a step one step later


class Sampling(Protocol):
    """SGLang's `SamplingParams`."""

    max_new_tokens: int


class Request(Protocol):
    """SGLang's `Req`; the step that it is in computes its tokens from `prefix_len` to `extend_end`."""

    prefix_len: int
    extend_end: int | None
    extra_key: str | None
    cache_salt: str | None
    positional_embed_overrides: object
    espalier_waits: tuple[int, int]  # the longest `prefix_len` that it has waited at, and how often it has at that

    @property
    def full_untruncated_fill_ids(self) -> array[int]: ...  # noqa: D102  # names of SGLang
    @property
    def output_ids(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def sampling_params(self) -> Sampling: ...  # noqa: D102
    def _compute_max_prefix_len(self, input_len: int, /) -> int: ...


class Cache(Protocol):
    """SGLang's prefix cache; some have no `disable`, and find nothing again."""

    def supports_mamba(self) -> bool: ...  # noqa: D102
    def supports_swa(self) -> bool: ...  # noqa: D102


class Budget(Protocol):
    """The KV memory that is left for a step."""

    total_offset: int


class Batch(Protocol):
    """SGLang's `ScheduleBatch`; of a step with prompts and answers, `decoding_reqs` are those of answers."""

    decoding_reqs: Sequence[object] | None

    @property
    def reqs(self) -> Sequence[Request]: ...  # noqa: D102


class Adder(Protocol):
    """SGLang's `PrefillAdder`, which collects the requests of one step."""

    page_size: int
    rem_chunk_tokens: int | None
    max_running_requests: int | None
    preempt_list: Sequence[object]

    @property
    def tree_cache(self) -> Cache: ...  # noqa: D102
    @property
    def running_batch(self) -> Batch | None: ...  # noqa: D102
    @property
    def memory_budget(self) -> Budget: ...  # noqa: D102
    @property
    def can_run_list(self) -> Sequence[Request]: ...  # noqa: D102
    def add_one_req(self, req: Request, /, *arguments: object, **named: object) -> object: ...  # noqa: D102


class Scheduler(Protocol):
    """SGLang's `Scheduler`, which forms steps."""

    dllm_config: object
    min_free_slots_delayer: object

    @property
    def tree_cache(self) -> Cache: ...  # noqa: D102
    def _get_new_batch_prefill_raw(self, *arguments: object, **named: object) -> tuple[Batch | None, object]: ...


class Results(Protocol):
    """SGLang's `AddReqResult`."""

    CONTINUE: object
    NO_TOKEN: object
    OTHER: object


@frozen(eq=False)
class Computed:
    """The part of a prompt that a step computes. It is in the cache once the request has got a token of that step."""

    tokens: array[int]
    start: int
    end: int
    keys: tuple[str | None, str | None]
    output_ids: Sequence[int]
    outputs: int  # when the step began

    @classmethod
    def by(cls, req: Request) -> Computed:
        """Return what is computed of a request that is in a step."""
        keys, output_ids = (req.extra_key, req.cache_salt), req.output_ids
        end = req.prefix_len if req.extend_end is None else req.extend_end
        return cls(req.full_untruncated_fill_ids, req.prefix_len, end, keys, output_ids, len(output_ids))

    @property
    def is_known(self) -> bool:
        """Whether the result of the step is known."""
        return len(self.output_ids) > self.outputs

    def includes(self, req: Request, end: int) -> bool:
        """Return whether these are the tokens of another prompt up to `end`, and all before them are the same."""
        if not self.start < end <= min(self.end, len(self.tokens)) or self.keys != (req.extra_key, req.cache_salt):
            return False
        tokens = req.full_untruncated_fill_ids
        return self.tokens[end - 1] == tokens[end - 1] and self.tokens[:end] == tokens[:end]


@define(eq=False)
class _Steps:
    """The prompts of the last step, and of the one that an adder collects now."""

    last: list[Computed] = field(factory=list)
    adder: Adder | None = None
    now: list[Computed] = field(factory=list)  # of both steps
    waiting: int = 0  # for them
    shared: bool = False  # by requests of later steps

    def begin(self, adder: Adder) -> None:
        if adder is not self.adder:
            unknown = (computed for computed in self.last if not computed.is_known)
            self.adder, self.waiting = adder, 0
            self.now = [*unknown, *_computed(adder.can_run_list)]

    def end(self, batch: Batch | None) -> None:
        self.adder, self.now = None, []
        if batch is not None:
            answers = {id(req) for req in batch.decoding_reqs or ()}
            self.last = _computed([req for req in batch.reqs if id(req) not in answers])


def compute_once(
    scheduler: type[Scheduler], adder_class: type[Adder], results: Results, answer_max: int, stages: Callable[[], int]
) -> None:
    """Let the scheduler of this process compute the common beginning of waiting prompts once; to be called once.

    `answer_max` are the tokens that SGLang reserves for an answer, however long it may become; `stages` returns how
    many the engine's pipeline has: with more than one too many steps are on their way for a request to wait for them.
    """
    form, add, steps = scheduler._get_new_batch_prefill_raw, adder_class.add_one_req, _Steps()  # noqa: SLF001

    def formed(self: Scheduler, *arguments: object, **named: object) -> tuple[Batch | None, object]:
        steps.shared = stages() == 1 and _shares(self)
        batch, running = form(self, *arguments, **named)
        steps.end(batch)
        return batch, running

    def add_one_req(adder: Adder, req: Request, /, *arguments: object, **named: object) -> object:
        steps.begin(adder)
        if steps.shared and waits(adder, req, steps.now):
            steps.waiting += 1
            adder.memory_budget.total_offset += _needed(adder, req, answer_max)
            return results.CONTINUE
        if steps.waiting and not _may_pass(adder, req, steps.waiting):
            return results.OTHER
        before = len(adder.can_run_list)
        result = add(adder, req, *arguments, **named)
        steps.now += _computed(adder.can_run_list[before:])
        if result is results.NO_TOKEN and steps.waiting:
            return results.OTHER  # else the scheduler would add none before a running request ends
        return result

    scheduler._get_new_batch_prefill_raw = formed  # type: ignore[method-assign]  # noqa: SLF001
    adder_class.add_one_req = add_one_req  # type: ignore[method-assign]


def waits(adder: Adder, req: Request, computed: Sequence[Computed]) -> bool:
    """Return whether a request is to wait for what steps compute, and count that it does."""
    tokens, page = req.full_untruncated_fill_ids, adder.page_size
    end = (req.prefix_len + max(SHARED_MIN, page)) // page * page
    if end > req._compute_max_prefix_len(len(tokens)) or not _is_cached(req) or adder.preempt_list:  # noqa: SLF001
        return False  # it would not look for them in the cache, or others have made room for it
    place, count = getattr(req, "espalier_waits", (-1, 0))
    count = count if req.prefix_len <= place else 0
    if count >= WAITS_MAX or not any(each.includes(req, end) for each in computed):
        return False
    req.espalier_waits = max(place, req.prefix_len), count + 1
    return True


def _shares(scheduler: Scheduler) -> bool:
    """Whether what a step computes is found by the requests of the next one, or of the one after it."""
    cache = scheduler.tree_cache
    if getattr(cache, "disable", True) or cache.supports_mamba() or cache.supports_swa():
        return False  # nothing is found again, or not all; or a request that waits holds a state
    if getattr(cache, "buffer_pipeline", None) is not None or scheduler.dllm_config is not None:
        return False
    return scheduler.min_free_slots_delayer is None  # it would delay those that have waited


def _may_pass(adder: Adder, req: Request, waiting: int) -> bool:
    """Whether a request may be added though earlier ones wait: it leaves them a slot, and ends in this step."""
    if (chunk := adder.rem_chunk_tokens) is not None and len(req.full_untruncated_fill_ids) - req.prefix_len > chunk:
        return False
    running = 0 if adder.running_batch is None else len(adder.running_batch.reqs)
    slots = adder.max_running_requests
    return slots is None or running + len(adder.can_run_list) + waiting < slots


def _needed(adder: Adder, req: Request, answer_max: int) -> int:
    """Return the KV memory that SGLang reserves for a request, in tokens."""
    prompt = len(req.full_untruncated_fill_ids) - req.prefix_len
    answer = max(0, min(req.sampling_params.max_new_tokens - len(req.output_ids), answer_max))
    return prompt + answer + adder.page_size


def _computed(reqs: Sequence[Request]) -> list[Computed]:
    return [Computed.by(req) for req in reqs if _is_cached(req)]


def _is_cached(req: Request) -> bool:
    """Whether the prompt of a request is found in the cache by others, and it finds others' there."""
    return req.positional_embed_overrides is None and not getattr(req, "skip_radix_cache_insert", False)
