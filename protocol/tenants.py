"""The names of caches and sessions within a tenant, which no client of another tenant can form.

A client chooses its `cache_salt` and the name of its session. Each is joined with the tenant of the client's key at the
gateway, before any cache or router sees it. The empty tenant is the default one: its names stay as they are, except
those that look like a joined name.
"""

from __future__ import annotations

import re

TENANT_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}"

_MARK, _END = "tenant:", "/"


def tenant_salt(tenant: str, cache_salt: str | None) -> str | None:
    """Return the salt of a tenant's caches for requests with this `cache_salt`; different pairs have different salts.

    `tenant` is empty or matches `TENANT_PATTERN`, and so contains no end mark.
    """
    if cache_salt is None:
        return f"{_MARK}{tenant}" if tenant else None
    return _joined(tenant, cache_salt)


def tenant_session(tenant: str, session: str) -> str:
    """Return the name of a tenant's session among those of all tenants; empty for a request without a session."""
    return _joined(tenant, session) if session else ""


def _joined(tenant: str, name: str) -> str:
    assert not tenant or re.fullmatch(TENANT_PATTERN, tenant), "a tenant's name is checked where it is read"
    return f"{_MARK}{tenant}{_END}{name}" if tenant or name.startswith(_MARK) else name
