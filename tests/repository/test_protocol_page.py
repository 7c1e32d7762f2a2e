"""The protocol's page is made from the code it describes: `python tests/repository/test_protocol_page.py` writes it."""

import sys
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "protocol.md"
sys.path.insert(0, str(ROOT))

from protocol import errors  # noqa: E402
from protocol.link import attachments, codec, frames, streams  # noqa: E402
from protocol.messages.kind import Kind  # noqa: E402


def first_sentence(thing: object) -> str:
    return " ".join((thing.__doc__ or "").split("\n\n")[0].split())


def paragraph(module: object, number: int) -> str:
    return (module.__doc__ or "").strip().split("\n\n")[number].strip()


def fields(cls: type) -> str:
    return ", ".join(f"`{field.name}`" for field in attrs.fields(cls)) or "nothing"


def answered_by(row: Kind) -> str:
    """Return what answers a request, the result last; a dash for what is none."""
    return ", ".join(f"`{cls.__name__}`" for cls in (*row.replies, row.result) if cls is not None) or "-"


def table(head: str, rows: list[str]) -> str:
    columns = head.count("|") + 1
    return "\n".join([f"| {head} |", "|" + "---|" * columns, *rows])


def page() -> str:
    frame_rows = [
        f"| {kind} | `{cls.__name__}` | {fields(cls)} | {first_sentence(cls)} |" for kind, cls in frames.KINDS.items()
    ]
    message_rows = [
        f"| {row.number} | `{cls.__name__}` | {fields(cls)} | {answered_by(row)} | {first_sentence(cls)} |"
        for cls, row in codec.ROWS.items()
    ]
    of_the_asker = [frames.Open, frames.RequestData, frames.Credit, frames.Cancel]
    of_streams = [*of_the_asker, frames.Item, frames.ReplyData, frames.End, frames.Fail]
    state_rows = [
        f"| {state} | " + " | ".join(streams.NEXT[state].get(frame, "-") for frame in of_streams) + " |"
        for state in streams.NEXT
    ]
    error_rows = [
        f"| `{code}` | {cls.fault} | {cls.http_status} | {cls.close_code or '-'} |"
        f" {'-' if cls.retry_after_s is None else f'after {cls.retry_after_s} s'} | {first_sentence(cls)} |"
        for code, cls in sorted(errors.ERRORS_BY_CODE.items())
    ]
    return f"""# Protocol

*Made from `protocol/` by `python tests/repository/test_protocol_page.py`; a test holds the two together.*

## Frames

{first_sentence(frames)} {frames.__doc__.split(chr(10) * 2)[1].strip().replace(chr(10), " ")}
Version {frames.VERSION}; a frame's body is at most {frames.FRAME_BYTES_MAX:,} bytes. Either end's first frame is `Hello`.

{table("kind | frame | fields | meaning", frame_rows)}

## A stream's states

{first_sentence(streams)} A frame that its row does not name ends the link: `PeerViolation`. A `Step` is an `Item` for each
of its streams and an `End` for each that ended. `Open`, `RequestData`, `Credit` and `Cancel` come from the asker, the
others from the answerer.

{table("state | " + " | ".join(f"`{frame.__name__}`" for frame in of_streams), state_rows)}

Each end may still receive what the other sent before it knew that the state had changed: replies after a `Cancel` spend
credit and are dropped; `Credit`, `Cancel` and `RequestData` after an end have no effect.

{paragraph(streams, -1)}

## Attachments

{paragraph(attachments, 0)}

{paragraph(attachments, 1)}

{paragraph(attachments, 2)}

A piece is at most {attachments.PIECE_BYTES:,} bytes, and {attachments.WINDOW_BYTES:,} may be in flight in each direction; each
`WindowUpdate` gives back what has been received, needed or not. Up to `attached_bytes_max` bytes ({frames.ATTACHED_BYTES_MAX:,} by
default) may be attached at a time, as the receiver states in its `Hello`: more wait at the sender, and one that can never fit is
refused as `too_large` before anything is sent.

The tensors of a result come before its `End`, in an `Item` of their own with an empty body and no units, after which nothing but
`End` or `Fail` may come.

Between nodes, once the receiver has sent `ReadsMemory`, a tensor of a request or of a result may be in the `memory` of its sender's `Hello`
instead, as a `MemoryRange` says ([decision 17](decisions/0017-offered-memory.md)). The receiver of a request that has read it sends
`Taken`; the asker that has read those of a result, a `Cancel` of its stream, which has ended.

Between a node and the process of an engine, a tensor may be described by a `SharedRegion` instead
([decision 16](decisions/0016-shared-memory.md)); from another node, that ends the link. An asker that has taken the shared tensors of
an answer says so by a `Cancel` of its stream, which has ended.

## Messages

What `Open`, `Item`, `End` and `Announce` carry: a kind byte and a body in msgpack. What has no row here crosses no link, and an
answer that the row of its request does not name ends the link: `PeerViolation`.

{table("kind | message | fields | answered by | meaning", message_rows)}

## Errors

{first_sentence(errors)}

{table("code | whose fault | HTTP | close code | again | meaning", error_rows)}
"""


def test_the_page_of_the_protocol_matches_the_code() -> None:
    assert PAGE.read_text() == page(), "run: python tests/repository/test_protocol_page.py"


if __name__ == "__main__":
    PAGE.write_text(page())
