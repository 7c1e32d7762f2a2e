"""The check of new weights against the running model, before an engine's scheduler gets any of them.

SGLang ends its scheduler at a tensor of a wrong shape, and reports success for an unknown name. So the *index* of the
running model, from the checkpoint it was started with, decides what an update may hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias

from attrs import frozen

from protocol.errors import BadRequest
from protocol.safetensors import Header, Placed

CONFIGURATION = "config.json"
LISTED_MAX = 4  # mistakes in one sentence

# Keys of a configuration that change no computation.
FREE_KEYS = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
)

ModelConfiguration: TypeAlias = Mapping[str, object]


@frozen
class Form:
    """The dtype and the shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@frozen
class Checkpoint:
    """A model by its folder: the configuration, and the forms of all tensors by their names."""

    config: ModelConfiguration
    index: Mapping[str, Form]


def forms(header: Header) -> dict[str, Form]:
    """Return the forms of a file's tensors."""
    return {name: _form(placed) for name, placed in header.tensors.items()}


def _form(placed: Placed) -> Form:
    return Form(placed.dtype, placed.shape)


def check_checkpoint(running: Checkpoint, new: Checkpoint) -> None:
    """Raise `BadRequest` unless a checkpoint is of the running model: its configuration, and each of its tensors."""
    mistakes = [
        f"{key} is {_short(new.config.get(key))}, and {_short(running.config.get(key))} in the running model"
        for key in sorted({*running.config, *new.config} - FREE_KEYS)
        if running.config.get(key) != new.config.get(key)
    ]
    if mistakes:
        raise BadRequest(f"{CONFIGURATION} is of another model: {_listed(mistakes)}", param="folder")
    missing = [f"{name[:128]} is missing" for name in sorted(running.index.keys() - new.index.keys())]
    check_forms(running.index, new.index, missing)


def check_forms(running: Mapping[str, Form], given: Mapping[str, Form], others: Collection[str] = ()) -> None:
    """Raise `BadRequest` unless each given tensor is one of the running model, with its dtype and its shape.

    `others` are mistakes found before.
    """
    mistakes = [*others, *_mistakes(running, given)]
    if mistakes:
        raise BadRequest(f"the weights do not fit the running model: {_listed(mistakes)}")


def _mistakes(running: Mapping[str, Form], given: Mapping[str, Form]) -> Iterator[str]:
    for name, form in given.items():
        if (wanted := running.get(name)) is None:
            yield f"{name[:128]} is no tensor of the model"
        elif wanted != form:
            yield f"{name[:128]} is {form}, and {wanted} in the model"


def _listed(mistakes: list[str]) -> str:
    rest = len(mistakes) - LISTED_MAX
    return "; ".join(mistakes[:LISTED_MAX] + [f"and {rest} more"] * (rest > 0))


def _short(value: object) -> str:
    return repr(value)[:60]
