"""The certificate of the gateway: its files, their TLS context, and its date of expiry.

Files are read again at each call, so that a reload takes a renewed certificate. The date is read from the DER encoding
here, since Python's `ssl` parses only the certificates of peers.
"""

from __future__ import annotations

import ssl
from calendar import timegm
from pathlib import Path

from attrs import frozen

from protocol.errors import StartFailed
from supervisor.files import permissions, reading

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""The suites of TLS 1.2 without CBC, which timing attacks can break; TLS 1.3 has no such suites."""

_VALIDITY = 4  # the position of a certificate's validity, its optional version not counted (RFC 5280, section 4.1)
_VERSION_TAG, _UTC_TIME = 0xA0, 0x17


@frozen
class Certificate:
    """The PEM files of a certificate and its private key."""

    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of the server; raises `StartFailed` if the files cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(CIPHERS)
        context.set_alpn_protocols(["http/1.1"])
        try:
            if (why := permissions.writable_by_others(self.key)) is not None:
                raise StartFailed(why)
            reading.require_regular_files(self.certificate, self.key)
            # Without a password here, OpenSSL would ask the terminal for the password of an encrypted key, and block.
            context.load_cert_chain(self.certificate, self.key, password="")
        except OSError as error:  # an SSLError is one
            why = getattr(error, "reason", None) or error.strerror
            if why is None or isinstance(error, ssl.SSLError):
                why = f"they must be PEM, belong together, and need no password ({why or 'not PEM'})"
            raise StartFailed(f"the certificate {self.certificate} with {self.key} cannot be used: {why}") from error
        return context


def expires_at(pem: str) -> float:
    """Return the expiry of the first certificate of a PEM text, in seconds since 1970; raises `ValueError`."""
    begin = pem.index(ssl.PEM_HEADER)
    end = pem.index(ssl.PEM_FOOTER, begin) + len(ssl.PEM_FOOTER)
    der = memoryview(ssl.PEM_cert_to_DER_cert(pem[begin:end]))
    try:
        _, certificate, _ = _element(der)
        _, rest, _ = _element(certificate)
        tag, _, behind = _element(rest)
        rest = behind if tag == _VERSION_TAG else rest
        for _ in range(_VALIDITY - 1):  # serial number, signature, issuer
            _, _, rest = _element(rest)
        _, validity, _ = _element(rest)
        _, _, rest = _element(validity)  # not before
        tag, not_after, _ = _element(rest)
    except IndexError as error:
        raise ValueError("a certificate that ends early") from error
    digits = bytes(not_after).decode("ascii").removesuffix("Z")
    if tag == _UTC_TIME:
        digits = ("19" if digits[:2] >= "50" else "20") + digits
    year, pairs = int(digits[:4]), [int(digits[at : at + 2]) for at in range(4, 14, 2)]
    return float(timegm((year, *pairs, 0, 0, 0)))


def _element(der: memoryview) -> tuple[int, memoryview, memoryview]:
    """Return the tag and contents of the first DER element, and the rest; raises `IndexError` if it is truncated."""
    tag, size, start = der[0], der[1], 2
    if size & 0x80:
        start += size & 0x7F
        size = int.from_bytes(der[2:start])
    if start + size > len(der):
        raise IndexError
    return tag, der[start : start + size], der[start + size :]
