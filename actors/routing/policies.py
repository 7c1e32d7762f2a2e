"""The routing policies that `[model.X] policy` may name: each is a file of this folder and a row here."""

from __future__ import annotations

from collections.abc import Mapping

from actors.routing.least_loaded import least_loaded
from actors.routing.load import Policy

POLICIES: Mapping[str, Policy] = {
    "least_loaded": least_loaded,
}
