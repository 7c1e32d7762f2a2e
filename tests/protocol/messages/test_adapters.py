"""The namespaces of caches: no two pairs of an adapter and a salt share one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.messages.adapters import Adapter, adapter_salt, name_mistake

NAMES = st.text("ab:/@", min_size=1, max_size=4).filter(lambda name: name_mistake(name) is None)
ADAPTERS = st.none() | st.builds(Adapter, NAMES, st.text("0a", min_size=1, max_size=2))
SALTS = st.none() | st.text("adepr:/@0b", max_size=12) | st.builds("adapter:{}".format, st.text("a@/0b:", max_size=5))


def test_a_request_without_an_adapter_keeps_its_salt() -> None:
    assert adapter_salt(None, None) is None
    assert adapter_salt(None, "mine") == "mine"


@given(ADAPTERS, SALTS, ADAPTERS, SALTS)
def test_different_pairs_have_different_salts(
    adapter: Adapter | None, salt: str | None, other: Adapter | None, other_salt: str | None
) -> None:
    equal = (adapter, salt) == (other, other_salt)
    assert (adapter_salt(adapter, salt) == adapter_salt(other, other_salt)) is equal
