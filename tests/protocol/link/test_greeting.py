"""Two nodes with the same secret accept each other; any other end is refused with a reason and learns no secret."""

from __future__ import annotations

import hashlib
import hmac
import hmac as standard_hmac
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import product
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from attrs import asdict, evolve
from hypothesis import example, given, settings

from protocol.errors import ActorError, PeerRefused, PeerViolation
from protocol.link.frames import VERSION, Hello
from protocol.link.frames import encode as encode_frame
from protocol.link.greeting import (
    CODES,
    DETAIL_LENGTH_MAX,
    KINDS,
    MESSAGE_BYTES_MAX,
    NAME_LENGTH_MAX,
    Greeter,
    Greeting,
    Incarnation,
    LinkRefusal,
    Proof,
    decode,
    encode,
)

SECRET = b"quetzalcoatl-0123456789"


def dialer(
    node: str = "front",
    cluster: str = "demo",
    secret: bytes = SECRET,
    nonce: bytes = b"d" * 32,
    expects: str | None = "back",
) -> Greeter:
    return Greeter("dials", cluster, node, secret, nonce, expects)


def listener(
    node: str = "back",
    cluster: str = "demo",
    secret: bytes = SECRET,
    nonce: bytes = b"l" * 32,
    expects: str | None = None,
) -> Greeter:
    return Greeter("listens", cluster, node, secret, nonce, expects)


class Exchange:
    """Two greeters and the messages between them; an end that has failed receives no more."""

    def __init__(self, *ends: Greeter) -> None:
        self.ends = ends
        self.sent: list[bytes] = []  # by either end
        self.failed: list[ActorError | None] = [None, None]
        self.inboxes: tuple[deque[bytes], deque[bytes]] = (deque(), deque())
        self.unstarted = {0, 1}

    def _send(self, end: int, messages: list[bytes]) -> None:
        self.inboxes[1 - end].extend(messages)
        self.sent += messages

    def turns(self) -> list[int]:
        ready = [end for end in (0, 1) if end not in self.unstarted and self.inboxes[end] and not self.failed[end]]
        return sorted({*self.unstarted, *ready})

    def turn(self, end: int) -> None:
        greeter = self.ends[end]
        if end in self.unstarted:
            self.unstarted.discard(end)
            self._send(end, greeter.start())
            return
        try:
            self._send(end, greeter.receive(self.inboxes[end].popleft()))
        except (PeerRefused, PeerViolation) as error:
            self.failed[end] = error
            if greeter.final_message:
                self._send(end, [greeter.final_message])

    def play(self, choices: Iterable[int] = ()) -> Exchange:
        left = deque(choices)
        while turns := self.turns():
            self.turn(turns[left.popleft() % len(turns) if left else 0])
        return self

    @property
    def sentences(self) -> list[str | None]:
        assert all(error is None or type(error) is PeerRefused for error in self.failed)
        return [None if error is None else str(error) for error in self.failed]

    @property
    def peers(self) -> list[str | None]:
        return [end.peer for end in self.ends]


def refusal(greeter: Greeter, *messages: bytes, kind: type[PeerRefused | PeerViolation] = PeerRefused) -> str:
    """Let a greeter receive messages of which it refuses the last; return the sentence."""
    for message in messages[:-1]:
        greeter.receive(message)
    with pytest.raises(ActorError) as caught:
        greeter.receive(messages[-1])
    assert type(caught.value) is kind
    assert greeter.peer is None
    return str(caught.value)


def hello(node: str = "back", cluster: str = "demo", nonce: bytes = b"x" * 32) -> bytes:
    return encode(Greeting(VERSION, cluster, node, nonce))


def raw(kind: int, body: object) -> bytes:
    return bytes((kind,)) + msgspec.msgpack.encode(body)


def recorded() -> tuple[list[bytes], list[bytes]]:
    """Return the messages of the dialer and of the listener of a greeting that succeeds."""
    ends = dialer(nonce=b"1" * 32), listener(nonce=b"2" * 32)
    (first,), (second,) = ends[0].start(), ends[1].start()
    assert ends[1].receive(first) == []
    (proof,) = ends[0].receive(second)
    (answer,) = ends[1].receive(proof)
    assert ends[0].receive(answer) == []
    return [first, proof], [second, answer]


