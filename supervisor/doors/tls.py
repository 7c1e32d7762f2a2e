"""TLS of the gateway: a certificate and its key from files, read anew on demand."""

from __future__ import annotations

import ssl
from pathlib import Path

from attrs import frozen

from protocol.errors import StartFailed


@frozen
class Certificate:
    """The two files, in PEM."""

    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Return what connections are wrapped with; raises `StartFailed` if the files are of no use."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # Without a password a locked key would ask the terminal for one, and stop everything meanwhile.
            context.load_cert_chain(self.certificate, self.key, password="")
        except OSError as error:  # an SSLError is one
            why = getattr(error, "reason", None) or error.strerror
            if why is None or isinstance(error, ssl.SSLError):
                why = f"they must be PEM, belong together, and need no password ({why or 'not PEM'})"
            raise StartFailed(f"the certificate {self.certificate} with {self.key} cannot be used: {why}") from error
        return context
