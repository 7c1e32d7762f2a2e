"""Names within a tenant: different for different tenants, whatever a client calls its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.tenants import TENANT_PATTERN, tenant_salt, tenant_session

TENANTS = st.one_of(st.just(""), st.sampled_from(["a", "a.b"]), st.from_regex(TENANT_PATTERN, fullmatch=True))
# What a client may send: any text, and what looks like the joined name of another tenant.
NAMES = st.one_of(
    st.text(min_size=1, max_size=20), st.builds("tenant:{}{}".format, TENANTS, st.sampled_from(["", "/", "/x"]))
)
SALTS = st.one_of(st.none(), NAMES)


@given(TENANTS, SALTS, TENANTS, SALTS)
def test_no_salt_of_a_client_is_one_of_another_tenant(one: str, salt: str | None, two: str, other: str | None) -> None:
    assert (tenant_salt(one, salt) == tenant_salt(two, other)) == ((one, salt) == (two, other))


@given(TENANTS, NAMES, TENANTS, NAMES)
def test_no_name_of_a_session_is_one_of_another_tenant(one: str, name: str, two: str, other: str) -> None:
    assert (tenant_session(one, name) == tenant_session(two, other)) == ((one, name) == (two, other))


@given(TENANTS)
def test_a_request_without_a_session_has_none_in_any_tenant(tenant: str) -> None:
    assert tenant_session(tenant, "") == ""


def test_names_of_the_default_tenant_stay_as_they_are() -> None:
    assert tenant_salt("", None) is None
    assert tenant_salt("", "mine") == "mine"
    assert tenant_session("", "mine") == "mine"
