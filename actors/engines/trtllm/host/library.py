"""TensorRT-LLM as the host uses it: its guarded import, and the types of its calls.

The library has no types to check against where it cannot be installed. So each name that the host uses is a protocol
here, written after NVIDIA's published signatures, and nothing else of the library is touched.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, cast

from actors.engines.trtllm.deltas import GrowingAnswer
from actors.engines.trtllm.log_probabilities import Place
from actors.engines.trtllm.signatures import VERSIONS

if TYPE_CHECKING:
    import torch  # a host of a model of text alone does not import it here

PACKAGE = "tensorrt_llm"
WHERE = (
    "TensorRT-LLM is not installed for {python}: NVIDIA's own index has it, pip install --extra-index-url"
    f" https://pypi.nvidia.com tensorrt-llm=={VERSIONS[-1]}, as wheels for CPython 3.10 and 3.12 with CUDA;"
    " [engine.NAME] python names the interpreter of 3.12 that has it"
)


CALL_ERRORS = (ValueError, TypeError, NotImplementedError)
"""What TensorRT-LLM raises for a request that it does not take."""


class TrtllmOutput(GrowingAnswer, Protocol):
    """One answer of a request; its lists have everything so far."""

    prompt_logprobs: Sequence[Place] | None
    disaggregated_params: object


class Result(Protocol):
    """A request inside the engine, which yields itself after each step."""

    outputs: Sequence[TrtllmOutput]
    cached_tokens: int

    def __aiter__(self) -> AsyncIterator[Result]:
        """Iterate over its steps."""

    def abort(self) -> None:
        """Ask the engine to stop it; nothing acknowledges that."""


class Records(Protocol):
    """Statistics of iterations, or events of KV memory; the iteration ends when none has come for the timeout."""

    def __aiter__(self) -> AsyncIterator[Mapping[str, object]]:
        """Iterate over what is there."""


class Llm(Protocol):
    """`tensorrt_llm.LLM`, as far as the host uses it."""

    def generate_async(self, **arguments: object) -> Result:
        """Start a request."""

    def get_stats_async(self, timeout: float) -> Records:
        """Return the statistics of the iterations since the last call."""

    def get_kv_cache_events_async(self, timeout: float) -> Records:
        """Return the events of KV memory since the last call."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own tokenizer."""

    def preprocess(self, **arguments: object) -> Preprocessed:
        """Return a request's input, as `generate_async` takes it: tokenised, with its images beside it."""

    def shutdown(self) -> None:
        """End the engine."""


class Tokenizer(Protocol):
    """A tokenizer of transformers."""

    def decode(self, token_ids: Sequence[int], **options: object) -> str:
        """Return the text of tokens."""


class Images(Protocol):
    """The images of an input (`MultimodalParams`)."""

    multimodal_input: object
    """Their hashes and places, None if it could not make them."""

    multimodal_data: Mapping[str, object] | None
    """Their tensors, as handles."""


class Preprocessed(Protocol):
    """The input of a request (`PreprocessedInputs`)."""

    prompt_token_ids: Sequence[int]
    multimodal_params: Images | None


class EncodedImage(Protocol):
    """An image inside an encoder."""

    disaggregated_params: Handles | None

    def result(self, timeout: float | None = None) -> EncodedImage:
        """Wait until it is encoded, and return it."""


class Handles(Protocol):
    """The embeddings of an encoder, one handle of memory on this host for each image (`DisaggregatedParams`)."""

    multimodal_embedding_handles: Sequence[Mapping[str, object]] | None


class ImageEncoder(Protocol):
    """`tensorrt_llm.MultimodalEncoder`, as far as the host uses it."""

    def generate_async(self, **arguments: object) -> EncodedImage:
        """Start to encode the images of one request."""

    def shutdown(self) -> None:
        """End the encoder."""


class SharedTensor(Protocol):
    """A tensor in memory of two processes, by a handle; it is opened once."""

    def dump_to_dict(self) -> dict[str, object]:
        """Return its handle."""

    def get_local_view(self) -> torch.Tensor:
        """Return it as a tensor of this process."""


class SharedTensors(Protocol):
    """`SharedTensorContainer`."""

    def from_tensor(self, tensor: torch.Tensor) -> SharedTensor:
        """Share a tensor."""

    def from_dict(self, tensor_info: Mapping[str, object]) -> SharedTensor:
        """Open a handle."""


class CollectiveCall(Protocol):
    """A call of a method of every rank (`LLM._collective_rpc`, which is not published)."""

    def __call__(self, method: str, args: tuple[object, ...]) -> list[object]:
        """Return what the ranks return; blocks until they have done it."""


class Make(Protocol):
    """A class of the library, called with keywords."""

    def __call__(self, **fields: object) -> object:
        """Return an object of it."""


class Library:
    """The names of the imported package."""

    def __init__(self) -> None:
        package, self.llmapi = import_module(PACKAGE), import_module(f"{PACKAGE}.llmapi")
        self.version = str(vars(package).get("__version__", ""))
        self._llm = cast("Make", package.LLM)
        self.sampling_params = cast("Make", package.SamplingParams)
        self.guided_decoding = cast("Make", self.llmapi.GuidedDecodingParams)
        self.disaggregated_params = cast("Make", self.llmapi.DisaggregatedParams)
        self.logprob = cast("Make", import_module(f"{PACKAGE}.executor.result").Logprob)
        self.lora_request = cast("Make", import_module(f"{PACKAGE}.executor.request").LoRARequest)
        self.request_error = _request_error()

    def scheduling_params(self, **fields: object) -> object:
        """Return an object by which a request names its rank; the oldest versions have no such class."""
        return cast("Make", import_module(f"{PACKAGE}.scheduling_params").SchedulingParams)(**fields)

    def start(self, arguments: Mapping[str, object]) -> Llm:
        """Start an engine; blocks until it is there."""
        return cast("Llm", self._llm(**arguments))

    def start_encoder(self, arguments: Mapping[str, object]) -> ImageEncoder:
        """Start an encoder of images; blocks until it is there."""
        return cast("ImageEncoder", cast("Make", import_module(PACKAGE).MultimodalEncoder)(**arguments))

    @property
    def shared_tensors(self) -> SharedTensors:
        """The class of shared tensors, in a module that is not published."""
        return cast("SharedTensors", import_module(f"{PACKAGE}._torch.shared_tensor").SharedTensorContainer)


def require() -> None:
    """Raise `ModuleNotFoundError` with the place of the package if this interpreter has none; imports nothing."""
    if find_spec(PACKAGE) is None:
        raise ModuleNotFoundError(WHERE.format(python=sys.executable))


def _request_error() -> type[Exception]:
    """Return the class of the errors of one request, which moved between versions."""
    for name in (f"{PACKAGE}.executor.utils", f"{PACKAGE}.executor", f"{PACKAGE}.llmapi"):
        if find_spec(name) is not None:
            found = vars(import_module(name)).get("RequestError")
            if isinstance(found, type) and issubclass(found, Exception):
                return found
    raise ImportError(f"{PACKAGE} has no RequestError: it is no version that this host knows")
