"""More bugs to plant: those by which a client's wish decides how long a turn takes, or who waits for whom."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/text/encoding.py": (
        Bug("a text is tokenised whole before it is refused", "    while part < len(text):\n", "    while False:\n"),
        Bug(
            "a text that fits is refused for where it was cut",
            "if count > tokens_max + SEAM_TOKENS:",
            "if count > tokens_max // 2:",
        ),
    ),
    "actors/text/token_bounds.py": (
        Bug(
            "composed characters are counted as they come",
            'COMPOSING_NORMALIZERS = {"NFC": COMPOSED_CHARACTERS_MAX, "NFKC": COMPOSED_CHARACTERS_MAX}',
            'COMPOSING_NORMALIZERS = {"NFC": 1, "NFKC": 1}',
        ),
    ),
    "actors/text/chat_template.py": (
        Bug("a template may loop as long as it likes", "        _take(len(self))\n", "        pass\n"),
    ),
    "actors/text/candidates.py": (
        Bug("a draft without a likelihood may be the likeliest", "finite(token.logprob)", "token.logprob"),
        Bug(
            "drafts are told in one turn",
            "                emit(text)\n            await trio.lowlevel.checkpoint()\n",
            "                emit(text)\n",
        ),
    ),
    "actors/text/pieces.py": (
        Bug("what was held back is told at once", "SCORED_A_PIECE = 4", "SCORED_A_PIECE = 4096"),
        Bug(
            "of what was held back the rest is lost",
            "            else:\n                out",
            "            elif not out:\n                out",
        ),
    ),
    "actors/text/stop_strings.py": (
        Bug(
            "a shorter stop string inside a longer one is missed",
            "self.complete[after] = self.complete[after] or self.complete[self._shorter[after]]",
            "pass",
        ),
    ),
    "protocol/dialects/answer_builder.py": (
        Bug("a body is written in one piece", "PIECE_BYTES = 64 * 1024", "PIECE_BYTES = 64 * 1024 * 1024"),
    ),
    "protocol/dialects/options.py": (
        Bug("a least length may stand beside a grammar", "if names and self.min_tokens:", "if False:"),
        Bug("a penalty may be next to nothing", "Within(at_least=0.001, at_most=2)", "Within(above=0, at_most=2)"),
    ),
    "protocol/dialects/tokens.py": (
        Bug(
            "a text of millions of characters is encoded in one step",
            "CHARACTERS_A_STEP = 64 *",
            "CHARACTERS_A_STEP = 64 * 1024 *",
        ),
    ),
    "supervisor/gateway/http/routes/tokens.py": (
        Bug("an answer of token ids takes memory that nobody counts", "exchange.answer_memory.grow(body.size)", "pass"),
    ),
    "supervisor/threads/text_threads.py": (
        Bug("whoever came first has every thread", "min(queues, key=lambda entry: entry[1].last_turn)", "queues[0]"),
        Bug("whoever asks anew goes ahead of all who wait", "_Queue(self._turns - 0.5)", "_Queue(0)"),
        Bug("heavy work takes every thread", "self._heavy < max(1, self.limits.threads - 1)", "True"),
        Bug(
            "a thread that is given to one who has left is lost",
            "                self.release(owner, heavy=heavy)\n",
            "                pass\n",
        ),
    ),
}
