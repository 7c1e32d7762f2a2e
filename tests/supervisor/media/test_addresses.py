"""Which addresses may be asked: public ones, and those of the operator's networks, however they are written."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.media.addresses import FORBIDDEN, may_be_asked

PUBLIC = ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "2001:4860:4860::8888", "::ffff:8.8.8.8", "64:ff9b::808:808"]
PRIVATE = [
    *("127.0.0.1", "127.8.9.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1"),
    *("169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192", "198.18.0.1", "224.0.0.1", "240.0.0.1"),
    *("255.255.255.255", "192.88.99.1", "203.0.113.5"),
    *("::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "fec0::1", "2001:db8::1", "100::1"),
    *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "::ffff:0:127.0.0.1"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::7f00:1", "2002:7f00:1::", "2002:a00:1::1"),
    *("2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001::1"),
]


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_may_be_asked(address: str) -> None:
    assert may_be_asked(ip_address(address), ())


@pytest.mark.parametrize("address", PRIVATE)
def test_no_other_address_may_be_asked(address: str) -> None:
    assert not may_be_asked(ip_address(address), ())


@given(st.sampled_from([network for network in FORBIDDEN if network.version == 4]), st.data())
def test_no_address_of_a_forbidden_network_may_be_asked_in_whatever_disguise(network, data) -> None:  # type: ignore[no-untyped-def]
    number = data.draw(st.integers(int(network.network_address), int(network.broadcast_address)))
    assert not may_be_asked(ip_address(number), ())
    for prefix in (0xFFFF << 32, 0x64FF9B << 96, 0):
        assert not may_be_asked(ip_address((prefix | number).to_bytes(16, "big")), ())
    assert not may_be_asked(ip_address(((0x2002 << 112) | (number << 80)).to_bytes(16, "big")), ())


def test_an_operator_allows_networks_by_name() -> None:
    allowed = [ip_network("10.1.0.0/16"), ip_network("fd00:1::/32")]
    assert may_be_asked(ip_address("10.1.2.3"), allowed)
    assert may_be_asked(ip_address("::ffff:10.1.2.3"), allowed)
    assert may_be_asked(ip_address("fd00:1::9"), allowed)
    assert not may_be_asked(ip_address("10.2.0.1"), allowed)
    assert not may_be_asked(ip_address("127.0.0.1"), allowed)
    assert not may_be_asked(ip_address("64:ff9b::a01:203"), [ip_network("10.2.0.0/16")])
