"""Prompts with the same beginning that wait together: the first computes it, and the others then find it in the cache.

SGLang computes as many waiting prompts in one step as fit, so a burst of requests with one beginning, which is in no
cache yet, computes it once each; its policy `lpm` avoids that where nearly nothing of a prompt is cached, and otherwise
does the same. Here a request waits for the next step if the present one, or one whose result is not known yet, computes
at least `SHARED_MIN` tokens that it would compute as well. It waits for one step at a time, and only for tokens that
this step brings into the cache. Routers expect it so: what a worker is about to compute counts as cached there.

Every rank of an engine decides the same, since all see the same requests. Written for SGLang 0.5.23; called in the
scheduler's process.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

SHARED_MIN = 32  # tokens, as of SGLang's `lpm`; fewer cost less than another step


class Request(Protocol):
    """SGLang's `Req`; the step that it is in computes its tokens from `prefix_len` to `extend_end`."""

    prefix_len: int
    extend_end: int | None
    extra_key: str | None
    cache_salt: str | None
    positional_embed_overrides: object

    @property
    def full_untruncated_fill_ids(self) -> array[int]: ...  # noqa: D102  # names of SGLang
    @property
    def output_ids(self) -> Sequence[int]: ...  # noqa: D102
    def _compute_max_prefix_len(self, input_len: int, /) -> int: ...


class Batch(Protocol):
    """SGLang's `ScheduleBatch`."""

    @property
    def reqs(self) -> Sequence[Request]: ...  # noqa: D102


class Cache(Protocol):
    """SGLang's prefix cache; some have no `disable`, and find nothing again."""

    def supports_mamba(self) -> bool: ...  # noqa: D102


class Adder(Protocol):
    """SGLang's `PrefillAdder`, which collects the requests of one step."""

    page_size: int
    dllm_config: object

    @property
    def tree_cache(self) -> Cache: ...  # noqa: D102
    @property
    def can_run_list(self) -> Sequence[Request]: ...  # noqa: D102
    @property
    def running_batch(self) -> Batch | None: ...  # noqa: D102


class AddingAdder(Adder, Protocol):
    """The same, with the method that is changed here."""

    def add_one_req(self, req: Request, /, *arguments: object, **named: object) -> object: ...  # noqa: D102


def compute_once(adder_class: type[AddingAdder], go_on: object) -> None:
    """Let the scheduler of this process compute the common beginning of waiting prompts once; to be called once.

    `go_on` is what an adder returns if more requests may be added.
    """
    add = adder_class.add_one_req

    def add_one_req(adder: AddingAdder, req: Request, /, *arguments: object, **named: object) -> object:
        if shares(adder, req):
            return go_on  # it keeps its place
        return add(adder, req, *arguments, **named)

    adder_class.add_one_req = add_one_req  # type: ignore[method-assign]


def shares(adder: Adder, req: Request) -> bool:
    """Return whether a step that has not ended computes tokens which the request would compute as well."""
    cache, tokens, page = adder.tree_cache, req.full_untruncated_fill_ids, adder.page_size
    if getattr(cache, "disable", True) or cache.supports_mamba() or adder.dllm_config is not None:
        return False  # nothing is found again, or a request that waits holds a state
    end = (req.prefix_len + max(SHARED_MIN, page)) // page * page
    if req.positional_embed_overrides is not None or end > req._compute_max_prefix_len(len(tokens)):  # noqa: SLF001
        return False  # it would not look for them in the cache
    running = () if adder.running_batch is None else adder.running_batch.reqs
    unknown = (other for other in running if not other.output_ids)  # what they have computed is in no cache yet
    return any(_computes(other, req, end) for other in chain(adder.can_run_list, unknown))


def _computes(other: Request, req: Request, end: int) -> bool:
    """Whether another request computes the tokens of this one's prompt before `end`, and has the same before them."""
    if other is req or other.extend_end is None or not other.prefix_len < end <= other.extend_end:
        return False
    tokens, others = req.full_untruncated_fill_ids, other.full_untruncated_fill_ids
    if others[end - 1] != tokens[end - 1] or (other.extra_key, other.cache_salt) != (req.extra_key, req.cache_salt):
        return False
    return others[:end] == tokens[:end]
