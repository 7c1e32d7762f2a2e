"""The prompt of a conversation whose last message is continued, as transformers renders it.

A mark behind the last text shows where the text ends in the prompt, whatever the template puts around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from actors.text.template_files import TITLE
from protocol.errors import BadRequest

MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own: some templates look for it
FIELD = "continue_final_message"


def rendered_up_to_last_text(
    messages: Sequence[Mapping[str, object]],
    render: Callable[[Sequence[Mapping[str, object]]], str],
    title: str = TITLE,
) -> str:
    """Return the prompt up to the end of its last message's text; raises `BadRequest` if no text can go on.

    `title` names the template in the sentence.
    """
    *before, last = messages
    if last.get("tool_calls"):
        # They stand behind the text, so the prompt would end before them.
        raise BadRequest("the last message calls tools, and no text goes on behind a call", param=FIELD)
    content = last["content"]
    if isinstance(content, str):
        text, marked = content, {**last, "content": content + MARK}
    else:
        parts = [*cast("list[dict[str, str]]", content)]
        place = next((place for place in reversed(range(len(parts))) if "text" in parts[place]), None)
        if place is None:
            raise BadRequest("the last message has no text to continue", param=FIELD)
        text = parts[place]["text"]
        parts[place] = {**parts[place], "text": text + MARK}
        marked = {**last, "content": parts}
    prompt = render([*before, marked])
    end = prompt.rfind(MARK.strip())
    if end < 0 or text.strip() not in prompt:
        raise BadRequest(f"{title} changes the last message, so that no answer can go on", param=FIELD)
    # Without the blank of the mark, the template has trimmed the text.
    return prompt[:end] if prompt.startswith(MARK, end) else prompt[:end].rstrip()