# The same secret ------------------------------------------------------------------------------

names = st.text(min_size=1, max_size=NAME_LENGTH_MAX).filter(str.isprintable)
nonces = st.binary(min_size=32, max_size=32)
secrets = st.binary(max_size=80)
choices = st.lists(st.integers(0, 1), max_size=8)


pairs = st.lists(nonces, min_size=2, max_size=2, unique=True)


@given(names, st.lists(names, min_size=2, max_size=2, unique=True), secrets, pairs, choices)
@example("demo", ["front", "back"], b"", [b"d" * 32, b"l" * 32], [])
def test_two_ends_with_the_same_secret_accept_each_other_in_any_order_of_messages(
    cluster: str, nodes: list[Any], secret: bytes, pair: list[bytes], order: list[int]
) -> None:
    ends = dialer(nodes[0], cluster, secret, pair[0], nodes[1]), listener(nodes[1], cluster, secret, pair[1])
    exchange = Exchange(*ends).play(order)
    assert exchange.sentences == [None, None]
    assert exchange.peers == [nodes[1], nodes[0]]
    assert all(len(message) <= MESSAGE_BYTES_MAX for message in exchange.sent)
    assert [end.final_message for end in ends] == [b"", b""]


@given(st.lists(secrets, min_size=2, max_size=2, unique=True), choices)
@example([SECRET, b""], [])
@example([b"", SECRET], [1, 1, 0, 0])
@example([b"", b"\0"], [])  # the same key for HMAC alone
@example([SECRET * 3, hashlib.sha256(SECRET * 3).digest()], [])  # so are these
def test_two_ends_with_different_secrets_never_accept_each_other(two: list[Any], order: list[int]) -> None:
    exchange = Exchange(dialer(secret=two[0]), listener(secret=two[1]))
    while turns := exchange.turns():
        exchange.turn(turns[order.pop() % len(turns) if order else 0])
        assert exchange.peers == [None, None]
    assert exchange.sentences == [
        "node front was refused by node back of cluster demo: it has another secret, or none",
        "node front of cluster demo was refused: it has another secret, or none",
    ]


def test_a_listener_proves_nothing_before_the_dialer_has() -> None:
    here = listener()
    assert here.receive(hello("front")) == []
    assert here.peer is None
    refusal(here, encode(Proof(b"?" * 32)))
    assert isinstance(decode(here.final_message), LinkRefusal)


def test_a_dialer_is_not_done_before_the_listener_has_proved() -> None:
    there = dialer()
    assert len(there.receive(hello())) == 1
    assert there.peer is None
    assert refusal(there, encode(Proof(b"?" * 32))) == (
        "node back of cluster demo was refused: it has another secret, or none"
    )


# Each refusal has its sentence, at both ends ----------------------------------------------


@pytest.mark.parametrize("order", [*product((0, 1), repeat=4)])
@pytest.mark.parametrize(
    ("ends", "sentences"),
    [
        pytest.param(
            ({"cluster": "prod"}, {}),
            (
                "node back of cluster demo was refused: node front is of another cluster, prod",
                "node front of cluster prod was refused: node back is of another cluster, demo",
            ),
            id="another cluster",
        ),
        pytest.param(
            ({}, {"node": "front"}),
            ("node front of cluster demo was refused: the node that it talks to has the same name",) * 2,
            id="one name for two nodes",
        ),
        pytest.param(
            ({"expects": "spare"}, {}),
            (
                "node back of cluster demo was refused: node spare was expected in its place",
                "node back was refused by node front of cluster demo: node spare was expected in its place",
            ),
            id="another node than was dialed",
        ),
        pytest.param(
            ({}, {"expects": "spare"}),
            (
                "node front was refused by node back of cluster demo: node spare was expected in its place",
                "node front of cluster demo was refused: node spare was expected in its place",
            ),
            id="another node than was waited for",
        ),
    ],
)
def test_both_ends_name_the_reason_of_a_refusal(
    ends: tuple[dict[str, Any], dict[str, Any]], sentences: tuple[str, str], order: tuple[int, ...]
) -> None:
    exchange = Exchange(dialer(**ends[0]), listener(**ends[1])).play(order)
    assert exchange.sentences == list(sentences)
    assert exchange.peers == [None, None]


