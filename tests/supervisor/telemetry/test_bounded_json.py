"""The JSON of log lines is that of the standard library."""

from __future__ import annotations

import json
import logging
from math import inf, nan

from hypothesis import example, given
from hypothesis import strategies as st

from supervisor.supervision.events import ChildEventKind
from supervisor.telemetry.bounded_json import VALUE_CHARACTERS_MAX, bounded
from supervisor.telemetry.logs import RECORD_FIELDS, JsonFormatter

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(list(ChildEventKind)),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=4), values, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(st.text(max_size=8) | st.sampled_from(["node", "event", "time"]), VALUES, max_size=6),
    st.sampled_from([None, "front", 'a "node"']),
    st.text(max_size=20),
    st.sampled_from([0.0, 1_700_000_000.4, 1_700_000_000.9, 1_700_000_001.0]),
)
@example(
    {"long": "x" * (VALUE_CHARACTERS_MAX + 1), "high": 2**63, "low": -(2**63), "nan": nan, "inf": inf}, None, "", 0.0
)
def test_a_line_has_the_bytes_of_the_standard_encoder(
    fields: dict[str, object], node: str | None, event: str, created: float
) -> None:
    formatter = JsonFormatter(node)
    for moment in (created, created + 0.5):
        record = logging.makeLogRecord({"name": "a", "msg": "%s", "args": (event,), "levelname": "INFO"})
        record.created = moment
        vars(record).update({name: value for name, value in fields.items() if name not in RECORD_FIELDS})
        line: dict[object, object] = {
            "time": logging.Formatter().formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": "info",
            **({} if node is None else {"node": node}),
            "event": event,
            **{name: bounded(value) for name, value in fields.items() if name not in RECORD_FIELDS},
        }
        assert formatter.format(record) == json.dumps(line, ensure_ascii=False)
