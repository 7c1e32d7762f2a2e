"""Records of the experts of an SGLang engine: its scheduler counts, and writes what it has counted into a file.

SGLang answers a wrong order of its operations with zeros or a line in its log, and a model that records nothing with
the end of the scheduler. So `RecordState` decides what is legal, and an engine without a recorder has no handlers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import torch
from attrs import define, field
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from actors.engines.expert_record import RecordState, record_of, write_files
from actors.engines.sglang.host.kept_files import KeptFiles
from protocol.errors import EngineRefused
from protocol.messages.engine import Done
from protocol.messages.experts import DumpExpertRecord, ExpertRecord, StartExpertRecord, StopExpertRecord
from protocol.messages.kind import Message

DUMP_BYTES_MAX = 256 * 1024 * 1024  # of 1,000 steps, 61 layers and 256 experts it has 62 MB
DUMP_PREFIX = "expert_distribution_recorder_"  # of SGLang's own files


@define(eq=False)
class ExpertRecords:
    """The records of one engine, whose experts are shared by `ranks` in their order; 1 if they lie otherwise."""

    manager: TokenizerManager
    files: KeptFiles
    ranks: int
    _state: RecordState = field(factory=RecordState)
    _lock: asyncio.Lock = field(factory=asyncio.Lock)

    @property
    def handlers(self) -> Mapping[type[Message], Callable[[Message], Awaitable[Message]]]:
        """The handlers of its operations."""
        return {StartExpertRecord: self._start, StopExpertRecord: self._stop, DumpExpertRecord: self._dump}

    async def _start(self, _: Message) -> Done:
        async with self._lock:
            self._state.start()
            await self.manager.start_expert_distribution_record()
        return Done()

    async def _stop(self, _: Message) -> Done:
        async with self._lock:
            self._state.stop()
            await self.manager.stop_expert_distribution_record()
        return Done()

    async def _dump(self, _: Message) -> ExpertRecord:
        async with self._lock:
            self._state.check_dump()
            self.files.remove(DUMP_PREFIX)
            self.files.begin(DUMP_PREFIX, DUMP_BYTES_MAX)
            await self.manager.dump_expert_distribution_record()
            self._state.dumped()
            return await asyncio.to_thread(self._record)

    def _record(self) -> ExpertRecord:
        """Return the record in SGLang's file, and write it as files that others can read; raises `EngineRefused`."""
        try:
            (dump,) = self.files.named(DUMP_PREFIX)
            # A pickle with nothing but tensors and numbers: no code in it is run.
            loaded = torch.load(self.files.folder / dump, weights_only=True, map_location="cpu")
            by_step = loaded["logical_count"]
            counts, steps = by_step.sum(dim=0).tolist(), int(by_step.flatten(1).any(dim=1).sum())
        except (OSError, ValueError, KeyError) as error:
            raise EngineRefused(f"the record was lost: {type(error).__name__}: {error}") from error
        finally:
            self.files.remove(DUMP_PREFIX)
            self.files.finish(DUMP_PREFIX)
        now = time.time_ns() // 1_000_000
        name = f"experts-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now // 1000))}-{now % 1000:03}"
        names = write_files(self.files, name, counts)
        self.files.trim()
        return record_of(counts, steps, names, self.ranks)
