"""TLS between nodes: what a node shows of itself, and the names in what it is shown."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

import trio
from attrs import frozen

HANDSHAKE_TURNS = 8  # of either end; one of TLS 1.3 takes two


@frozen
class LinkTls:
    """How this node shows who it is when it listens, and when it dials; `names` are those in its own certificate."""

    listens: ssl.SSLContext
    dials: ssl.SSLContext
    names: frozenset[str] | None = None  # None: not known


def load_link_tls(certificate: Path, key: Path, authority: Path) -> LinkTls:
    """Return what links are wrapped with; raises `OSError` (an `ssl.SSLError` is one) for files of no use."""
    made = []
    for purpose in (ssl.Purpose.CLIENT_AUTH, ssl.Purpose.SERVER_AUTH):
        context = ssl.create_default_context(purpose, cafile=str(authority))
        context.load_cert_chain(certificate, key)
        context.verify_mode = ssl.CERT_REQUIRED
        made.append(context)
    listens, dials = made
    return LinkTls(listens, dials, _own_names(certificate, key))


def certificate_names(stream: trio.abc.Stream) -> frozenset[str]:
    """Return the names in the other end's certificate, as `DNS:a.b` or `URI:c`; none where it has shown none."""
    return _names(stream.getpeercert()) if isinstance(stream, trio.SSLStream) else frozenset()


def _names(certificate: Mapping[str, object] | None) -> frozenset[str]:
    found = (certificate or {}).get("subjectAltName", ())
    assert isinstance(found, tuple)
    return frozenset(f"{kind}:{name}" for kind, name in found if isinstance(name, str))


def _own_names(certificate: Path, key: Path) -> frozenset[str] | None:
    """Return the names in a certificate as other nodes will read them, None if it cannot be shown to anybody.

    Python reads a certificate only where one is shown to it: here it is shown from one end of memory to the other.
    """
    shows = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shows.load_cert_chain(certificate, key)
    reads = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    reads.check_hostname = False
    reads.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it answers for itself, whoever has signed it
    reads.load_verify_locations(certificate)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = reads.wrap_bio(back, there), shows.wrap_bio(there, back, server_side=True)
    for _ in range(HANDSHAKE_TURNS):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:  # it has ended, or is for something else: other checks say so
                return None
            if end is client:
                return _names(client.getpeercert())
    return None