def test_another_version_is_refused_at_both_ends_whatever_else_its_greeting_holds() -> None:
    here = dialer()
    theirs = raw(1, {"version": VERSION + 1, "cluster": ["demo"], "caste": 7})
    assert refusal(here, theirs) == f"the other end was refused: it speaks version {VERSION + 1} of the protocol, and node front version {VERSION}"  # fmt: skip
    assert decode(here.final_message) == LinkRefusal("version", f"it speaks version {VERSION + 1} of the protocol, and node front version {VERSION}")  # fmt: skip


def test_a_refusal_counts_before_and_after_a_greeting_and_is_not_answered() -> None:
    last = encode(LinkRefusal("node", "node spare was expected in its place"))
    for received, name in (((), "the other end"), ((hello(),), "node back of cluster demo")):
        here = dialer()
        sentence = refusal(here, *received, last)
        assert sentence == f"node front was refused by {name}: node spare was expected in its place"
        assert here.final_message == b""


# Attacks ----------------------------------------------------------------------------------


def test_a_reflected_greeting_is_refused_at_either_end() -> None:
    for here in (dialer(), listener()):
        (ours,) = here.start()
        name = f"node {here.node} of cluster demo"
        assert refusal(here, ours) == f"{name} was refused: it sent back the nonce that it was sent"


def test_a_reflected_nonce_under_another_name_is_refused_before_any_proof() -> None:
    here = dialer()
    assert refusal(here, hello(nonce=here.nonce)) == (
        "node back of cluster demo was refused: it sent back the nonce that it was sent"
    )
    assert decode(here.final_message) == LinkRefusal("reflected", "it sent back the nonce that it was sent")


def test_a_reflected_proof_is_refused() -> None:
    here = dialer()
    (proof,) = here.receive(hello())
    assert refusal(here, proof) == "node back of cluster demo was refused: it sent back the proof that it was sent"


def test_a_proof_is_not_valid_on_another_connection_of_the_same_node() -> None:
    """An attacker relays messages between two connections of one node, one in each direction."""
    dials, listens = dialer(expects=None), listener(node="front")
    listens.receive(hello("mallory", nonce=b"d" * 32))
    (proof,) = dials.receive(hello("mallory", nonce=b"l" * 32))
    assert "another secret" in refusal(listens, proof)


@pytest.mark.parametrize("same", ["dialer", "listener", "neither"])
def test_a_replayed_proof_is_refused(same: str) -> None:
    dialed, listened = recorded()
    fresh = listener(nonce=b"2" * 32 if same == "listener" else b"3" * 32)
    if same == "listener":  # a repeated nonce, which a caller must never pass
        fresh.receive(dialed[0])
        assert len(fresh.receive(dialed[1])) == 1
    else:
        assert "another secret" in refusal(fresh, *dialed)
    fresh = dialer(nonce=b"1" * 32 if same == "dialer" else b"3" * 32)
    if same == "dialer":
        assert [len(fresh.receive(message)) for message in listened] == [1, 0]
    else:
        assert "another secret" in refusal(fresh, *listened)


