"""What the node tells its operator: one structured line an event, and on a terminal a live start-up.

Prompts and answers are never among it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TextIO

import trio
from attrs import define, field

from protocol.errors import StartFailed
from supervisor.supervision.events import ChildEvent, ChildEventKind
from supervisor.threads.queued_writer import BYTES_MAX, LINES_MAX, QueuedWriter, file_sink

log = logging.getLogger(__name__)

FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
SAID = {"child", "child_event"}  # a readable line has these in its words
LOUD = {"warning", "error", "critical"}
PASSING = {"starting", "stopping"}  # and where a live line shows these, they need no line of their own
TICK_S = 0.2
CLEAR = "\r\x1b[2K"
VALUE_CHARACTERS_MAX = 2048  # of each text in a record, whoever wrote it
VALUES_MAX = 64  # in each list or table
DEPTH_MAX = 4
TRACE_CHARACTERS_MAX = 16 * 1024
FLUSH_S = 1.0  # for the last lines to be written, before a process ends


class JsonFormatter(logging.Formatter):
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
            "event": _event(record),
            **_extra(record),
        }
        if record.exc_info:
            line["traceback"] = _middle_out(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """One line a person can read."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the time, what happened, and what was given with it."""
        line = _line(self.formatTime(record, "%H:%M:%S"), record.levelname.lower(), _event(record), _extra(record))
        return f"{line}\n{_middle_out(self.formatException(record.exc_info))}" if record.exc_info else line


def readable_line(node: str, text: str) -> str | None:
    """Return what a node logged, in JSON or not, as a person can read it; None for what a live line shows instead."""
    try:
        match json.loads(text):
            case {"time": str(time), "level": str(level), "event": str(event), **given}:
                if given.get("child_event") in PASSING:
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
    return {name: bounded(value) for name, value in vars(record).items() if name not in FIELDS}


def _event(record: logging.LogRecord) -> str:
    return _cut(record.getMessage())


