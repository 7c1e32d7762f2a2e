"""The interface of a server that can be started to be measured: its commands for a given setup, and what it serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from attrs import field, frozen

from bench.load.messages import Api

ROOT = Path(__file__).parents[2]
MODEL = "tiny"
MODEL_FOLDER = ROOT / "examples" / MODEL
ENVIRONMENTS = ROOT / "build" / "peers"
MARK = "installed"  # the file that says that an environment was installed to the end, with a hash of its list
PAGE_SIZE = 16
PREFILL_CHUNK = 256

Engine = Literal["sglang", "simulated"]


@frozen(kw_only=True)
class Setup:
    """The parameters of a start; two servers that are compared have the same."""

    folder: Path  # of its configuration, logs and temporary files
    port: int
    slots: int = 64  # of each engine
    workers: int = 1  # engines; not every server can have several
    kv_tokens_max: int = 16384  # of each engine
    step_s: float = 0.006  # of a simulated engine
    environments: Path = ENVIRONMENTS

    def python(self, environment: str) -> str:
        """Return the interpreter of one of the environments."""
        return str(self.environments / environment / "bin" / "python")


@frozen
class Command:
    """One process to start: its name, its words, and the variables that it needs beside the inherited ones."""

    name: str
    words: tuple[str, ...]
    variables: Mapping[str, str] = field(factory=dict)
    posts: tuple[str, ...] = ()  # URLs to post to once the server is ready


@frozen(kw_only=True)
class Peer:
    """A server that can be started; `commands` makes the files that they need in the setup's folder."""

    name: str
    title: str
    engine: Engine
    commands: Callable[[Setup], list[Command]]
    environments: tuple[str, ...] = ()  # by the names of their lists in this folder; ours has none
    apis: tuple[Api, ...] = ("chat",)
    workers_max: int = 1
    ready_path: str | None = None  # answers 200 when it is ready; None: /v1/models lists the model
