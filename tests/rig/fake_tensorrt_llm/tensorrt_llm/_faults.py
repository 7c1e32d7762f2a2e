"""The faults of the fake: what is reported of TensorRT-LLM, and what may happen to any process.

A prompt that begins with `MARK` and a fault's number has the fault. So has every request of a process with the fault's
name in the environment variable `ESPALIER_FAKE_TRTLLM_FAULT`.
"""

import os
from collections.abc import Sequence
from enum import Enum

MARK = (7, 7, 7)
AFTER_TOKENS = 2  # of an answer, a fault in the middle comes

SLOW_S = 3.0
DEATH_CODE = 70
"""The exit code of a process that dies by a fault."""


class Fault(Enum):
    """A fault, by its number in a prompt."""

    ABORT_IGNORED = 1  # an abort has no effect
    TRANSFER_HANGS = 2  # a decode gets no KV cache, and no abort ends its wait
    LOGPROBS_AHEAD = 3  # log probabilities of tokens to come are there
    LOGPROBS_FLOATS = 4  # log probabilities are bare numbers
    LOGPROB_MISSING = 5  # the drawn token is not among the log probabilities
    CANCELLED = 6  # an answer ends as cancelled, by itself
    TIMEOUT = 7  # an answer ends by a time limit
    REQUEST_ERROR = 8  # an answer fails in its middle
    REFUSED = 9  # the call raises
    FATAL = 10  # the engine fails in the middle of an answer, and so does every answer
    SHUT_DOWN = 11  # the engine is shut down in the middle of an answer
    DEATH = 12  # the process ends in the middle of an answer
    STUCK = 13  # an answer has no next step, and no abort ends it
    SLEEP_FAILS = 14  # memory is not released
    WAKEUP_FAILS = 15  # memory does not return: another process has taken it
    UNHASHED = 16  # images get no hashes, as after a first image that could not be hashed
    IMAGES_FAIL = 17  # the input processor fails
    IMAGES_SLOW = 18  # the input processor takes `SLOW_S`
    SLEEP_UNSUPPORTED = 19  # the executor has no such call
    SLEEP_HALF = 20  # memory is released in part, and the error is of the class of a refusal


def fault_of(prompt: Sequence[int]) -> Fault | None:
    """Return the fault of a request."""
    if name := os.environ.get("ESPALIER_FAKE_TRTLLM_FAULT"):
        return Fault[name]
    if tuple(prompt[: len(MARK)]) != MARK or len(prompt) == len(MARK):
        return None
    number = prompt[len(MARK)]
    return Fault(number) if number in [each.value for each in Fault] else None


def prompt_of(fault: Fault, *tokens: int) -> list[int]:
    """Return a prompt that has a fault."""
    return [*MARK, fault.value, *tokens]
