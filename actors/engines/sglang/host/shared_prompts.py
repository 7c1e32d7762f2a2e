"""Prompts with the same beginning that wait together: the first computes it, and the others then find it in the cache.

SGLang computes as many waiting prompts in one step as fit, so a burst of requests with one beginning, which is in no
cache yet, computes it once each; its policy `lpm` avoids that where nearly nothing of a prompt is cached, and otherwise
does the same. Here a request waits for the next step if the present one, or the last one whose result is not known yet,
computes at least `SHARED_MIN` tokens that it would compute as well. Routers expect it so: what a worker is about to
compute counts as cached there.

A wait may be in vain, since caches differ in what of a prompt they keep and find. So a request that has found nothing
more after `WAITS_MAX` waits is computed, whatever is computed beside it. What it needs stays reserved in a step that it
waits for. Every rank of an engine decides the same, since all see the same requests in the same steps. Written for
SGLang 0.5.23; called in the scheduler's process.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from attrs import define, field, frozen

SHARED_MIN = 32  # tokens, as of SGLang's `lpm`; fewer cost less than another step
WAITS_MAX = 2  # without finding more: a scheduler that runs ahead knows the result of a step one step later
ANSWER_MAX = 4096  # tokens that SGLang reserves for an answer, however long it may become


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
    espalier_waits: tuple[int, int]  # its `prefix_len` when it waited last, and how often it has waited at that

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


class Engine(Protocol):
    """The part of SGLang's `PrefillAdder` that is the same in each step."""

    page_size: int
    dllm_config: object

    @property
    def tree_cache(self) -> Cache: ...  # noqa: D102


class Adder(Engine, Protocol):
    """SGLang's `PrefillAdder`, which collects the requests of one step."""

    @property
    def memory_budget(self) -> Budget: ...  # noqa: D102
    @property
    def can_run_list(self) -> Sequence[Request]: ...  # noqa: D102
    def add_one_req(self, req: Request, /, *arguments: object, **named: object) -> object: ...  # noqa: D102


class Batch(Protocol):
    """SGLang's `ScheduleBatch`."""

    @property
    def reqs(self) -> Sequence[Request]: ...  # noqa: D102


class Scheduler(Protocol):
    """SGLang's `Scheduler`, which forms steps."""

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
        if not self.start < end <= self.end or self.keys != (req.extra_key, req.cache_salt):
            return False
        tokens = req.full_untruncated_fill_ids
        return self.tokens[end - 1] == tokens[end - 1] and self.tokens[:end] == tokens[:end]


@define(eq=False)
class _Steps:
    """The prompts of the last step, and of the one that an adder collects now."""

    last: list[Computed] = field(factory=list)
    adder: Adder | None = None
    now: list[Computed] = field(factory=list)  # of both steps
    any_waits: bool = False

    def begin(self, adder: Adder) -> None:
        if adder is not self.adder:
            unknown = (computed for computed in self.last if not computed.is_known)
            self.adder, self.any_waits = adder, False
            self.now = [*unknown, *map(Computed.by, adder.can_run_list)]

    def end(self, reqs: Sequence[Request] | None) -> None:
        self.adder, self.now = None, []
        if reqs is not None:
            self.last = [*map(Computed.by, reqs)]


def compute_once(scheduler: type[Scheduler], adder_class: type[Adder], results: Results) -> None:
    """Let the scheduler of this process compute the common beginning of waiting prompts once; to be called once."""
    form, add, steps = scheduler._get_new_batch_prefill_raw, adder_class.add_one_req, _Steps()  # noqa: SLF001

    def formed(self: Scheduler, *arguments: object, **named: object) -> tuple[Batch | None, object]:
        batch, running = form(self, *arguments, **named)
        steps.end(None if batch is None else batch.reqs)
        return batch, running

    def add_one_req(adder: Adder, req: Request, /, *arguments: object, **named: object) -> object:
        steps.begin(adder)
        if waits(adder, req, steps.now):
            steps.any_waits = True
            adder.memory_budget.total_offset += _needed(adder, req)  # which no later request may take
            return results.CONTINUE
        before = len(adder.can_run_list)
        result = add(adder, req, *arguments, **named)
        steps.now += map(Computed.by, adder.can_run_list[before:])
        if result is results.NO_TOKEN and steps.any_waits:
            return results.OTHER  # else the scheduler would add none before a running request ends
        return result

    scheduler._get_new_batch_prefill_raw = formed  # type: ignore[method-assign]  # noqa: SLF001
    adder_class.add_one_req = add_one_req  # type: ignore[method-assign]


def waits(engine: Engine, req: Request, computed: Sequence[Computed]) -> bool:
    """Return whether a request is to wait for what steps compute, and count that it does."""
    cache, tokens, page = engine.tree_cache, req.full_untruncated_fill_ids, engine.page_size
    if getattr(cache, "disable", True) or cache.supports_mamba() or cache.supports_swa():
        return False  # nothing is found again, or not all; or a request that waits holds a state
    end = (req.prefix_len + max(SHARED_MIN, page)) // page * page
    if end > req._compute_max_prefix_len(len(tokens)):  # noqa: SLF001
        return False  # it would not look for them in the cache
    if engine.dllm_config is not None or req.positional_embed_overrides is not None:
        return False
    place, count = getattr(req, "espalier_waits", (-1, 0))
    count = count if place == req.prefix_len else 0
    if count >= WAITS_MAX or not any(each.includes(req, end) for each in computed):
        return False
    req.espalier_waits = req.prefix_len, count + 1
    return True


def _needed(adder: Adder, req: Request) -> int:
    """Return the KV memory that SGLang reserves for a request, in tokens."""
    prompt = len(req.full_untruncated_fill_ids) - req.prefix_len
    answer = max(0, min(req.sampling_params.max_new_tokens - len(req.output_ids), ANSWER_MAX))
    return prompt + answer + adder.page_size
