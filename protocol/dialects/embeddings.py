"""OpenAI's embeddings: texts or token ids, and their vectors as lists of numbers or as base64.

The vectors of one request can be hundreds of megabytes of JSON. So the size of a body is bounded before the request is
admitted (`protocol/cost.py`), and the body is built a few vectors at a time.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal, Self

import msgspec
from attrs import frozen

from protocol.dialects.options import INT32_MAX, Name, TopK
from protocol.dialects.prompt import TokenIdList, token_lists
from protocol.dialects.request_body import decode, read
from protocol.errors import InternalError
from protocol.messages.embedding import Cut, EmbedTexts
from protocol.strict.checks import Within
from protocol.strict.mistakes import Mistake, describe, wrong
from protocol.strict.objects import FieldCheck, Harmless

INPUTS_MAX = 2_048  # of one request, as with OpenAI

TextEncoding = Literal["float", "base64"]
"""A vector as a list of numbers, or as the base64 of its little-endian float32."""

INPUT_TYPES = {"search_query": "query", "search_document": "document", "passage": "document"}
"""Names of other servers for what a text is, by what they mean here."""

IGNORED: Harmless = {
    "user": (str,),
    "metadata": (dict,),
    "request_id": (),
    "rid": (),
    "cache_salt": (),
    "add_special_tokens": (True,),
    "mm_processor_kwargs": (),
    "use_activation": (True,),
}
"""Keys of other servers that are accepted while their value has no effect."""

_encode = msgspec.json.Encoder().encode


@frozen
class Texts:
    """One or more texts, none of them empty."""

    value_types: ClassVar[tuple[type, ...]] = (str, list)

    texts: tuple[str, ...]

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Return the texts in a field; raises `Mistakes` if it holds anything else."""
        return cls(_texts(value))


@frozen
class Inputs:
    """One or more texts, or lists of token ids; none of them is empty."""

    value_types: ClassVar[tuple[type, ...]] = (str, list)

    texts: tuple[str, ...] = ()
    token_lists: tuple[tuple[int, ...], ...] = ()

    @property
    def count(self) -> int:
        """The number of texts."""
        return len(self.texts) + len(self.token_lists)

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Return the texts in the field `input`; raises `Mistakes` if it holds anything else."""
        if isinstance(value, list) and value and not isinstance(value[0], str):
            if isinstance(value[0], list):
                _check_each(value, list, "a list of token ids like the first one")
                return cls(token_lists=token_lists(value))
            return cls(token_lists=(TokenIdList.from_value(value).ids,))
        return cls(texts=_texts(value))


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        if not value:
            raise wrong("must not be empty")
        return (value,)
    assert isinstance(value, list)
    _check_each(value, str, "a string")
    return tuple(value)


def _check_each(value: list[object], kind: type, expected: str) -> None:
    if not value:
        raise wrong("must not be empty")
    if len(value) > INPUTS_MAX:
        raise wrong(f"must hold at most {INPUTS_MAX} items, holds {len(value)}")
    for index, each in enumerate(value):
        if type(each) is not kind:
            raise wrong(f"expected {expected}, got {describe(each)}", f"[{index}]")
        if not each:
            raise wrong("must not be empty", f"[{index}]")


@frozen(kw_only=True)
class CutOptions:
    """The fields of several dialects: the cutting of long texts, and the priority."""

    truncate_prompt_tokens: Annotated[int, TopK()] | None = None  # -1: to the most tokens that the model takes
    truncate: bool | None = None  # the same as -1
    priority: Annotated[int, Within(at_least=-INT32_MAX - 1, at_most=INT32_MAX)] | None = None

    @property
    def cut(self) -> Cut | None:
        """The cutting of texts that are too long, None if they are refused."""
        if (tokens := self.truncate_prompt_tokens) is not None:
            return Cut(None if tokens < 0 else tokens)
        return Cut() if self.truncate else None


@frozen(kw_only=True)
class EmbeddingsRequest(CutOptions):
    """The body of `POST /v1/embeddings`."""

    harmless: ClassVar[Harmless] = {
        **IGNORED,
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "messages": (),
    }

    model: Name
    input: Inputs
    dimensions: Annotated[int, Within(at_least=1, at_most=INT32_MAX)] | None = None
    encoding_format: TextEncoding | None = None
    input_type: Name | None = None
    prompt_name: Name | None = None

    @property
    def base64(self) -> bool:
        """Whether vectors are answered as base64."""
        return self.encoding_format == "base64"

    def checks(self) -> tuple[FieldCheck, ...]:
        """Return the checks of fields against each other."""
        return (self._check_prompt, self._check_prompt_of_tokens)

    def _check_prompt(self) -> Iterator[Mistake]:
        if self.input_type is not None and self.prompt_name is not None:
            yield Mistake("prompt_name", "cannot stand beside input_type: both choose the prompt before each text")

    def _check_prompt_of_tokens(self) -> Iterator[Mistake]:
        if self.input.token_lists:
            for name, value in (("input_type", self.input_type), ("prompt_name", self.prompt_name)):
                if value is not None:
                    yield Mistake(name, "cannot stand beside token ids, which are computed as they are: send texts")


def parse(body: bytes) -> EmbeddingsRequest:
    """Return the client's request, or raise one `RequestError` with all its mistakes."""
    return read(decode(body), EmbeddingsRequest)


def to_embed(request: EmbeddingsRequest, *, request_id: str) -> EmbedTexts:
    """Return the request for the embeddings of a model."""
    prompt, name = request.prompt_name, "prompt_name"
    if request.input_type is not None:
        prompt, name = INPUT_TYPES.get(request.input_type, request.input_type), "input_type"
    return EmbedTexts(
        id=request_id,
        texts=request.input.texts,
        token_lists=request.input.token_lists,
        prompt=prompt,
        dimensions=request.dimensions,
        cut=request.cut,
        priority=request.priority,
        params={"texts": "input", "prompt": name},
    )


def vector_objects(first: int, vectors: Sequence[memoryview[float]], *, base64: bool) -> bytearray:
    """Return the objects of vectors in the body, numbered from `first`, each with a comma before it but for number 0.

    Raises `InternalError` for a vector whose elements are no numbers.
    """
    objects = bytearray()
    for index, vector in enumerate(vectors, first):
        encoded = b'"%b"' % b2a_base64(vector, newline=False) if base64 else _encode(vector.tolist())
        if not base64 and b"null" in encoded:
            raise InternalError("the engine has returned a vector with elements that are no numbers")
        objects += b'%b{"object":"embedding","index":%d,"embedding":%b}' % (b"," if index else b"", index, encoded)
    return objects


def around_vectors(model: str, tokens: int) -> tuple[bytes, bytes]:
    """Return what stands in a body before and behind the objects of its vectors."""
    usage = _encode({"prompt_tokens": tokens, "total_tokens": tokens})
    return b'{"object":"list","data":[', b'],"model":%b,"usage":%b}' % (_encode(model), usage)
