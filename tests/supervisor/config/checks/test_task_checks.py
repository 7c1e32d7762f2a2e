"""The task of a model's engines is one, and what means nothing for an embedder is a mistake by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.errors import StartFailed
from protocol.messages.cluster import Leg
from supervisor.engines.kinds import read_cluster
from tests.rig.cluster_files import MODEL

Written = Callable[[str], Path]  # the fixture `written`
ENGINE = '[engine.{name}]\nmodel = "tiny"\nkind = "simulated"\nkv_tokens_max = 4096\ntask = "{task}"\n'
GOOD = MODEL + ENGINE.format(name="one", task="embed")


def mistakes(path: Path) -> list[str]:
    """Return the message of each mistake in a file."""
    with pytest.raises(StartFailed) as caught:
        read_cluster(path)
    return [line.partition(": ")[2] for line in str(caught.value).splitlines()[1:]]


@pytest.mark.parametrize("task", ["embed", "score"])
def test_an_embedder_has_a_leg_of_its_own(task: str, written: Written) -> None:
    engine = read_cluster(written(MODEL + ENGINE.format(name="one", task=task))).engine["one"]
    assert engine.worker_leg is Leg.EMBED
    assert (engine.pending_prefill_max, engine.admits_by_memory) == (0, False)


@pytest.mark.parametrize("line", ["context_max = 1", "page_size = 8", "slots = 4", "deadlines.total_s = 5.0"])
def test_what_embedders_have_may_be_chosen(line: str, written: Written) -> None:
    assert not read_cluster(written(GOOD + line + "\n")).encodes("tiny")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('leg = "prefill"', "leg"),
        ('leg = "encode"', "leg"),
        ("data_parallel = 2", "data_parallel"),
        ("pending_prefill_tokens_max = 9", "pending_prefill_tokens_max"),
        ('admission = "memory"', "admission"),
        ("canary.enabled = false", "canary"),
        ("encoder.batch_max = 4", "encoder"),
        ("events.publish = true", "events"),
        ("adapters = {}", "adapters"),
        ("deadlines.gap_s = 3.0", "deadlines.gap_s"),
        ("deadlines.first_token_s = 3.0", "deadlines.first_token_s"),
    ],
)
def test_what_means_nothing_for_an_embedder_is_a_mistake(line: str, key: str, written: Written) -> None:
    why = "is for engines that compute answers, and engine.one.task is embed"
    assert f"engine.one.{key}: {why}" in mistakes(written(GOOD + line + "\n"))


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('policy = "kv"', "policy"),
        ("prefill_tokens_min = 5", "prefill_tokens_min"),
        ('tools = "hermes"', "tools"),
        ('reasoning = "none"', "reasoning"),
    ],
)
def test_what_decides_about_answers_means_nothing_for_a_model_of_vectors(line: str, key: str, written: Written) -> None:
    why = "is for models of answers, and the task of this one's engines is embed"
    path = written(MODEL + line + "\n" + ENGINE.format(name="one", task="embed"))
    assert mistakes(path) == [f"model.tiny.{key}: {why}"]


def test_a_model_has_one_task(written: Written) -> None:
    others = ENGINE.format(name="two", task="score") + ENGINE.format(name="three", task="generate")
    assert mistakes(written(GOOD + others)) == [
        "engine.two.task: is score, and that of engine one is embed: a model has one task",
        "engine.three.task: is generate, and that of engine one is embed: a model has one task",
    ]


def test_embedders_of_one_model_return_the_same_vectors(written: Written) -> None:
    other = ENGINE.format(name="two", task="embed") + "simulated.width = 8\n"
    why = "which has the same model, by width or seed"
    assert mistakes(written(GOOD + other)) == [
        f"engine.one.simulated: vectors differ from those of engine two, {why}",
        f"engine.two.simulated: vectors differ from those of engine one, {why}",
    ]


def test_an_embedder_needs_memory(written: Written) -> None:
    assert mistakes(written(GOOD.replace("kv_tokens_max = 4096\n", ""))) == ["engine.one.kv_tokens_max: is missing"]


def test_pools_and_grids_are_of_engines_that_answer(written: Written) -> None:
    assert mistakes(written(GOOD + '[pool.first]\nengines = ["one"]\n')) == [
        "pool.first.engines[0]: is an embedder: pools are of engines that compute tokens"
    ]
    grid = "[model.tiny.grid.both]\nlength_low = 1\nlength_high = 2\nlength_resolution = 1\n"
    found = mistakes(written(GOOD + grid))
    assert any("model.tiny.grid.both: means nothing: there is no engine of model tiny" in each for each in found), found
