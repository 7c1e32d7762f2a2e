"""The fields of an answer about the versions of the weights that computed it, the same in every dialect.

They stand beside the reason of an end: in a choice of chat completions and of completions, since the choices of one
request may differ, and in a response, which has one choice.
"""

from __future__ import annotations

import msgspec

from protocol.weight_versions import FIRST_VERSION, WeightVersions

_encode = msgspec.json.Encoder().encode


def version_fields(versions: WeightVersions) -> dict[str, object]:
    """Return the fields of a choice; none where its engine has had no other weights, and they have no name."""
    if all(version in ("", FIRST_VERSION) for version, _ in versions):
        return {}
    fields: dict[str, object] = {"weight_version": versions[-1][0]}
    if len(versions) > 1:
        fields["weight_versions"] = [{"version": version, "tokens": tokens} for version, tokens in versions]
    return fields


def version_members(versions: WeightVersions) -> bytes:
    """Return the fields as JSON behind other members of an object."""
    fields = version_fields(versions)
    return b"," + _encode(fields)[1:-1] if fields else b""
