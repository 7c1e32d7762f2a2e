"""The memory of conversations that a WebSocket can continue, those with images included."""

from __future__ import annotations

from protocol.messages.media import Media, Modality
from protocol.messages.text import Role, Turn
from protocol.messages.tools import ToolCall
from supervisor.gateway.histories import PART_BYTES, TURN_BYTES, Conversation, ResponseHistory


def test_the_urls_of_images_count_like_texts() -> None:
    url, text = "data:image/png;base64," + "A" * 100_000, "what is this?"
    turn = Turn(Role.USER, (text, Media(Modality.IMAGE, url)))
    conversation = Conversation.after(None, "r1", turn)
    assert conversation.size_bytes == TURN_BYTES + 2 * PART_BYTES + text.__sizeof__() + url.__sizeof__()
    history = ResponseHistory(conversation.size_bytes - 1)
    history.remember(None, conversation)
    assert history.find("r1") is None


def test_a_history_counts_the_conversations_that_it_keeps() -> None:
    memory = ResponseHistory(10_000)
    turn = Turn(Role.USER, "x" * 1000)
    size = TURN_BYTES + turn.content.__sizeof__()
    first = Conversation.after(None, "r1", turn)
    answer, question = Turn(Role.ASSISTANT, "y" * 1000), Turn(Role.USER, "z" * 1000)
    second = Conversation.after(first, "r2", answer, question)
    assert (first.size_bytes, second.size_bytes, second.turns) == (size, 3 * size, (turn, answer, question))
    memory.remember("a", first)
    memory.remember("a", second)
    memory.remember(None, first)
    assert (memory.size_bytes, memory.lanes) == (4 * size, frozenset({"a", None}))
    memory.evict("a", "r1")
    memory.evict("b", "r2")
    memory.evict("a", None)
    assert memory.find("r2") is second
    assert memory.find_in(None, "r2") is None
    memory.evict("a", "r2")
    assert (memory.size_bytes, memory.find("r2")) == (size, None)
    for number in range(100):
        memory.remember(str(number), second)
        assert memory.size_bytes <= 10_000
    assert memory.find("r1") is None
    memory.remember("99", Conversation("big", (), 10_001))
    assert memory.find("big") is None
    assert memory.lanes == {"98"}


def test_reasoning_and_calls_count_as_the_text_does() -> None:
    reasoning, arguments = "r" * 1000, '{"a": "' + "x" * 1000 + '"}'
    call = ToolCall("call_1", "f", arguments)
    conversation = Conversation.after(None, "r1", Turn(Role.ASSISTANT, "y", reasoning=reasoning, calls=(call, call)))
    texts = ("y", reasoning, *(call.id, call.name, arguments) * 2)
    assert conversation.size_bytes == TURN_BYTES + 2 * PART_BYTES + sum(text.__sizeof__() for text in texts)
