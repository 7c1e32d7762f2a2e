"""The formats of strings in JSON schemas, each as a regular expression that matches some of its strings, always valid.

A format is narrower here than in its RFC where programs disagree: no leap second, no 31st of a shorter month, and of
29th of February none but in years that are leap years by the last two digits.
"""

from __future__ import annotations

_YEAR = r"(?:19|20)[0-9]{2}"
_DAY = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))|20(?:[02468][048]|[13579][26])-02-29)"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_ZONE = r"(?:Z|[+-](?:0[0-9]|1[0-3]):[0-5][0-9])"
_HEX = "[0-9a-f]"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_IPV6 = "[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){7}"
_LABEL = "[a-z0-9]{1,20}(?:-[a-z0-9]{1,20}){0,2}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_DOMAIN = r"[a-z][a-z0-9]{0,19}(?:-[a-z0-9]{1,20}){0,2}(?:\.[a-z]{2,12}){1,3}"
_PATH = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-F]{2})*"
_QUERY = rf"(?:\?{_PATH})?(?:#{_PATH})?"

FORMATS = {
    "date": _DAY,
    "time": _CLOCK + _ZONE,
    "date-time": f"{_DAY}T{_CLOCK}{_ZONE}",
    "duration": (
        "P(?:[0-9]{1,4}D(?:T[0-9]{1,4}H(?:[0-9]{1,4}M(?:[0-9]{1,4}S)?)?)?"
        "|T[0-9]{1,4}(?:H(?:[0-9]{1,4}M)?|M(?:[0-9]{1,4}S)?|S)|[0-9]{1,4}W)"
    ),
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-4{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}",
    "email": rf"[A-Za-z0-9][A-Za-z0-9_+-]{{0,30}}(?:\.[A-Za-z0-9_+-]{{1,10}}){{0,2}}@{_DOMAIN}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "ipvanyaddress": f"(?:{_IPV4}|{_IPV6})",
    "uri": rf"https?://{_DOMAIN}(?::[1-9][0-9]{{0,3}})?(?:/{_PATH})?{_QUERY}",
    "uri-reference": rf"(?:https?://{_DOMAIN})?/{_PATH}{_QUERY}",
    "json-pointer": "(?:/(?:[^/~]|~[01])*)*",
}
"""The regular expression of each format."""

ANNOTATIONS = frozenset({"binary", "byte", "password", "path", "int32", "int64", "float", "double"})
"""Formats that say how a value is used and not which one is valid."""
