"""TLS between nodes: the contexts of this node, and the names in the certificate of either end."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

import trio
from attrs import frozen

HANDSHAKE_TURNS = 8  # turns of either end; TLS 1.3 takes two


@frozen
class LinkTls:
    """The contexts for listening and dialing, and the names in this node's own certificate."""

    listens: ssl.SSLContext
    dials: ssl.SSLContext
    names: frozenset[str] | None = None  # None: unknown


def default_context(purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, authority: str | None = None) -> ssl.SSLContext:
    """Return a context that trusts a file's authorities, or else the system's; raises `OSError`.

    Since Python 3.13 a new context refuses authorities without the extension of their key's usage, which private ones
    often lack. No certificate may stop being trusted with another Python, so none is refused for that.
    """
    context = ssl.create_default_context(purpose, cafile=authority)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def load_link_tls(certificate: Path, key: Path, authority: Path) -> LinkTls:
    """Return the contexts of links; raises `OSError` (an `ssl.SSLError` is one) for unusable files."""
    contexts = []
    for purpose in (ssl.Purpose.CLIENT_AUTH, ssl.Purpose.SERVER_AUTH):
        context = default_context(purpose, str(authority))
        context.load_cert_chain(certificate, key)
        context.verify_mode = ssl.CERT_REQUIRED
        contexts.append(context)
    listens, dials = contexts
    return LinkTls(listens, dials, _own_names(certificate, key))


def certificate_names(stream: trio.abc.Stream) -> frozenset[str]:
    """Return the names in the other end's certificate, as `DNS:a.b` or `URI:c`; empty if it has sent none."""
    return _names(stream.getpeercert()) if isinstance(stream, trio.SSLStream) else frozenset()


def _names(certificate: Mapping[str, object] | None) -> frozenset[str]:
    names = (certificate or {}).get("subjectAltName", ())
    assert isinstance(names, tuple)
    return frozenset(f"{kind}:{name}" for kind, name in names if isinstance(name, str))


def _own_names(certificate: Path, key: Path) -> frozenset[str] | None:
    """Return the names in a certificate as other nodes will read them, None if it cannot be used in a handshake.

    Python reads only the names of a peer's certificate, so two ends in memory complete a handshake.
    """
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(certificate, key)
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trusted by itself, without its issuer
    client_context.load_verify_locations(certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(HANDSHAKE_TURNS):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:  # it has expired, or is for another purpose: other checks report that
                return None
            if end is client:
                return _names(client.getpeercert())
    return None