def test_no_two_greetings_have_one_proof() -> None:
    """If the names were only joined, a letter could move from one into the next."""
    messages = set[bytes]()
    for ours, theirs, cluster in [("ab", "c", "d"), ("a", "bc", "d"), ("a", "b", "cd"), ("c", "ab", "d")]:
        messages.update(Exchange(dialer(ours, cluster, expects=None), listener(theirs, cluster)).play().sent)
    assert sum(isinstance(decode(message), Proof) for message in messages) == 8


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        pytest.param([encode(Proof(b"?" * 32))], "Proof before Greeting", id="a proof first"),
        pytest.param([hello(), hello()], "a second Greeting", id="two greetings"),
        pytest.param([b""], "no message of a greeting is of kind nothing", id="no bytes"),
        pytest.param([b"\x01" * 4097], "a message of 4097 bytes in a greeting; the limit is 4096", id="too long"),
        pytest.param([encode_frame(Hello(VERSION, "back", 9))], "a Greeting that cannot be read", id="a frame"),
        pytest.param([raw(2, {"mac": b"?" * 31})], "a proof has 32 bytes, not 31", id="a short proof"),
        pytest.param([raw(3, {"code": "tired\n", "detail": ""})], "an unknown code of a refusal", id="an unknown code"),
        pytest.param([raw(3, {"code": "node", "detail": "it\nis"})], "printable", id="a detail of two lines"),
        pytest.param([raw(2, {"mac": b"?" * 32, "more": 1})], "not written as this node", id="a field too many"),
        pytest.param([b"\x02\x82\xa3mac\xc0" + raw(2, {"mac": b"?" * 32})[2:]], "a Proof that", id="a field twice"),
        pytest.param([b"\x01\x81\xa1x" + b"\x91" * 3000], "a Greeting that cannot be read", id="nested lists"),
        pytest.param([hello() + b"\xc0"], "a Greeting that cannot be read", id="more behind it"),
    ],
)
def test_an_invalid_message_is_a_violation_that_both_ends_report(messages: list[bytes], reason: str) -> None:
    here, there = dialer(), listener()
    sentence = refusal(here, *messages, kind=PeerViolation)
    assert reason in sentence
    there.receive(here.start()[0])
    assert refusal(there, here.final_message) == f"node back was refused by node front of cluster demo: {sentence}"


@pytest.mark.parametrize("name", ["", "x" * 129, "two\nlines", "\u202egnp", "\x1b[2J", "nul\0"])
@pytest.mark.parametrize("what", ["node", "cluster"])
def test_a_name_that_could_forge_log_lines_is_refused_at_both_ends(what: str, name: str) -> None:
    body, fields = asdict(Greeting(VERSION, "demo", "back", b"x" * 32)), dict[str, Any]({what: name})
    sentence = refusal(dialer(), raw(1, {**body, **fields}), kind=PeerViolation)
    assert sentence == f"a Greeting that cannot be read: the name of a {what} is 1 to 128 printable characters"
    with pytest.raises(ValueError, match=f"the name of a {what}"):
        dialer(**fields)


def test_a_message_after_the_greeting_revokes_the_acceptance() -> None:
    dialed, _ = recorded()
    for more in (*dialed, encode(LinkRefusal("secret", "it has another secret, or none"))):
        here = listener(nonce=b"2" * 32)
        for message in dialed:
            here.receive(message)
        assert here.peer == "front"
        assert " after the greeting was over" in refusal(here, more, kind=PeerViolation)


@pytest.mark.parametrize(
    "last", [encode(LinkRefusal("node", "")), encode(Proof(b"?" * 32)), hello(cluster="prod"), b""]
)
def test_an_end_accepts_no_message_after_a_refusal(last: bytes) -> None:
    dialed, _ = recorded()
    here = listener(nonce=b"2" * 32)
    with pytest.raises(ActorError):
        here.receive(last)
    for message in dialed:
        assert " after the greeting was over" in refusal(here, message, kind=PeerViolation)


def test_the_longest_sentence_still_fits_into_a_message() -> None:
    wide = [letter * NAME_LENGTH_MAX for letter in "😀😁😂😃"]
    for here in (dialer(wide[0], wide[1], expects=wide[2]), dialer(wide[0], wide[3], expects=wide[2])):
        refusal(here, hello(wide[3], wide[1]))
        assert len(here.final_message) <= MESSAGE_BYTES_MAX
        assert isinstance(decode(here.final_message), LinkRefusal)


# Any bytes --------------------------------------------------------------------------------

things = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(sorted({field.name for kind in KINDS.values() for field in kind.__attrs_attrs__}))
kinds = st.sampled_from(sorted(KINDS))
valid = st.sampled_from([message for sent in recorded() for message in sent])
well_formed = st.one_of(
    valid,
    st.builds(hello, names, st.just("demo") | names, nonces),
    st.builds(encode, st.builds(Proof, nonces)),
    st.builds(encode, st.builds(LinkRefusal, st.sampled_from(CODES), names)),
)
messages = st.one_of(
    well_formed,
    st.binary(max_size=100),
    st.builds(raw, kinds, st.dictionaries(fields, things, max_size=5)),
    st.builds(raw, kinds, things),
    st.builds(lambda message, size: message[:size], well_formed, st.integers(0, 120)),
    st.builds(lambda message, more: message + more, well_formed, st.binary(max_size=4)),
)


