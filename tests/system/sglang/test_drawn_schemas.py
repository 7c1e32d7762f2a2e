"""A hundred drawn schemas on the real engine: no answer says that it stopped and does not validate."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator

from bench.rig.node import MODEL, Node
from tests.rig.drawn_schemas import Schema, schemas
from tests.rig.varied_schemas import Draw
from tests.system.sglang.test_options import MESSAGES, post

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
log = logging.getLogger(__name__)

DRAWN, AT_A_TIME = 100, 4


def drawn() -> list[Schema]:
    """Return different schemas, the same ones each time."""
    found: dict[str, Schema] = {}

    @settings(
        max_examples=10 * DRAWN,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schemas())
    def note(schema: Schema) -> None:
        found.setdefault(json.dumps(schema), schema)

    note()
    # Early examples are the simplest ones.
    step = max(1, len(found) // DRAWN)
    return list(found.values())[::step][:DRAWN]


def varied() -> list[Schema]:
    """Return the schemas of the seeds by which the law of schemas is tried: most have no bounds."""
    return [json.loads(Draw(Random(seed)).text()) for seed in range(DRAWN)]


def body(schema: Schema) -> dict[str, Any]:
    named = {"name": "drawn", "schema": schema}
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 400, "temperature": 1}
    return asked | {"response_format": {"type": "json_schema", "json_schema": named}}


def ended(schema: Schema, status: int, answer: dict[str, Any]) -> str:
    """Return how an answer ended; `broken` if it stopped and does not validate."""
    if status == 200:
        choice = answer["choices"][0]
        if choice["finish_reason"] != "stop":
            return str(choice["finish_reason"])
        return "valid" if validates(schema, choice["message"]["content"]) else "broken"
    error = answer["error"]
    if error["code"] != "invalid_request":
        return str(error["code"])
    keyword = re.search(r"#\S*: (\S+): ", error["message"])
    return f"refused: {keyword[1] if keyword else error['message']}"


def validates(schema: Schema, text: str) -> bool:
    """Return whether an answer validates, by a validator of another origin than the product's."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return bool(Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).is_valid(value))


@pytest.mark.parametrize(("draw", "valid_min"), [(drawn, DRAWN // 4), (varied, 5)])
def test_no_answer_stops_that_does_not_validate(served: Node, draw: Callable[[], list[Schema]], valid_min: int) -> None:
    wanted = draw()
    assert len(wanted) == DRAWN
    with ThreadPoolExecutor(AT_A_TIME) as clients:
        answers = list(clients.map(partial(post, served.port, "/v1/chat/completions"), map(body, wanted)))
    outcomes = [ended(schema, *answer) for schema, answer in zip(wanted, answers, strict=True)]
    log.info("drawn schemas ended: %s", dict(Counter(outcomes).most_common()))
    for schema, outcome, (_, answer) in zip(wanted, outcomes, answers, strict=True):
        if outcome in {"broken", "answer_invalid", "engine_refused"}:
            log.warning("%s: %s: %s", outcome, json.dumps(schema), json.dumps(answer))
    assert "broken" not in outcomes
    assert outcomes.count("valid") > valid_min
