"""LoRA adapters of a model: their names in requests, and the operations that load, unload and list them.

An adapter is known by its name and by the digest of its files, since two engines may have loaded different files under
one name. Prompts with different adapters have different KV caches, so each adapter has a cache namespace of its own.
"""

from __future__ import annotations

import re

from attrs import frozen

from protocol.messages.kind import Kind, Message
from protocol.messages.leaving import MemoryTag
from protocol.messages.operation import EngineOperation, OperationScope

NAME_LENGTH_MAX = 64
ADAPTERS_MAX = 1024
"""The most adapters of one engine."""
ADAPTER_MARK = ":"
"""The character between the name of a model and that of its adapter, in the `model` of a request."""
UNLOAD_WAIT_MAX_S = 60.0
"""The longest wait for the requests of an adapter before it is unloaded."""
LOADED_WITHIN_S = 120.0

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{NAME_LENGTH_MAX - 1}}}")
_NAMESPACE, _END = "adapter:", "/"


@frozen
class Adapter:
    """One adapter; `digest` is that of its files."""

    name: str
    digest: str


def name_mistake(name: str) -> str | None:
    """Return what is wrong with the name of an adapter, None if nothing is."""
    if _NAME.fullmatch(name):
        return None
    return (
        f"must be 1 to {NAME_LENGTH_MAX} letters, digits, '_', '.' and '-', the first a letter or a digit,"
        f" got {name!r:.80}"
    )


def adapter_salt(adapter: Adapter | None, cache_salt: str | None) -> str | None:
    """Return the salt of the prefix cache for an adapter and a client's `cache_salt`.

    Different pairs have different salts: without an adapter only a salt that looks like one of an adapter is changed.
    """
    if adapter is None and not (cache_salt or "").startswith(_NAMESPACE):
        return cache_salt
    own = "" if adapter is None else f"{adapter.name}@{adapter.digest}"
    return f"{_NAMESPACE}{own}" if cache_salt is None else f"{_NAMESPACE}{own}{_END}{cache_salt}"


# Operations ---------------------------------------------------------------------------


@frozen
class LoadAdapter(Message):
    """Load the adapter in a folder of the engine's node under a name; the result is `AdapterList`.

    `model` names its model; None: the only one.
    """

    lora_name: str
    lora_path: str
    model: str | None = None


@frozen
class UnloadAdapter(Message):
    """Unload an adapter once its requests have ended; the result is `AdapterList`.

    New requests for it are refused at once. If its requests have not ended after `wait_s`, it stays loaded.
    """

    lora_name: str
    wait_s: float = 30.0  # up to `UNLOAD_WAIT_MAX_S`
    model: str | None = None


@frozen
class ListAdapters(Message):
    """Ask for the loaded adapters of an engine; the result is `AdapterList`."""


@frozen
class LoadedAdapter:
    """One loaded adapter: its folder on the engine's node, its rank, and the number of requests that use it."""

    name: str
    digest: str
    folder: str
    rank: int = 0
    requests: int = 0


@frozen
class AdapterList(Message):
    """The loaded adapters of an engine, by name, and the most that it may have."""

    adapters: tuple[LoadedAdapter, ...]
    loaded_max: int = 0


LACKING = "it needs [engine.NAME.adapters] in its configuration"

OPERATIONS = (
    EngineOperation(
        kind=Kind(85, LoadAdapter, result=AdapterList),
        result_kind=Kind(88, AdapterList),
        name="load-adapter",
        participle="given the adapter",
        summary="Load a LoRA adapter into every engine of a model.",
        within_s=LOADED_WITHIN_S,
        path="/load_lora_adapter",
        scope=OperationScope.MODEL,
        changes_info=True,
        needs=(MemoryTag.WEIGHTS,),
        lacking=LACKING,
        example={"lora_name": "pirate", "lora_path": "/adapters/pirate"},
    ),
    EngineOperation(
        kind=Kind(86, UnloadAdapter, result=AdapterList),
        name="unload-adapter",
        participle="freed of the adapter",
        summary="Unload a LoRA adapter from every engine of a model, once its requests have ended.",
        within_s=UNLOAD_WAIT_MAX_S + 30.0,
        path="/unload_lora_adapter",
        scope=OperationScope.MODEL,
        changes_info=True,
        needs=(MemoryTag.WEIGHTS,),
        lacking=LACKING,
        example={"lora_name": "pirate"},
    ),
    EngineOperation(
        kind=Kind(87, ListAdapters, result=AdapterList),
        name="list-adapters",
        participle="asked for its adapters",
        summary="The loaded LoRA adapters of every engine.",
        within_s=5.0,
        path="/lora_adapters",
        methods=("GET",),
    ),
)
