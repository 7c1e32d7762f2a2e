"""The formats of strings in JSON schemas, each as a regular expression whose texts are always valid.

Years have four digits, from 0001 on; there is no leap second and no 31st of a shorter month. A format is narrower than
its RFC where programs disagree, and where the grammar backend is slow.
"""

from __future__ import annotations

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # 0000 is none of these
)
_DAY = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_ZONE = r"(?:Z|[+-](?:0[0-9]|1[0-4]):[0-5][0-9])"
_HEX = "[0-9a-fA-F]"
_OCTET = "(?:0|1[0-9]{0,2}|2(?:[0-4][0-9]?|5[0-5]?|[6-9])?|[3-9][0-9]?)"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP = f"{_HEX}{{1,4}}"
_IPV6 = (
    f"(?:{_GROUP}(?::{_GROUP}){{7}}|{_GROUP}(?::{_GROUP}){{0,2}}::(?:{_GROUP}(?::{_GROUP}){{0,2}})?"
    f"|::(?:{_GROUP}(?::{_GROUP}){{0,5}})?)"
)
# The length of a label has no bound here: counts of that many characters are slow in every step of an engine.
_WORD = "[A-Za-z0-9]+"
_LABEL = f"[A-Za-z][A-Za-z0-9]*(?:-{_WORD})*"
_LOCAL_PART = "[A-Za-z0-9_'+-]+"
_PATH = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-F]{2})*"
_QUERY = rf"(?:\?{_PATH})?(?:#{_PATH})?"

_AUTHORITY = rf"(?:{_LABEL}(?:\.{_LABEL})*|{_IPV4})(?::[1-9][0-9]{{0,3}})?"

FORMATS = {
    "date": _DAY,
    "time": _CLOCK + _ZONE,
    "date-time": f"{_DAY}T{_CLOCK}{_ZONE}",
    "duration": (
        "P(?:[0-9]{1,4}D(?:T[0-9]{1,4}H(?:[0-9]{1,4}M(?:[0-9]{1,4}S)?)?)?"
        "|T[0-9]{1,4}(?:H(?:[0-9]{1,4}M)?|M(?:[0-9]{1,4}S)?|S)|[0-9]{1,4}W)"
    ),
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "email": rf"{_LOCAL_PART}(?:\.{_LOCAL_PART})*@{_WORD}(?:-{_WORD})*(?:\.{_LABEL})+",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "ipvanyaddress": f"(?:{_IPV4}|{_IPV6})",
    "uri": rf"(?:https?|ftp)://{_AUTHORITY}(?:/{_PATH})?{_QUERY}",
    "uri-reference": rf"(?:https?://{_AUTHORITY})?/{_PATH}{_QUERY}",
    "json-pointer": "(?:/(?:[^/~]|~[01])*)*",
}
"""The regular expression of each format."""

ANNOTATIONS = frozenset({"binary", "byte", "password", "path", "int32", "int64", "float", "double"})
"""Formats that say how a value is used and not which one is valid."""
