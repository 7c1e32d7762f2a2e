"""Bugs to plant where the text of an answer is put together: choices, stop strings, log probabilities, usage."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/text/choices.py": (
        Bug("a choice is decoded without its prompt", "            generate.tokens,\n", "            (),\n"),
        Bug(
            "the last text of an answer is dropped",
            "            pieces.take(detokenizer.finish())\n",
            "            detokenizer.finish()\n",
        ),
        Bug(
            "the engine is not told that a stop string has come",
            "generation.abandon()  # leaving aborts",
            "pass  # leaving aborts",
        ),
        Bug(
            "usage counts the tokens of the last choice only",
            "self._completion += finished.usage.completion_tokens",
            "self._completion = finished.usage.completion_tokens",
        ),
        Bug(
            "usage counts a token after the stop string",
            "self._completion += detokenizer.tokens",
            "self._completion += detokenizer.tokens + 1",
        ),
        Bug(
            "usage counts the prompt once a choice",
            "sum(len(choices[0].tokens) for choices in generations)",
            "sum(len(each.tokens) for choices in generations for each in choices)",
        ),
        Bug(
            "a stop string reads as the longest length",
            "emit(ChoiceEnded(FinishReason.STOP, choice, detokenizer.matched))",
            "emit(ChoiceEnded(FinishReason.LENGTH, choice, detokenizer.matched))",
        ),
        Bug(
            "choices are told under one number",
            "nursery.start_soon(self._choice, generate, first + place, emit, place == 0)",
            "nursery.start_soon(self._choice, generate, first, emit, place == 0)",
        ),
    ),
    "actors/text/prompts.py": (
        Bug("choices share their seed", "evolve(sampling, seed=sampling.seed ^ choice)", "sampling"),
        Bug("choices share their id", "if choice else request_id", "if False else request_id"),
    ),
    "actors/text/detokenizer.py": (
        Bug(
            "the first word of an answer loses its space",
            "            self._decoding.begin_behind(self.prompt)\n",
            "            pass\n",
        ),
        Bug(
            "a prompt that ends within a character delays the answer",
            "if (text := self._decode(ids)) and not text.endswith(REPLACEMENT_CHARACTER):",
            "if text := self._decode(ids):",
        ),
        Bug("half a character is told", "if not text.endswith(REPLACEMENT_CHARACTER):", "if True:"),
        Bug("what a choice held back is lost", "            out += self._held_back()\n", "            pass\n"),
        Bug(
            "a whole token overtakes what is held back",
            "self.tokens != self._given_tokens or self._decoding.holds",
            "self.tokens != self._given_tokens",
        ),
        Bug(
            "a whole token is counted as a piece of one, whatever came without text",
            "or self.tokens != self._given_tokens or",
            "or",
        ),
        Bug("the decoder forgets the whole tokens", "self._given, self._before = 1, text", "pass"),
        Bug(
            "stop strings are not looked for in whole tokens",
            "        if self.stops is not None or self.stop_ids or",
            "        if self.stop_ids or",
        ),
        Bug("text is lost behind a stop token", "out += self._held_back() + self._decoding.flush()", "pass"),
    ),
    "actors/text/whole_tokens.py": (
        Bug("an end of an answer has text", "{*eos_ids, *(token", "{*(token"),
        Bug("an added token is whole", '*(token["id"] for token in added)', ""),
        Bug(
            "a part of a character is whole",
            "if text and REPLACEMENT_CHARACTER not in text else None",
            "if text else None",
        ),
        Bug("any decoder joins bytes", 'or decoder.get("type") != "ByteLevel"', ""),
    ),
    "actors/text/stop_strings.py": (
        Bug("a stop string leaks", "return whole[:-size], whole[-size:]", "return whole, whole[-size:]"),
        Bug("the start of a stop string leaks", "strings.depth[state]\n        self._state", "0\n        self._state"),
        Bug("what may be a stop string is forgotten", "self.held = whole[-keep:]", 'self.held = ""'),
    ),
    "actors/text/logprobs.py": (
        Bug(
            "the log probability of a text's last token is lost",
            "self._pending[0].end <= self._given:",
            "self._pending[0].end < self._given:",
        ),
        Bug("log probabilities that are left are lost", "        if last:\n", "        if False:\n"),
    ),
    "actors/processor.py": (
        Bug("a processor's permit leaks", "            free.release()\n", "            pass\n"),
        Bug("long stop strings stop the loop", "work.run(stop_work, partial", "work.run(1, partial"),
    ),
    "protocol/dialects/choices.py": (
        Bug("log probabilities are left out of chunks", "_encode(self._logprobs_of(reply))", 'b"null"'),
    ),
}
