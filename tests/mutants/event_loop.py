"""Planted bugs of what keeps the event loop turning: logs, turns, and the pulses that a launcher hears."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "supervisor/threads/queued_writer.py": (
        Bug(
            "whoever logs waits for whoever reads the log",
            "            self._changed.notify_all()\n            return True\n",
            "            self._changed.notify_all()\n        self.flush(60.0)\n        return True\n",
        ),
        Bug("the last lines of a process wait for the writer's pause", "        self._hurried.set()\n", ""),
        Bug("a writer wakes for each line", "            if idle and self.pause_s:\n", "            if False:\n"),
        Bug(
            "a writer for which there was no thread never has one",
            "                with suppress(RuntimeError):  # the system has no thread left: the next item tries again\n",
            "                with suppress(RuntimeError):\n                    self._running = True\n",
        ),
        Bug(
            "a log that nobody reads grows without a limit", "                return False\n", "                pass\n"
        ),
        Bug(
            "lost lines are not told of", "pieces += [self._notice(gap)] * (gap != _NONE) + [data]", "pieces += [data]"
        ),
        Bug(
            "a bug in the notice of lost lines ends the thread that writes",
            "        except Exception:  # noqa: BLE001",
            "        except EOFError:  #",
        ),
        Bug(
            "a bug in what is told of a failure ends the thread that writes",
            "        except Exception:\n            log",
            "        except EOFError:\n            log",
        ),
        Bug("what could not be written is not counted", "                    self._drop(taken)\n", ""),
        Bug(
            "a log that fails is told of at every try",
            "            if changed:\n",
            "            if error is not None:\n",
        ),
    ),
    "supervisor/links/link.py": (
        Bug(
            "what has piled up in one message is heard in one turn",
            "                    handled = 0\n                    await trio.lowlevel.checkpoint()\n",
            "                    handled = 0\n",
        ),
    ),
    "supervisor/telemetry/bounded_json.py": (
        Bug("a record is as long as a client likes", "if len(text) <= VALUE_CHARACTERS_MAX:", "if True:"),
        Bug(
            "a long text is not cut in a line",
            "isinstance(value, str) and len(value) <= VALUE",
            "isinstance(value, str) or VALUE",
        ),
        Bug(
            "an infinite number is not JSON in the standard library's way",
            "and -INTEGER_MAX < value < INTEGER_MAX:",
            ":",
        ),
    ),
    "supervisor/telemetry/logs.py": (
        Bug("all lines have the time of the first", "!= self._second:", "!= self._second and not self._time:"),
        Bug("redraws queue up at a terminal that stands still", "if text != self._shown and self.log.idle and", "if"),
    ),
    "supervisor/launcher/parent_pipe.py": (
        Bug(
            "a node blocks until its launcher reads",
            "os.set_blocking(self.fd, False)",
            "os.set_blocking(self.fd, True)",
        ),
        Bug(
            "what a launcher does not read is kept without a limit",
            "if kind in FINAL or kind in DECISIONS or len(self._unsent) + len(line) <= UNSENT_BYTES_MAX:",
            "if True:",
        ),
    ),
    "supervisor/telemetry/loop_monitor.py": (
        Bug("turns are not measured", "if now - self._since > self.turn_max_s:", "if False:"),
        Bug(
            "a turn is never over",
            "            now = self.clock()\n        self._since = now\n",
            "            now = self.clock()\n",
        ),
        Bug("a label for each function there is", "len(self._slow) >= NAMES_MAX", "False"),
        Bug("collected garbage is somebody's turn", "self._since += duration_s", "pass"),
        Bug("where a loop stands still is said at every look", "                logged = since\n", ""),
    ),
    "supervisor/launcher/launcher.py": (
        Bug("a node that starts misses a reload", "node.outdated = node.outdated or not node.serving", "node.serving"),
    ),
    "supervisor/node/node.py": (
        Bug(
            "a node that a second signal ends is started again by its launcher",
            "        self.tell_launcher_of_end()  # else",
            "        # else",
        ),
    ),
    "supervisor/launcher/node_process.py": (
        Bug("a node that was outdated is asked to reload again and again", "self.outdated = False", "pass"),
        Bug(
            "a node whose end had a zero byte in it cannot start",
            "{printable(self.last_failure)}",
            "{self.last_failure}",
        ),
        Bug("a node that hangs is kept", "process.signal_group(signal.SIGKILL)", "pass"),
        Bug(
            "a restart of a node that still starts takes it down",
            'life.stays_down = kind == "restart", kind == "stay"',
            'life.stays_down = life.up and kind == "restart", kind == "stay"',
        ),
        Bug(
            "a node that is restarted before it is up is not started again",
            "again = life.hung or (life.restarts and not life.done and not node.removed)",
            "again = life.hung",
        ),
        Bug(
            "a node that hangs while it is stopped as too slow is started for ever",
            "if life.up or starting.cancelled_caught or not again:",
            "if life.up or not again:",
        ),
        Bug(
            "a node that dies while an operator drains it comes back",
            "if life.stays_down and not life.done:",
            "if False:",
        ),
        Bug("messages of a node do not end its silence", "        life.silent_s = 0.0\n        match", "        match"),
        Bug(
            "a node that hangs while it is stopped is waited for",
            "_shield(), _shield(), _shield()",
            "_shield(), _shield(), trio.CancelScope()",
        ),
        Bug("heartbeats of a node that is stopped do not count", "            life.silent_s = 0.0\n", ""),
        Bug(
            "a node that still loads counts as hung",
            "life.silent_s += tick_s * life.has_beaten",
            "life.silent_s += tick_s",
        ),
    ),
    "supervisor/gateway/requests.py": (
        Bug(
            "a turn in which far too much is done",
            "        if (served := self.served.get(model)) is None:\n            names",
            "        for _ in range(20_000):\n            model.lower()\n"
            "        if (served := self.served.get(model)) is None:\n            names",
        ),
    ),
}
