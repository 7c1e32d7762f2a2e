"""Bugs of canaries, of engines out of service, and of the metrics that engines keep themselves."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/canary.py": (
        Bug("a canary looks at the first reply only", "await generation.over.wait()", "await anext(generation)"),
        Bug("an answer without a token is one", " is None or not tokens:", " is None:"),
        Bug(
            "a canary that fails is no failure",
            '        raise EngineStuck(f"its canary failed: {error.code}: {error.detail}") from error\n',
            "        return\n",
        ),
        Bug(
            "a canary whose slot is kept is in no count",
            "        report(LATE if outcome == LATE else FAILED)\n",
            "        if outcome == LATE:\n            report(LATE)\n",
        ),
        Bug("a canary asks a busy engine", "if since is None or not slots.in_service()", "if not slots.in_service()"),
        Bug("a canary asks an engine out of service", " or not slots.in_service() else", " else"),
        Bug("canaries share a cache", "cache_salt=salt,", 'cache_salt="canary",'),
        Bug("canaries share the cache of others", "        cache_salt=salt,\n", ""),
        Bug("a decode computes nothing for its canary", "2 if is_decode else 1", "1"),
        Bug(
            "a canary of a leg looks for the other",
            "Rendezvous.without_partner(Rendezvous.room_of_rank(room, rank, info.data_parallel))",
            'Rendezvous(room, "x", 1)',
        ),
        Bug("a process that was stopped blames the engine", "WAITS = 4", "WAITS = 1"),
        Bug("a canary comes without an end", "since + after_s\n", "now\n"),
        Bug(
            "a lost engine is a stuck one", "    except EngineLost as error:", "    except ZeroDivisionError as error:"
        ),
    ),
    "actors/engines/probe.py": (
        Bug("a canary is not aborted", "            slots.engine.abort(request.id)", "            pass"),
        Bug(
            "a canary leaves before the engine has released it",
            "                    await slots.engine.wait_released(request.id)\n",
            "                    pass\n",
        ),
        Bug("a frozen engine is waited for", "            waits = False\n", ""),
        Bug("a canary's slot that is kept is given on", "if waiting.cancelled_caught:", "if False:"),
        Bug("a probe that has failed is there for ever", "        slots.end_probe()\n", "        pass\n"),
        Bug("a canary does not yield", "            with probe.scope:\n", "            with trio.CancelScope():\n"),
        Bug("an unshielded wait for a canary's slot", "release_s, shield=True)", "release_s)"),
    ),
    "actors/engines/slots.py": (
        Bug("a request does not cancel the canary", '        self.cancel_probe("a request has come")\n', ""),
        Bug("a request takes the slot of a canary", "        if self._requests < self.number:\n", "        if True:\n"),
        Bug("every request waits for the canary", "        if self._requests < self.number:\n", "        if False:\n"),
        Bug(
            "a request waits for a canary's slot without an end",
            "move_on_at(pace.until()) as waiting",
            "move_on_at(inf) as waiting",
        ),
        Bug(
            "an engine is idle since its start",
            "        self._idle_since = trio.current_time()\n        self.free",
            "        self.free",
        ),
    ),
    "actors/decode.py": (Bug("an engine out of service gets requests", "slots.in_service() and ", ""),),
    "supervisor/engines/children.py": (
        Bug("requests wait for ever after an engine was out of service", "        inbox.recheck()", "        pass"),
        Bug(
            "a canary goes on when its engine leaves service",
            '                each.cancel_probe("the engine is out of service")',
            "                pass",
        ),
    ),
    "supervisor/supervision/registration.py": (
        Bug(
            "what is out of service is used",
            "return None if self._out_of_service else self._current",
            "return self._current",
        ),
        Bug(
            "what is out of service for two reasons returns with the first",
            "self._out_of_service.remove(reason)",
            "self._out_of_service.clear()",
        ),
        Bug(
            "an engine out of service is said to start",
            "if self._current is not None and self._out_of_service:",
            "if False:",
        ),
    ),
    "supervisor/telemetry/engine_metrics.py": (
        Bug(
            "an engine may forge a metric of ours",
            "{METRICS_PREFIX}[a-zA-Z0-9_:]+)(?:",
            "[a-zA-Z_:][a-zA-Z0-9_:]*)(?:",
            harmless="a series must begin with the name of its family, which is checked too",
        ),
        Bug(
            "a family of ours may be forged",
            'rf"# (HELP|TYPE) ({METRICS_PREFIX}',
            'rf"# (HELP|TYPE) (',
            harmless="no series of it is taken, and a family without series is not written",
        ),
        Bug("a label of the engine's hides ours", 'labels[f"exported_{ours}"] = labels.pop(ours)', "pass"),
        Bug(
            "every family has a head for each engine",
            "self.families.setdefault(name, _Family(kind, helps))",
            "_Family(kind, helps)",
        ),
        Bug("two types of one name are mixed", "return family if family.type == kind else None", "return family"),
        Bug("a text is read in one turn", "            if not number % LINES_A_STEP:\n", "            if False:\n"),
        Bug("a line of any length is parsed", "if end - start <= LINE_LENGTH_MAX else", "if True else"),
    ),
    "supervisor/cluster/engine_metrics.py": (
        Bug("texts of any number are kept", "if size > min(self.room, METRICS_BYTES_MAX):", "if False:"),
        Bug("an engine without metrics is asked for them", " is not None and info.metrics:", " is not None:"),
    ),
    "actors/engines/sglang/host/metrics.py": (
        Bug(
            "an asker that leaves ends the reading of others",
            "await asyncio.shield(self._reading)",
            "await self._reading",
        ),
        Bug("metrics are read where tokens pass", "asyncio.to_thread(self._read)", "_here(self._read)"),
        Bug("a text of any size is an answer", "> bytes_max:", "> 10**9:"),
    ),
}
