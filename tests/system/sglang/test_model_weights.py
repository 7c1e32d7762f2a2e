"""One version of weights for two real engines: the loop of a trainer, and schedulers that are killed in its updates."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import msgspec
import pytest
from attrs import define, field, frozen

from bench.rig.clients import Chat, Outcome, chat_body
from bench.rig.node import MODEL, SGLANG, Node, node, short_folder, wait_until
from bench.rig.processes import memory_bytes
from bench.rig.prompts import PROMPTS
from protocol.messages.leaving import RunningRequests
from tests.system.sglang.conftest import RUNS_AHEAD
from tests.system.sglang.test_clients import idle
from tests.system.sglang.test_memory import post
from tests.system.sglang.test_versions import versions
from tests.system.sglang.test_weights import other_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

ENGINES = (f"main/{MODEL}-0", f"main/{MODEL}-1")
SLOTS = 40  # of each engine, and places in the queue: more than there are clients
SECOND = f'[engine.{MODEL}-1]\nmodel = "{MODEL}"\nslots = {SLOTS}\n'
WITHIN_S = 120.0  # for what else would never be
SEED = 1

UPDATES = 20
CLIENTS = 32
LEFT_SHARE = 0.1  # of their answers
TOKENS_MIN, TOKENS_MAX = 5, 150
SAMPLES = 8  # whole answers with the present weights, before a trainer replaces them
# The growth of a scheduler's memory from the update `EARLY` to the last one. Updates of an idle engine are flat (8 kB each),
# but under streams it grows by 5 to 8 MB an update, for a cause not yet known: 1.16 to 1.19 was measured (docs/known.md).
# So this bound finds a growth that becomes worse, and does not prove that there is none; 1.1 is wanted.
EARLY, GROWTH_MAX = 5, 1.3

KILLS = 5  # in updates of each way
CLIENTS_OF_KILLS = 8
AFTER_LOSS = {"engine_lost"}  # the errors of answers that their engine had begun

HOLD, DRAIN = RunningRequests.HOLD, RunningRequests.DRAIN
BEGIN, TENSORS, END, DISK = (
    "/begin_weights_update",
    "/update_weights_from_tensors",
    "/end_weights_update",
    "/update_weights_from_disk",
)
Outcomes: TypeAlias = dict[str, Any]


# Clients ---------------------------------------------------------------------------------


@frozen
class Answer:
    """One answer: its times, its engine, and each step of the weights that computed it with its number of tokens."""

    asked_at: float
    outcome: Outcome
    steps: list[tuple[int, int]]
    is_left: bool

    @property
    def engine(self) -> str:
        """The engine that was chosen for it; empty if its stream began before, as where it had to wait."""
        return self.outcome.headers.get("x-route", "").partition(";")[0]


def ask(target: Node, chance: Random, *, is_left: bool) -> Answer:
    """Ask for a streamed answer of a drawn length; one that is left ends at a drawn place in its first half."""
    tokens = chance.randint(TOKENS_MIN, TOKENS_MAX)
    left_behind = chance.randint(1, tokens // 2) if is_left else tokens + 1
    body = chat_body(chance.choice(PROMPTS), tokens, stream_options={"include_usage": True})
    asked_at, end = time.perf_counter(), dict[str, Any]()
    chat = Chat(target.port, body, target.admin_key)
    for event in chat.events():
        end |= next((choice for choice in event.get("choices", ()) if choice["finish_reason"]), {})
        if chat.outcome.pieces >= left_behind:
            chat.leave()
            break
    chat.close()
    if not chat.outcome.whole:
        return Answer(asked_at, chat.outcome, [], is_left)
    assert chat.outcome.usage is not None
    assert chat.outcome.usage["completion_tokens"] == tokens
    steps = [(int(version.removeprefix("step-")), count) for version, count in versions(end, tokens)]
    assert steps, f"an answer without a version: {end}"
    assert [step for step, _ in steps] == sorted({step for step, _ in steps}), "an answer went back"
    return Answer(asked_at, chat.outcome, steps, is_left=False)


@contextmanager
def asking(target: Node, clients: int, left_share: float = 0.0) -> Iterator[list[Answer]]:
    """Let so many clients ask for one answer after the other, while the body runs; yield their answers so far."""
    answers, over = list[Answer](), threading.Event()

    def ask_on(number: int) -> None:
        chance = Random(f"{SEED}/{number}")
        while not over.is_set():
            answers.append(ask(target, chance, is_left=chance.random() < left_share))
            if answers[-1].outcome.error is not None:
                time.sleep(0.1)

    with ThreadPoolExecutor(clients) as threads:
        running = [threads.submit(ask_on, number) for number in range(clients)]
        try:
            yield answers
        finally:
            over.set()
        for each in running:
            each.result(WITHIN_S)


def whole(answers: list[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.steps]


def check_never_back(answers: list[Answer]) -> None:
    """Check that no answer begins with older weights than one of any client that had ended before it was asked for."""
    ended, newest = deque(sorted(whole(answers), key=lambda answer: answer.outcome.ended_at)), 0
    for answer in sorted(whole(answers), key=lambda answer: answer.asked_at):
        while ended[0].outcome.ended_at < answer.asked_at:
            newest = max(newest, ended.popleft().steps[-1][0])
        assert answer.steps[0][0] >= newest, f"step {answer.steps[0][0]} after step {newest}"


# The trainer -----------------------------------------------------------------------------


@define
class Trainer:
    """A trainer of the model: it writes a checkpoint for each step, and has both engines take it over HTTP."""

    target: Node
    folder: Path
    step: int = 0  # the latest
    took_s: dict[str, float] = field(factory=dict)  # the latest time of each request

    def next_checkpoint(self) -> Path:
        """Write the checkpoint of the next step; return its folder."""
        self.step += 1
        return other_checkpoint(self._folder(self.step), (0x3F40 + self.step).to_bytes(2, "little"))

    def _folder(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def update(self, running: RunningRequests, during: Callable[[str], object] = lambda _: None) -> Outcomes:
        """Have the engines load the next checkpoint from its folder; `during` is called when the request begins."""
        checkpoint = self.next_checkpoint()
        during(DISK)
        return self._ask(
            DISK, lambda: post(self.target, DISK, folder=str(checkpoint), version=f"step-{self.step}", running=running)
        )

    def send(
        self,
        running: RunningRequests,
        during: Callable[[str], object] = lambda _: None,
        *,
        engine: str = "",
        step: int | None = None,
    ) -> Outcomes:
        """Send all tensors of the next step, or of another one, to the engines, or to one alone.

        `during` is called when each request begins, with its path.
        """
        checkpoint = self.next_checkpoint() if step is None else self._folder(step)
        of_engine = f"?engine={engine}" if engine else ""
        during(BEGIN)
        begun = self._ask(BEGIN, lambda: post(self.target, BEGIN + of_engine, running=running))
        if not any(map(succeeded, begun.values())):
            return begun
        during(TENSORS)
        self._ask(TENSORS, lambda: post_file(self.target, TENSORS + of_engine, checkpoint / "model.safetensors"))
        during(END)
        return self._ask(END, lambda: post(self.target, END + of_engine, version=checkpoint.name))

    def _ask(self, name: str, request: Callable[[], tuple[int, Any]]) -> Outcomes:
        """Send a request, and return the outcome of each engine."""
        began_at = time.perf_counter()
        _, body = request()
        self.took_s[name] = time.perf_counter() - began_at
        outcomes: Outcomes = body.get("engines", body)
        assert set(outcomes) <= set(ENGINES), body
        return outcomes

    def present(self) -> dict[str, tuple[int, str]] | None:
        """Return the step and the checksum of each engine's weights; None while an engine does not answer."""
        status, body = self.target.get("/weights_checksum", WITHIN_S)
        if status != 200:
            return None
        outcomes: Outcomes = msgspec.json.decode(body)
        return {name: (step_of(outcome), outcome["checksum"]) for name, outcome in outcomes.items()}

    def both_present(self) -> dict[str, tuple[int, str]]:
        """Wait for the answers of both engines, and return the step and the checksum of each."""
        found = list[dict[str, tuple[int, str]]]()

        def is_there() -> bool:
            found.extend(filter(None, [self.present()]))
            return bool(found)

        assert wait_until(is_there, WITHIN_S, every_s=0.05) is not None, self.target.get("/weights_checksum")
        assert set(found[-1]) == set(ENGINES)
        return found[-1]

    def have_one_version(self) -> bool:
        """Whether both engines have the same weights."""
        present = self.present()
        return present is not None and len(set(present.values())) == 1


