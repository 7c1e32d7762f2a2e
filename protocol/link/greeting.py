"""The mutual authentication of two nodes before the first frame of their link, as a state machine without I/O.

Both ends send a `Greeting` at once. The dialer proves its knowledge of the cluster's secret first, and the listener
only after a successful check: an unauthenticated dialer gets nothing derived from the secret. The secret itself is
never sent. A foreign listener can test guesses against the dialer's proof offline, so a secret must be too long to
guess; later frames are protected by TLS alone.

On the wire a message is a kind byte and a body in msgpack, and one message of the transport.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

import msgspec
from attrs import define, field, frozen

from protocol.errors import PeerRefused, PeerViolation
from protocol.link.codec import DECODE_ERRORS
from protocol.link.frames import VERSION
from protocol.messages.cluster import OPERATOR_PREFIX

MESSAGE_BYTES_MAX = 4096
NAME_LENGTH_MAX = 128
DETAIL_LENGTH_MAX = 1000
SHOWN_LENGTH_MAX = 300
NONCE_BYTES = 32
MAC_BYTES = 32
STARTED_AT_MAX = 253_402_300_799  # the last second of the year 9999
LABEL = "espalier greeting"

Role = Literal["dials", "listens"]
Code = Literal["version", "cluster", "node", "secret", "reflected", "violation"]
CODES = ("version", "cluster", "node", "secret", "reflected", "violation")


@frozen
class Incarnation:
    """One process under a node's name, with a unique `run`; `started_at` is in seconds since 1970.

    Raises `ValueError` for a run that is too long or not printable, and for an impossible time.
    """

    run: str = ""
    started_at: int = 0

    def __attrs_post_init__(self) -> None:
        if not (len(self.run) <= NAME_LENGTH_MAX and self.run.isascii() and self.run.isprintable()):
            raise ValueError(f"a run is named by at most {NAME_LENGTH_MAX} printable characters")
        if not 0 <= self.started_at <= STARTED_AT_MAX:
            raise ValueError("the time of a start is impossible")


@frozen
class Greeting:
    """The first message of either end: its version, its cluster, its name, and a nonce.

    `incarnation` distinguishes processes of one name. Raises `ValueError` for a name that is empty, too long or not
    printable, and for a nonce of another size.
    """

    version: int
    cluster: str
    node: str
    nonce: bytes
    incarnation: Incarnation = Incarnation()

    def __attrs_post_init__(self) -> None:
        for what, name in (("cluster", self.cluster), ("node", self.node)):
            # A name is logged before anything is proved: it must not be able to forge a line of the log.
            if not (0 < len(name) <= NAME_LENGTH_MAX and name.isprintable()):
                raise ValueError(f"the name of a {what} is 1 to {NAME_LENGTH_MAX} printable characters")
        if len(self.nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes, not {len(self.nonce)}")


@frozen
class Proof:
    """Proof of the sender's secret: an HMAC-SHA256 over its role and both greetings.

    The key is the secret's SHA-256. Raises `ValueError` for a MAC of another size.
    """

    mac: bytes

    def __attrs_post_init__(self) -> None:
        if len(self.mac) != MAC_BYTES:
            raise ValueError(f"a proof has {MAC_BYTES} bytes, not {len(self.mac)}")


@frozen
class LinkRefusal:
    """The last message: the reason why the sender refuses the other end, which `detail` calls "it"."""

    # A `Code`. With a `Literal`, msgspec's error for a wrong one would quote the other end's bytes.
    code: str
    detail: str

    def __attrs_post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError("an unknown code of a refusal")
        if not (len(self.detail) <= DETAIL_LENGTH_MAX and self.detail.isprintable()):
            raise ValueError(f"a detail is at most {DETAIL_LENGTH_MAX} printable characters")


@frozen
class OtherVersion:
    """A `Greeting` of another version, which may have any other fields."""

    version: int


Message = Greeting | Proof | LinkRefusal

KINDS: dict[int, type[Message]] = {1: Greeting, 2: Proof, 3: LinkRefusal}
_KIND_OF = {cls: bytes((kind,)) for kind, cls in KINDS.items()}
_DECODERS = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in KINDS.items()}
_VERSION_DECODER = msgspec.msgpack.Decoder(OtherVersion)
_encode = msgspec.msgpack.Encoder().encode


def encode(message: Message) -> bytes:
    """Return the message as it goes on the wire."""
    return _KIND_OF[type(message)] + _encode(message)


def decode(data: bytes) -> Message | OtherVersion:
    """Return the message encoded in `data`; raises `PeerViolation` unless it is exactly one."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise PeerViolation(f"a message of {len(data)} bytes in a greeting; the limit is {MESSAGE_BYTES_MAX}")
    if not data or (decoder := _DECODERS.get(data[0])) is None:
        raise PeerViolation(f"no message of a greeting is of kind {data[:1].hex() or 'nothing'}")
    kind, body = KINDS[data[0]], data[1:]
    try:
        if kind is Greeting and (other := _VERSION_DECODER.decode(body)).version != VERSION:
            return other
        message = decoder.decode(body)
    except DECODE_ERRORS as error:
        raise PeerViolation(f"a {kind.__name__} that cannot be read: {error}") from error
    if encode(message) != data:  # one decoder ignores an extra or repeated field, another does not
        raise PeerViolation(f"a {kind.__name__} that is not written as this node would write it")
    return message


