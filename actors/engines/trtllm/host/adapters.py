"""TensorRT-LLM's side of an engine's LoRA adapters, for which its `LLM` has neither a call to load nor one to unload.

TensorRT-LLM loads an adapter with the first request that has its number, and finds it by the number alone from then
on. So each load has a number of its own, and asks for a token: the files are read at once, and their mistakes are
found. Blocks of KV memory of different numbers are apart. Nothing gives an adapter up: TensorRT-LLM replaces it in the
memory of the GPU by others, and keeps a copy in the memory of the process until its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

from attrs import define, field

from actors.engines.host.served_link import last_line
from actors.engines.trtllm.host.library import CALL_ERRORS, Library, Llm
from actors.engines.trtllm.sampling import NO_END
from protocol.errors import EngineRefused, InternalError, NotReady

FIRST_TOKEN = 0
"""The prompt of the request that loads an adapter."""


@define(eq=False)
class TrtllmAdapterLoader:
    """The adapters inside TensorRT-LLM; implements `actors.engines.host.adapters.AdapterLoader`.

    `end` gets the reason when the engine fails otherwise than by the adapter. No request is asked for unless the engine
    `takes_requests`.
    """

    llm: Llm
    names: Library
    end: Callable[[str], None]
    takes_requests: Callable[[], bool]
    loading: set[int] = field(init=False, factory=set)  # the numbers of those whose request is in the engine
    _numbers: Iterator[int] = field(init=False, factory=lambda: count(1))
    _loaded: dict[str, object] = field(init=False, factory=dict)  # the arguments of their requests by name

    def check_changeable(self) -> None:
        """Take every change."""

    async def load(self, name: str, folder: str) -> None:
        """Have TensorRT-LLM load the adapter in a folder, by a request for one token."""
        if not self.takes_requests():
            raise NotReady("its memory is released")
        number = next(self._numbers)
        self.loading.add(number)
        try:
            lora = self.names.lora_request(lora_name=name, lora_int_id=number, lora_path=folder)
            sampling = self.names.sampling_params(max_tokens=1, end_id=NO_END, pad_id=0, top_k=1, detokenize=False)
            result = self.llm.generate_async(inputs=[FIRST_TOKEN], sampling_params=sampling, lora_request=lora)
            async for _ in result:
                pass
        except (*CALL_ERRORS, self.names.request_error) as error:
            raise EngineRefused(f"TensorRT-LLM did not load the adapter: {error}", param="lora_path") from error
        except Exception as error:
            self.end(f"the engine failed: {last_line(error)}")
            raise InternalError("the engine failed to load the adapter") from error
        finally:
            self.loading.remove(number)
        self._loaded[name] = lora

    async def unload(self, name: str) -> None:
        """Use an adapter no more."""
        del self._loaded[name]

    def lora_request(self, name: str) -> object:
        """Return the argument of `generate_async` for a loaded adapter."""
        return self._loaded[name]
