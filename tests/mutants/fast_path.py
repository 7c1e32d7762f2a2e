"""Bugs to plant where tokens skip the stages of an answer."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/kit/direct.py": (
        Bug(
            "an answer and its call wait for the garbage collector",
            "call, self.call = self.call, None",
            "call = self.call",
        ),
        Bug("an answer and its receiver wait for it", "        self._receiver = None  # so does this\n", ""),
    ),
    "supervisor/node/garbage.py": (
        Bug("full collections do not wait for requests", "not running() and since_full()", "since_full()"),
        Bug("a full collection each second", "since_full() >= WORTH", "True"),
    ),
    "actors/kit/fast_path.py": (
        Bug("tokens that skip stages cost no credit", "            answer.credit -= len(tokens)\n", ""),
        Bug("a path takes tokens beyond the credit", "min(TOKENS_MAX, credit)", "TOKENS_MAX if credit else 0"),
        Bug("the recording of tokens has no limit", "min(TOKENS_MAX, credit)", "credit"),
        Bug(
            "an error of a client's socket ends the link",
            "            self._answers[0].fail_relay(error)\n",
            "            raise\n",
        ),
        Bug(
            "a text that cannot be made ends the link",
            "# it rises again on the general way, in the stage that knows the texts\n            return False",
            "\n            raise",
        ),
        Bug("a bug of a stage ends the link", "                answer.fail_relay(error)\n", "                raise\n"),
        Bug(
            "an answer that is cut off has lost its last tokens",
            "        self.settle()\n        if answer.fast_path is self:",
            "        if answer.fast_path is self:",
        ),
        Bug(
            "only one answer is cut off",
            "for gone in self._answers[place:]:",
            "for gone in self._answers[place : place + 1]:",
        ),
    ),
    "actors/kit/calls.py": (
        Bug("a path does not know what other replies have cost", "self.fast_path.measure()", "pass"),
        Bug(
            "a reply overtakes the tokens that skipped its stage",
            "            self.fast_path.settle()\n        if units",
            "            pass\n        if units",
        ),
        Bug(
            "a deadline forgets the tokens that skipped its stage",
            "                self.fast_path.settle()  # the deadline",
            "                pass  # the deadline",
        ),
    ),
    "actors/engines/slots.py": (
        Bug(
            "a preemption is not noticed beside fast tokens",
            "        self._settle()\n        last_at,",
            "        last_at,",
        ),
    ),
    "actors/routing/routed_request.py": (
        Bug(
            "a resumed answer repeats tokens that skipped the router",
            "            self._sent += ids\n",
            "            pass\n",
        ),
    ),
    "actors/text/choices.py": (
        Bug(
            "tokens overtake the part of a character",
            "            _close_fast_path(generation)\n            pieces",
            "            pieces",
        ),
        Bug("the tokens of several choices are mixed", "self.answer if alone else None", "self.answer"),
    ),
    "supervisor/gateway/requests.py": (
        Bug("tokens on the fast path are not counted", "            record.completion_tokens += 1\n", ""),
        Bug(
            "gaps between tokens on the fast path are not measured",
            "                gaps.observe(now - last_at)\n",
            "                pass\n",
        ),
    ),
    "supervisor/gateway/http/routes/answering.py": (
        Bug("the chunk of a token on the fast path is too short", "(size + len(encoded), head", "(len(encoded), head"),
    ),
    "protocol/dialects/choices.py": (
        Bug(
            "log probabilities are left out of plain chunks",
            "None if head is None or self._logprobs or self._ids else",
            "None if head is None else",
        ),
    ),
    "supervisor/gateway/websocket/lanes.py": (
        Bug(
            "events of tokens on the fast path are not counted",
            "                record.sent_bytes += send(delta(text))\n",
            "                send(delta(text))\n",
        ),
    ),
}