def succeeded(outcome: Any) -> bool:
    return "error" not in outcome


def step_of(outcome: Any) -> int:
    """Return the step of an engine's weights, 0 for those of its start."""
    return int(outcome["version"].removeprefix("step-")) if outcome["version"] != "default" else 0


def post_file(target: Node, path: str, file: Path) -> tuple[int, Any]:
    """Return the status and the JSON of one POST of a file."""
    connection = HTTPConnection("127.0.0.1", target.port, timeout=WITHIN_S)
    try:
        headers = {"content-type": "application/octet-stream", **target.authorization}
        connection.request("POST", path, file.read_bytes(), headers)
        answer = connection.getresponse()
        return answer.status, msgspec.json.decode(answer.read())
    finally:
        connection.close()


def schedulers(target: Node) -> list[int]:
    """Return the process ids of the living schedulers."""
    target.observe()
    return sorted(pid for pid, role in target.roles.items() if role == "scheduler" and target.observed[pid].lives)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """A trainer whose two engines have the weights of its first step."""
    engines = f"{SGLANG}{RUNS_AHEAD}{SECOND}{SGLANG}{RUNS_AHEAD}"
    with short_folder() as folder, node(folder, slots=SLOTS, engine=engines, admin_key="trainer") as running:
        trainer = Trainer(running, tmp_path_factory.mktemp("steps"))
        trainer.both_present()
        outcomes = trainer.update(DRAIN)
        assert all(map(succeeded, outcomes.values())), outcomes
        yield trainer


# Checks ----------------------------------------------------------------------------------


