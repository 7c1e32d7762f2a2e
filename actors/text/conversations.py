"""The prompt of a conversation, as the chat template of its model renders it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jinja2
from attrs import Factory, frozen

from actors.text.chat_template import render_conversation
from protocol.errors import BadRequest
from protocol.messages.text import Rendering, Role, Turn


@frozen
class ConversationTemplate:
    """A chat template, and what it is given besides a conversation."""

    template: jinja2.Template
    specials: Mapping[str, str] = Factory(dict)  # `bos_token` and the like

    def render(self, turns: Sequence[Turn], rendering: Rendering) -> str:
        """Return the prompt of a conversation; raises `BadRequest` if the template fails."""
        messages = [{"role": _role(turn.role), "content": _content(turn)} for turn in turns]
        variables = {"add_generation_prompt": rendering.begins_answer, "tools": None, **self.specials}
        try:
            return render_conversation(self.template, messages, variables)
        except Exception as error:
            # A template may raise anything to refuse a conversation.
            raise BadRequest(f"the model's chat template refuses this conversation: {error}") from error


def _role(role: Role) -> str:
    # Templates have no developer role; OpenAI's is their system.
    return "system" if role is Role.DEVELOPER else role.value


def _content(turn: Turn) -> str | list[dict[str, str]]:
    """Return the content of a message as templates read it: a text, or a list of texts, images and videos."""
    if isinstance(turn.content, str):
        return turn.content
    if not turn.media:
        return turn.text
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part.modality.value}
        for part in turn.content
    ]
