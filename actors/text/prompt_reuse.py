"""The use of a prompt cache by a request, and the checks in service that its ids are those of whole texts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Self, TypeAlias

import trio
from attrs import define, frozen

from actors.kit.offload import RunInThread
from actors.text.model import TextModel
from actors.text.prompt_cache import Boundary, EncodedPrompt, Found, PromptCache
from protocol.errors import Overloaded
from protocol.messages.adapters import adapter_salt
from protocol.messages.text import Respond, Tokenize

Start: TypeAlias = Callable[[Callable[[], Awaitable[None]]], None]
"""Starts a task."""

CHECKED_ONE_OF = 1_024
"""One of so many conversations with reused ids is encoded whole as well, the first one included."""

OWNER = "self-check"  # a queue of its own among those of the keys


@define(eq=False)
class SelfCheck:
    """Compares ids with those of the whole text, beside the request that uses them, one text at a time.

    `run_in_thread` runs long work. A difference disables the cache.
    """

    cache: PromptCache
    start: Start
    run_in_thread: RunInThread
    _seen: int = 0
    _running: bool = False

    @classmethod
    def of(cls, cache: PromptCache | None, start: Start, run_in_thread: RunInThread) -> Self | None:
        """Return the checks of a cache, None without one."""
        return None if cache is None else cls(cache, start, run_in_thread)

    def sample(self, model: TextModel, text: str, encoded: EncodedPrompt) -> None:
        """Check these ids of a text, if it is their turn."""
        if not encoded.reused or model.boundary is None:
            return
        self._seen += 1
        if self._seen % CHECKED_ONE_OF == 1 and not self._running:
            self._running = True
            verify = partial(self.cache.verify, text, model.boundary, encoded.tokens, model.encode_rendered)
            self.start(partial(self._check, verify, len(text)))

    async def _check(self, verify: Callable[[], None], size: int) -> None:
        try:
            await self.run_in_thread(verify, owner=OWNER, size=size)
        except Overloaded:
            await trio.lowlevel.checkpoint()  # requests come first
        finally:
            self._running = False


@frozen
class PromptReuse:
    """The cache for one request; it shares ids with requests of the same owner, namespace and page sizes.

    The namespace is the salt of its block hashes.
    """

    check: SelfCheck
    owner: str
    namespace: str | None
    page_sizes: tuple[int, ...]

    @classmethod
    def of(cls, request: Respond | Tokenize, check: SelfCheck | None, page_sizes: tuple[int, ...]) -> Self | None:
        """Return the use of a cache by a request, None without a cache."""
        if check is None:
            return None
        salt = adapter_salt(request.adapter, request.cache_salt) if isinstance(request, Respond) else None
        return cls(check, request.owner, salt, page_sizes)

    def find(self, text: str, boundary: Boundary) -> Found:
        """Return what is known of the ids of a text."""
        return self.check.cache.find(text, boundary, self.owner, self.namespace, self.page_sizes)

    def complete(self, found: Found, model: TextModel, tokens_max: int) -> EncodedPrompt:
        """Return all ids of a text; raises `TooManyTokens` once it certainly has more than `tokens_max`."""
        return self.check.cache.complete(found, model.encode_rendered, tokens_max)
