"""What the node tells its operator: one structured line an event, and on a terminal a live start-up.

Prompts and answers are never among it.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TextIO

import trio
from attrs import define, field

from supervisor.happenings import Happening, Kind

FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
SAID = {"child", "happening"}  # a readable line has these in its words
LOUD = {"warning", "error", "critical"}
PASSING = {"starting", "stopping"}  # and where a live line shows these, they need no line of their own
TICK_S = 0.2
CLEAR = "\r\x1b[2K"


class JsonLines(logging.Formatter):
    """One JSON object a line, for whoever collects logs; `node` is in it where several nodes write to one place."""

    def __init__(self, node: str | None = None) -> None:
        super().__init__()
        self._given: dict[object, object] = {} if node is None else {"node": node}

    def format(self, record: logging.LogRecord) -> str:
        """Return the record with everything that was given with it."""
        line: dict[object, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            **self._given,
            "event": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class Readable(logging.Formatter):
    """One line a person can read."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the time, what happened, and what was given with it."""
        line = _line(self.formatTime(record, "%H:%M:%S"), record.levelname.lower(), record.getMessage(), _extra(record))
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def readable(node: str, text: str) -> str | None:
    """Return what a node logged, in JSON or not, as a person can read it; None for what a live line shows instead."""
    try:
        match json.loads(text):
            case {"time": str(time), "level": str(level), "event": str(event), **given}:
                if given.get("happening") in PASSING:
                    return None
                trace = given.pop("traceback", None)
                given.pop("node", None)
                line = _line(time[11:19], level, f"{node}: {event}", given)
                return line if trace is None else f"{line}\n{trace}"
    except ValueError:
        pass
    return f"{node}: {text}"


def _line(time: str, level: str, event: str, given: Mapping[object, object]) -> str:
    loud = f"{level}: " if level in LOUD else ""
    extra = " ".join(f"{name}={value}" for name, value in given.items() if name not in SAID and value is not None)
    return f"{time} {loud}{event}{'  ' if extra else ''}{extra}"


def _extra(record: logging.LogRecord) -> dict[object, object]:
    return {name: value for name, value in vars(record).items() if name not in FIELDS}


@define(eq=False)
class Terminal:
    """Writes log lines, and below them, while children start or stop, one line that says which and for how long."""

    out: TextIO
    live: bool
    plain: TextIO = sys.stdout
    upward: Callable[[str], None] | None = None  # to a launcher, who tells it instead
    _passing: dict[str, tuple[str, float]] = field(factory=dict)  # what starts or stops, and since when
    _shown: bool = False

    def watch(self, happening: Happening) -> None:
        """Follow the tree."""
        if happening.kind in {Kind.STARTING, Kind.STOPPING}:
            self._passing[happening.path] = (happening.kind.name.lower(), happening.at)
        else:
            self._passing.pop(happening.path, None)

    def line(self, text: str) -> None:
        """Write one line, above what is live."""
        self.out.write(f"{CLEAR if self._shown else ''}{text}\n")
        self._shown = False
        self.out.flush()

    def tell(self, text: str) -> None:
        """Say something that is no event: on a terminal among the lines, elsewhere apart from the log."""
        with suppress(OSError):  # whoever was to read it is gone; the node is not
            if self.upward is not None:
                self.upward(text)
            elif self.live:
                self.line(text)
            else:
                print(text, file=self.plain, flush=True)

    @property
    def gone(self) -> bool:
        """Whether there was a terminal, and its window has been closed."""
        return self.live and not self.out.isatty()

    async def keep_live(self) -> None:
        """Redraw the live line for as long as anything starts or stops."""
        while self.live:
            with suppress(OSError):  # the terminal is gone; the node is not
                self._redraw(trio.current_time())
            await trio.sleep(TICK_S)

    def _redraw(self, now: float) -> None:
        innermost = [path for path in self._passing if not any(o.startswith(f"{path}/") for o in self._passing)]
        if innermost:
            parts = [f"{how} {path} {now - since:.1f} s" for path in innermost for how, since in [self._passing[path]]]
            self.out.write(f"{CLEAR}  {', '.join(parts)}")
            self._shown = True
            self.out.flush()
        elif self._shown:
            self.out.write(CLEAR)
            self._shown = False
            self.out.flush()


class _Handler(logging.Handler):
    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(self.format(record))
        except Exception:  # noqa: BLE001  # whoever logs must not fall because nobody can listen any more
            self.handleError(record)


def set_up(out: TextIO = sys.stderr, node: str | None = None) -> Terminal:
    """Send what is logged to `out`: readable on a terminal, JSON elsewhere, with the name of a node if it has one."""
    live = out.isatty()
    terminal = Terminal(out, live)
    handler = _Handler(terminal.line)
    handler.setFormatter(Readable() if live else JsonLines(node))
    if live:
        handler.addFilter(lambda record: getattr(record, "happening", None) not in PASSING)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("trio-websocket").setLevel(logging.WARNING)
    return terminal