@settings(max_examples=600)
@given(st.lists(messages, max_size=5), st.booleans())
def test_hostile_messages_are_refused_and_prove_nothing(received: list[Any], dials: bool) -> None:
    here = (dialer if dials else listener)(nonce=b"9" * 32, expects=None)
    for message in received:
        with suppress(PeerRefused, PeerViolation):
            for answer in here.receive(message):
                assert isinstance(decode(answer), Proof)
        assert here.peer is None
        if here.final_message:
            refused = decode(here.final_message)
            assert isinstance(refused, LinkRefusal)
            assert len(refused.detail) <= DETAIL_LENGTH_MAX


@settings(max_examples=300)
@given(st.integers(0, 3), st.integers(0, 10**6), st.integers(1, 255))
def test_no_two_ends_accept_each_other_if_one_byte_was_changed(which: int, place: int, flip: int) -> None:
    """Both have the secret, so an end may accept only if it received what the other sent."""
    ends = dialer(), listener()
    exchange = Exchange(*ends)
    changed = False
    while turns := exchange.turns():
        end = turns[0]
        inbox = exchange.inboxes[end]
        if inbox and end not in exchange.unstarted and not changed and len(exchange.sent) > which:
            data = bytearray(inbox[0])
            data[place % len(data)] ^= flip
            inbox[0] = bytes(data)
            changed = True
        exchange.turn(end)
    assert changed
    assert ends[0].peer is None or ends[1].peer is None
    assert None not in exchange.failed or exchange.peers == [
        None,
        "front",
    ]  # the byte was in the listener's proof, which is the last message


@given(valid, st.data())
def test_every_truncation_of_a_message_is_a_violation(message: bytes, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, len(message) - 1))
    refusal(dialer(nonce=b"9" * 32), message[:size], kind=PeerViolation)


# The secret -------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [SECRET, b"another-secret"])
def test_the_secret_is_in_no_message_and_in_no_representation(secret: bytes) -> None:
    exchange = Exchange(dialer(), listener(secret=secret)).play()
    seen = [*exchange.sent, *(str(error).encode() for error in exchange.failed)]
    seen += [repr(end).encode() + str(end).encode() for end in exchange.ends]
    assert not any(word in text for text in seen for word in (SECRET, b"another-secret"))
    assert len(exchange.sent) >= 3


def test_proofs_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = standard_hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))  # type: ignore[func-returns-value]
    recorded()
    assert len(compared) == 2
    assert all(a == b and len(a) == 32 for a, b in compared)


@pytest.mark.parametrize("other", [Incarnation("other", 9), Incarnation("run", 10)])
def test_a_proof_covers_the_incarnation(other: Incarnation) -> None:
    here, there = dialer(), listener()
    here.incarnation = Incarnation("run", 9)
    here.__attrs_post_init__()
    (greeting,), (theirs,) = here.start(), there.start()
    (proof,) = here.receive(theirs)
    there.receive(greeting)
    there.receive(proof)
    assert (there.peer, there.peer_incarnation) == ("front", Incarnation("run", 9))
    deceived = listener()
    deceived.start()
    decoded = decode(greeting)
    assert isinstance(decoded, Greeting)
    deceived.receive(encode(evolve(decoded, incarnation=other)))
    with pytest.raises(PeerRefused):
        deceived.receive(proof)


def test_a_proof_is_the_hmac_of_both_greetings() -> None:
    here = dialer()
    (proof,) = here.receive(hello())
    data = msgspec.msgpack.encode(
        ["espalier greeting", VERSION, "dials", b"d" * 32, b"x" * 32, "front", "back", "demo"]
        + [{"run": "", "started_at": 0}] * 2
    )
    assert decode(proof) == Proof(standard_hmac.new(hashlib.sha256(SECRET).digest(), data, "sha256").digest())
