"""The check of a request for a profile, which has to be safe for every kind of engine."""

from __future__ import annotations

from collections.abc import Collection
from math import isfinite

from protocol.errors import BadRequest, Overloaded
from protocol.messages.profile import SECONDS_MAX, STEPS_MAX, Activity, StartProfile

NO_PROFILE = "no profile runs; list-files has what earlier ones have left"


def check_profile(request: StartProfile, has: Collection[Activity]) -> tuple[Activity, ...]:
    """Return what is to be recorded; raises `BadRequest` for limits out of range or an activity that it has not."""
    if not (isfinite(request.seconds) and 0 < request.seconds <= SECONDS_MAX):
        raise BadRequest(f"a profile lasts at most {SECONDS_MAX:g} seconds", param="seconds")
    if not 1 <= request.steps <= STEPS_MAX:
        raise BadRequest(f"a profile has 1 to {STEPS_MAX} steps", param="steps")
    for activity in request.activities:
        if activity not in has:
            raise BadRequest(f"this engine has no {activity}, only {', '.join(sorted(has))}", param="activities")
    return tuple(dict.fromkeys(request.activities)) or tuple(has)


def is_running(profile: str, remaining_s: float) -> Overloaded:
    """Return the refusal of a second profile."""
    return Overloaded(f"{profile} runs, for {max(0.0, remaining_s):.1f} s more at most; stop-profile ends it now")
