"""The log of a process: one JSON line for each event; on a terminal, readable lines above a live status line.

Lines are written by threads behind bounded queues, so logging never blocks the event loop: late lines are dropped and
counted. Every value in a line is bounded as well, because clients and other nodes choose some of them. Prompts and
answers are never logged.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import trio
from attrs import define, field

from protocol.errors import StartFailed
from supervisor.supervision.events import ChildEvent, ChildEventKind
from supervisor.telemetry.bounded_json import bounded, bounded_json, name_json, quoted, truncated
from supervisor.threads.queued_writer import BYTES_MAX, LINES_MAX, QueuedWriter, file_sink

log = logging.getLogger(__name__)

RECORD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
IN_MESSAGE = {"child", "child_event"}  # fields that the message of a readable line contains already
SHOWN_LEVELS = {"warning", "error", "critical"}
TRANSIENT_EVENTS = {"starting", "stopping"}  # events of children in the live line, without a line of their own
TICK_S = 0.2
CLEAR = "\r\x1b[2K"
TRACE_CHARACTERS_MAX = 16 * 1024
PAUSE_S = 0.02  # the pause between writes: many requests a second do not wake the writer's thread for each line
FLUSH_S = 1.0  # the time to write the last lines before a process exits


class JsonFormatter(logging.Formatter):
    """A formatter of records as one JSON object a line, with the name of a node if one is given."""

    def __init__(self, node: str | None = None) -> None:
        super().__init__()
        self._fields: dict[str, str] = {} if node is None else {"node": quoted(node)}
        self._second, self._time = -1, ""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record with all its fields, each bounded."""
        texts = {
            "time": self._time_text(record),
            "level": quoted(record.levelname.lower()),
            **self._fields,
            "event": quoted(_event(record)),
        }
        for name, value in vars(record).items():
            if name not in RECORD_FIELDS:
                texts[name] = bounded_json(value)
        if record.exc_info:
            texts["traceback"] = quoted(_without_middle(self.formatException(record.exc_info)))
        return f"{{{', '.join([f'{name_json(name)}: {text}' for name, text in texts.items()])}}}"

    def _time_text(self, record: logging.LogRecord) -> str:
        """Return the time of a record, made once for all records of a second."""
        if (second := int(record.created)) != self._second:
            self._second, self._time = second, quoted(self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"))
        return self._time


class TextFormatter(logging.Formatter):
    """A formatter of records as readable lines: the time, the message, then the fields as `name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with a traceback below it if there is one."""
        line = _line(self.formatTime(record, "%H:%M:%S"), record.levelname.lower(), _event(record), _extra(record))
        return f"{line}\n{_without_middle(self.formatException(record.exc_info))}" if record.exc_info else line


def readable_line(node: str, text: str) -> str | None:
    """Return a line of a node's log, JSON or not, as readable text; None if the live line shows it instead."""
    try:
        match json.loads(text):
            case {"time": str(time), "level": str(level), "event": str(event), **fields}:
                if fields.get("child_event") in TRANSIENT_EVENTS:
                    return None
                trace = fields.pop("traceback", None)
                fields.pop("node", None)
                line = _line(time[11:19], level, f"{node}: {event}", fields)
                return line if trace is None else f"{line}\n{trace}"
    except ValueError:
        pass
    return f"{node}: {text}"


def _line(time: str, level: str, event: str, fields: Mapping[object, object]) -> str:
    shown_level = f"{level}: " if level in SHOWN_LEVELS else ""
    pairs = (f"{name}={value}" for name, value in fields.items() if name not in IN_MESSAGE and value is not None)
    extra = " ".join(pairs)
    return f"{time} {shown_level}{event}{'  ' if extra else ''}{extra}"


def _extra(record: logging.LogRecord) -> dict[object, object]:
    return {name: bounded(value) for name, value in vars(record).items() if name not in RECORD_FIELDS}


def _event(record: logging.LogRecord) -> str:
    return truncated(record.getMessage())


def _without_middle(trace: str) -> str:
    """Return a traceback, without its middle if it is too long."""
    half = TRACE_CHARACTERS_MAX // 2
    return trace if len(trace) <= TRACE_CHARACTERS_MAX else f"{trace[:half]}\n...\n{trace[-half:]}"


@define(eq=False)
class Terminal:
    """The log's output and, on a terminal, a live line below it with the starting and stopping children."""

    out: TextIO
    live: bool
    stdout: TextIO = sys.stdout
    announce_to_parent: Callable[[str], None] | None = None  # the launcher, which prints announcements instead
    formatter: logging.Formatter = field(factory=JsonFormatter)
    lines_max: int = LINES_MAX
    bytes_max: int = BYTES_MAX
    log: QueuedWriter = field(init=False)
    _announcements: QueuedWriter = field(init=False)
    _transient: dict[str, tuple[str, float]] = field(factory=dict)  # event and time of each child that starts or stops
    _shown: str = ""  # the live line

    def __attrs_post_init__(self) -> None:
        self.log = QueuedWriter(file_sink(self.out), self.lines_max, self.bytes_max, self._lost, pause_s=PAUSE_S)
        self._announcements = QueuedWriter(file_sink(self.stdout))

    def on_event(self, event: ChildEvent) -> None:
        """Show or hide a child in the live line."""
        if event.kind in {ChildEventKind.STARTING, ChildEventKind.STOPPING}:
            self._transient[event.path] = (event.kind.name.lower(), event.at)
        else:
            self._transient.pop(event.path, None)

    def line(self, text: str) -> None:
        """Write one line, above the live line."""
        if self.log.put(_encoded(f"{CLEAR if self._shown else ''}{text}\n")):
            self._shown = ""

    def announce(self, text: str) -> None:
        """Print a sentence for the user, such as the server's address: readable on a terminal, else as JSON."""
        if self.announce_to_parent is not None:
            self.announce_to_parent(text)
        elif self.live:
            self.line(text)
        elif _is_terminal(self.stdout):
            self._announcements.put(_encoded(f"{text}\n"))
        elif text:
            self._announcements.put(_encoded(f"{self._formatted(text)}\n"))

    def report_failure(self, text: str) -> None:
        """Log the reason of the process's end."""
        text = f"espalier: {text}"
        self.line(text if self.live else self._formatted(text, logging.ERROR))

    def flush(self, within_s: float = FLUSH_S) -> None:
        """Block until everything queued has been written, for at most `within_s`."""
        self._announcements.flush(within_s / 2)
        self.log.flush(within_s / 2)

    @property
    def hung_up(self) -> bool:
        """Whether the output was a terminal that has been closed."""
        return self.live and not self.out.isatty()

    async def run_live_line(self) -> None:
        """Redraw the live line until cancelled; return at once if the output is no terminal."""
        while self.live:
            self.redraw(trio.current_time())
            await trio.sleep(TICK_S)

    def redraw(self, now: float) -> None:
        """Redraw the live line, if it has changed and all lines before it are written."""
        children = self._transient
        innermost = [path for path in children if not any(other.startswith(f"{path}/") for other in children)]
        parts = [f"{event} {path} {now - since:.1f} s" for path in innermost for event, since in [children[path]]]
        text = f"  {', '.join(parts)}" if parts else ""
        # Nothing is queued while the terminal is stopped: once it continues, only the latest line matters.
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
    with suppress(ValueError, AttributeError):  # closed, or None
        return file.isatty()
    return False


class _Handler(logging.Handler):
    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def createLock(self) -> None:  # noqa: N802  # as logging names it
        """Use no lock: logging must not wait for another thread, and the queue has a lock of its own."""
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Emit a record that passes the filters; since Python 3.13 the method of the base class demands a lock."""
        if not self.filter(record):
            return False
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception as error:  # noqa: BLE001  # a record that cannot be formatted must not fail the code that logs it
            record.msg, record.args = f"a log record could not be formatted: {type(error).__name__}", None
            record.__dict__ = {name: value for name, value in vars(record).items() if name in RECORD_FIELDS}
            text = self.format(record)
        self._write(text)


def configure_logging(out: TextIO = sys.stderr, node: str | None = None) -> Terminal:
    """Log to `out`: readable on a terminal, else JSON, with the name of `node` in each line if it is given."""
    live = _is_terminal(out)
    formatter = TextFormatter() if live else JsonFormatter(node)
    terminal = Terminal(out, live, formatter=formatter)
    handler = _Handler(terminal.line)
    handler.setFormatter(formatter)
    if live:
        handler.addFilter(lambda record: getattr(record, "child_event", None) not in TRANSIENT_EVENTS)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("trio-websocket").setLevel(logging.WARNING)
    return terminal


def exit_code_of_failed_write(error: OSError) -> int:
    """Return the exit code of a command with a closed standard output; raises `StartFailed` for any other error.

    The standard output becomes `/dev/null`, else the interpreter would fail to flush the rest at its exit.
    """
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    raise StartFailed(f"the answer cannot be written: {error.strerror}") from error


def log_interpreter_warnings() -> None:
    """Log Python's own warnings, instead of a blocking write to the standard error stream."""
    logging.captureWarnings(True)
    sys.unraisablehook = _log_unraisable


def _log_unraisable(hook: sys.UnraisableHookArgs) -> None:
    log.error("an exception that nobody could catch: %s", hook.err_msg, exc_info=hook.exc_value)