def names_node(names: frozenset[str], node: str, cluster: str) -> bool:
    """Return whether a certificate's names include a node; wildcards name no node."""
    wanted = {f"DNS:{node}", f"DNS:{node}.{cluster}", f"URI:espalier:{node}"}
    return any((f"DNS:{name[4:].lower()}" if name.startswith("DNS:") else name) in wanted for name in names)


def shown_names(names: frozenset[str]) -> str:
    """Return the first names of a certificate, for a sentence."""
    listed = ", ".join(name for name in sorted(names) if name.isascii() and name.isprintable()) or "nobody"
    return listed if len(listed) <= SHOWN_LENGTH_MAX else f"{listed[:SHOWN_LENGTH_MAX]}..."


@define(eq=False)
class Greeter:
    """One end of a greeting: sends its messages, checks those of the other end, and accepts or refuses it.

    Args:
        role: This end of the two: it dials or it listens.
        cluster: The cluster of both ends.
        node: This node's name.
        secret: The secret of the cluster; if it is empty, only an end without one is accepted.
        nonce: 32 random bytes, unpredictable and never used for another greeting.
        expects: The only accepted node; None: any but this one.
        incarnation: This process among all processes of its name.
        certified: The names in the certificate of the other end; None if they are not required to name it.

    `peer` is the other end's name, None until it has proved its secret; `peer_incarnation` is its process. The proof
    shows that the other end belongs to the cluster; any node of the cluster could use another's name, unless names must
    be `certified`. An operator is no node and has no node's name.
    """

    role: Role
    cluster: str
    node: str
    secret: bytes = field(repr=False)
    nonce: bytes
    expects: str | None = None
    incarnation: Incarnation = Incarnation()
    certified: frozenset[str] | None = None
    peer: str | None = field(default=None, init=False)
    peer_incarnation: Incarnation = field(default=Incarnation(), init=False)
    final_message: bytes = field(default=b"", init=False)
    _own: Greeting = field(init=False)
    _other: Greeting | None = field(default=None, init=False)
    _over: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._own = Greeting(VERSION, self.cluster, self.node, self.nonce, self.incarnation)

    def start(self) -> list[bytes]:
        """Return the first messages to send, before anything is received."""
        return [encode(self._own)]

    def receive(self, message: bytes) -> list[bytes]:
        """Return the messages to send next, in answer to one from the other end.

        Raises `PeerRefused` if either end refuses the other, and `PeerViolation` for a malformed message. Then
        `final_message`, unless empty, must be sent to the other end before closing.
        """
        try:
            return self._answer(decode(message))
        except PeerViolation as error:
            self._end("violation", str(error))
            raise

    def _answer(self, message: Message | OtherVersion) -> list[bytes]:
        kind = "Greeting" if isinstance(message, OtherVersion) else type(message).__name__
        if self._over:
            raise PeerViolation(f"{kind} after the greeting was over")
        match message:
            case LinkRefusal():
                self._over = True
                raise PeerRefused(f"node {self.node} was refused by {self._other_name()}: {message.detail}")
            case Greeting() | OtherVersion() if self._other is not None:
                raise PeerViolation("a second Greeting")
            case OtherVersion():
                reason = f"it speaks version {message.version} of the protocol, and node {self.node} version {VERSION}"
                raise self._refused("version", reason)
            case Greeting():
                return self._greeted(message)
            case Proof():
                if self._other is None:
                    raise PeerViolation("Proof before Greeting")
                return self._proved(message, self._other)

    def _greeted(self, other: Greeting) -> list[bytes]:
        self._other = other
        if other.cluster != self.cluster:
            raise self._refused("cluster", f"node {self.node} is of another cluster, {self.cluster}")
        if other.nonce == self.nonce:
            raise self._refused("reflected", "it sent back the nonce that it was sent")
        if other.node == self.node:
            raise self._refused("node", "the node that it talks to has the same name")
        if self.expects not in {None, other.node}:
            raise self._refused("node", f"node {self.expects} was expected in its place")
        by_operator = self.role == "listens" and other.node.startswith(OPERATOR_PREFIX)
        if self.certified is not None and not by_operator and not names_node(self.certified, other.node, self.cluster):
            reason = f"its certificate must name it, as DNS:{other.node}, and names {shown_names(self.certified)}"
            raise self._refused("node", f"{reason} (tls_names)")
        return [self._proof(other)] if self.role == "dials" else []

    def _proved(self, proof: Proof, other: Greeting) -> list[bytes]:
        listens = self.role == "listens"
        if not hmac.compare_digest(proof.mac, self._mac("dials" if listens else "listens", other)):
            if hmac.compare_digest(proof.mac, self._mac(self.role, other)):
                raise self._refused("reflected", "it sent back the proof that it was sent")
            raise self._refused("secret", "it has another secret, or none")
        self._over = True
        self.peer, self.peer_incarnation = other.node, other.incarnation
        return [self._proof(other)] if listens else []

    def _proof(self, other: Greeting) -> bytes:
        return encode(Proof(self._mac(self.role, other)))

    def _mac(self, prover: Role, other: Greeting) -> bytes:
        # Both greetings are in it, in one order: a proof is valid for no other greeting, pair of nodes or direction.
        # msgpack writes the length of each value before it, so that no two greetings make the same bytes.
        dials, listens = (self._own, other) if self.role == "dials" else (other, self._own)
        names = (dials.node, listens.node, self.cluster)
        lives = (dials.incarnation, listens.incarnation)
        data = _encode((LABEL, VERSION, prover, dials.nonce, listens.nonce, *names, *lives))
        # HMAC pads short keys with zeros and hashes long ones, so that different secrets could act as the same key.
        key = hashlib.sha256(self.secret).digest()
        return hmac.digest(key, data, "sha256")

    def _other_name(self) -> str:
        other = self._other
        return "the other end" if other is None else f"node {other.node} of cluster {other.cluster}"

    def _refused(self, code: Code, reason: str) -> PeerRefused:
        self._end(code, reason)
        return PeerRefused(f"{self._other_name()} was refused: {reason}")

    def _end(self, code: Code, reason: str) -> None:
        self._over = True
        self.peer = None
        self.final_message = encode(LinkRefusal(code, reason))