def test_a_trainer_replaces_the_weights_of_two_engines_under_clients(trainer: Trainer) -> None:
    target, first = trainer.target, trainer.step
    pids, early = schedulers(target), list[int]()
    assert len(pids) == len(ENGINES)
    with asking(target, CLIENTS, LEFT_SHARE) as answers:

        def samples() -> int:
            return sum(answer.steps[0][0] == trainer.step for answer in whole(answers))

        for number in range(UPDATES):
            assert wait_until(lambda: samples() >= SAMPLES, WITHIN_S, every_s=0.02) is not None
            way, running = (trainer.update, trainer.send)[number % 2], (DRAIN, HOLD)[number // 2 % 2]
            outcomes = way(running)
            assert set(outcomes) == set(ENGINES)
            assert {step_of(outcome) for outcome in outcomes.values()} == {trainer.step}, outcomes
            assert len({outcome["checksum"] for outcome in outcomes.values()}) == 1, outcomes
            if number + 1 == EARLY:
                early = [memory_bytes(pid, "Rss") for pid in pids]
        late = [memory_bytes(pid, "Rss") for pid in pids]
    left = [answer for answer in answers if answer.is_left]
    held = [answer for answer in answers if len(answer.steps) > 1]
    growth = [after / before for before, after in zip(early, late, strict=True)]
    assert [answer.outcome for answer in answers if answer not in left and not answer.steps] == []
    check_never_back(answers)
    assert left
    assert held
    assert {answer.engine for answer in whole(answers)} - {""} == set(ENGINES)
    assert {step for answer in answers for step, _ in answer.steps} == {*range(first, trainer.step + 1)}
    assert trainer.have_one_version()
    idle(target)
    assert schedulers(target) == pids
    assert max(growth) <= GROWTH_MAX, growth


@frozen
class Blow:
    """The kill of one scheduler: right before a request, or at a share of the time that it usually takes."""

    path: str
    running: RunningRequests
    victim: int
    share: float | None = None


def blows(chance: Random) -> list[Blow]:
    """Return drawn kills in updates from disk and in sessions of tensors, in turns."""

    def drawn(path: str, *, at_once: bool = False) -> Blow:
        share = None if at_once else chance.random()
        return Blow(path, chance.choice((HOLD, DRAIN)), chance.randrange(len(ENGINES)), share)

    disk = [drawn(DISK) for _ in range(KILLS)]
    tensors = [drawn(TENSORS, at_once=True), drawn(TENSORS), drawn(END, at_once=True), drawn(END), drawn(END)]
    chance.shuffle(tensors)
    return [blow for pair in zip(disk, tensors, strict=True) for blow in pair]


def test_a_scheduler_that_is_killed_in_an_update_leaves_one_version(trainer: Trainer) -> None:
    target = trainer.target
    with asking(target, CLIENTS_OF_KILLS) as answers:
        usual_s = {}
        for running in (HOLD, DRAIN):
            for way in (trainer.update, trainer.send):
                assert all(map(succeeded, way(running).values()))
            usual_s[running] = dict(trainer.took_s)
        settled = trainer.step  # the step of both engines, before each kill
        sent = True  # whether its weights came as tensors
        for blow in blows(Random(SEED)):
            pid = schedulers(target)[blow.victim]
            timers = list[threading.Timer]()

            def strike(path: str, blow: Blow = blow, pid: int = pid, timers: list[threading.Timer] = timers) -> None:
                if path == blow.path:
                    delay_s = (blow.share or 0.0) * usual_s[blow.running][path]
                    timers.append(threading.Timer(delay_s, os.kill, (pid, signal.SIGKILL)))
                    timers[0].start()
                    if blow.share is None:
                        timers[0].join()

            outcomes = trainer.update(blow.running, strike) if blow.path == DISK else trainer.send(blow.running, strike)
            timers[0].join()
            updated = [name for name, outcome in outcomes.items() if succeeded(outcome)]
            if updated:
                settled, sent = trainer.step, blow.path != DISK
            present = trainer.both_present()
            assert max(step for step, _ in present.values()) == settled, (blow, outcomes, present)
            behind = [name for name, (step, _) in present.items() if step < settled]
            for name in behind if sent else ():
                joined = trainer.send(DRAIN, engine=name, step=settled)
                assert succeeded(joined[name]), (blow, joined)
            assert wait_until(trainer.have_one_version, WITHIN_S, every_s=0.05) is not None, (blow, outcomes)
            assert {step for step, _ in trainer.both_present().values()} == {settled}
            healed_at = time.perf_counter()

            def serve(healed_at: float = healed_at) -> bool:
                asked = [answer for answer in whole(answers) if answer.asked_at > healed_at]
                return {answer.engine for answer in asked} >= set(ENGINES)

            assert wait_until(serve, WITHIN_S, every_s=0.05) is not None, blow
    check_never_back(answers)
    errors = [answer.outcome.error for answer in answers if not answer.steps]
    assert {error["code"] if error else "" for error in errors} <= AFTER_LOSS, errors
    assert len(schedulers(target)) == len(ENGINES)
    assert trainer.have_one_version()
    idle(target)