def bounded(value: object, depth: int = DEPTH_MAX) -> object:
    """Return what a log line shows of a value: no longer, wider or deeper than a line may be, as plain JSON."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else "a large number"
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        if not depth:
            return "..."
        some = islice(value, VALUES_MAX)
        if isinstance(value, Mapping):
            return {_cut(str(key)): bounded(value[key], depth - 1) for key in some}
        return [bounded(each, depth - 1) for each in some]
    return _cut(value if isinstance(value, str) else str(value))


def _cut(text: str) -> str:
    if len(text) <= VALUE_CHARACTERS_MAX:
        return text
    return f"{text[:VALUE_CHARACTERS_MAX]}... ({len(text)} characters)"


def _middle_out(trace: str) -> str:
    """Return a traceback without its middle if it is too long: where it began and what it ended in are read."""
    half = TRACE_CHARACTERS_MAX // 2
    return trace if len(trace) <= TRACE_CHARACTERS_MAX else f"{trace[:half]}\n...\n{trace[-half:]}"


@define(eq=False)
class Terminal:
    """Writes log lines, and below them, while children start or stop, one line that says which and for how long.

    Nobody who logs waits for whoever reads: threads write, and what they cannot write in time is dropped and counted.
    """

    out: TextIO
    live: bool
    plain: TextIO = sys.stdout
    upward: Callable[[str], None] | None = None  # to a launcher, who tells it instead
    formatter: logging.Formatter = field(factory=JsonFormatter)
    lines_max: int = LINES_MAX
    bytes_max: int = BYTES_MAX
    log: QueuedWriter = field(init=False)
    _words: QueuedWriter = field(init=False)  # what is told apart from the log
    _passing: dict[str, tuple[str, float]] = field(factory=dict)  # what starts or stops, and since when
    _shown: str = ""

    def __attrs_post_init__(self) -> None:
        self.log = QueuedWriter(file_sink(self.out), self.lines_max, self.bytes_max, self._lost)
        self._words = QueuedWriter(file_sink(self.plain))

    def watch(self, happening: ChildEvent) -> None:
        """Follow the tree."""
        if happening.kind in {ChildEventKind.STARTING, ChildEventKind.STOPPING}:
            self._passing[happening.path] = (happening.kind.name.lower(), happening.at)
        else:
            self._passing.pop(happening.path, None)

    def line(self, text: str) -> None:
        """Write one line, above what is live."""
        if self.log.put(_encoded(f"{CLEAR if self._shown else ''}{text}\n")):
            self._shown = ""

    def tell(self, text: str) -> None:
        """Say something that is no event: to a person among the lines or apart from the log, elsewhere as JSON."""
        if self.upward is not None:
            self.upward(text)
        elif self.live:
            self.line(text)
        elif _is_terminal(self.plain):
            self._words.put(_encoded(f"{text}\n"))
        elif text:
            self._words.put(_encoded(f"{self._formatted(text)}\n"))

    def fail(self, text: str) -> None:
        """Say why the process ends."""
        text = f"espalier: {text}"
        self.line(text if self.live else self._formatted(text, logging.ERROR))

    def end(self, within_s: float = FLUSH_S) -> None:
        """Write what waits to be written, for at most so long; whatever is not by then nobody reads."""
        self._words.flush(within_s / 2)
        self.log.flush(within_s / 2)

    @property
    def gone(self) -> bool:
        """Whether there was a terminal, and its window has been closed."""
        return self.live and not self.out.isatty()

    async def run_live_line(self) -> None:
        """Redraw the live line for as long as anything starts or stops."""
        while self.live:
            self._redraw(trio.current_time())
            await trio.sleep(TICK_S)

    def _redraw(self, now: float) -> None:
        innermost = [path for path in self._passing if not any(o.startswith(f"{path}/") for o in self._passing)]
        parts = [f"{how} {path} {now - since:.1f} s" for path in innermost for how, since in [self._passing[path]]]
        text = f"  {', '.join(parts)}" if parts else ""
        # A terminal that stands still gets no more of these: when it goes on, only the latest counts.
        if text != self._shown and self.log.idle and self.log.put(_encoded(f"{CLEAR}{text}")):
            self._shown = text

    def _formatted(self, text: str, level: int = logging.INFO) -> str:
        fields = {"name": __name__, "msg": text, "levelno": level, "levelname": logging.getLevelName(level)}
        return self.formatter.format(logging.makeLogRecord(fields))

    def _lost(self, items: int, _: int) -> bytes:
        text = f"{items} log line{'s were' if items != 1 else ' was'} lost: nobody read them in time"
        return _encoded(f"{self._formatted(text, logging.WARNING)}\n")


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _is_terminal(file: TextIO) -> bool:
    with suppress(ValueError, AttributeError):  # it is closed, or there is none
        return file.isatty()
    return False


class _Handler(logging.Handler):
    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def createLock(self) -> None:  # noqa: N802  # as logging names it
        """Do without: whoever logs must wait for no thread, and what is written to has its own lock."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception as error:  # noqa: BLE001  # whoever logs must not fall because of how it was said
            record.msg, record.args = f"a log record could not be formatted: {type(error).__name__}", None
            record.__dict__ = {name: value for name, value in vars(record).items() if name in FIELDS}
            text = self.format(record)
        self._write(text)


def configure_logging(
    out: TextIO = sys.stderr, node: str | None = None, lines_max: int = LINES_MAX, bytes_max: int = BYTES_MAX
) -> Terminal:
    """Send what is logged to `out`: readable on a terminal, JSON elsewhere, with the name of a node if it has one."""
    live = _is_terminal(out)
    formatter = TextFormatter() if live else JsonFormatter(node)
    terminal = Terminal(out, live, formatter=formatter, lines_max=lines_max, bytes_max=bytes_max)
    handler = _Handler(terminal.line)
    handler.setFormatter(formatter)
    if live:
        handler.addFilter(lambda record: getattr(record, "child_event", None) not in PASSING)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("trio-websocket").setLevel(logging.WARNING)
    return terminal


def exit_code_of_failed_write(error: OSError) -> int:
    """Return the exit code of a command whose output nobody reads any more; raises `StartFailed` if it is not that.

    The standard output goes nowhere from here on: else the interpreter complains when it flushes what is left.
    """
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    raise StartFailed(f"the answer cannot be written: {error.strerror}") from error


def log_interpreter_warnings() -> None:
    """Log what Python would write to the standard error stream by itself, and would wait for."""
    logging.captureWarnings(True)
    sys.unraisablehook = _unraisable


def _unraisable(found: sys.UnraisableHookArgs) -> None:
    log.error("an exception that nobody could catch: %s", found.err_msg, exc_info=found.exc_value)
