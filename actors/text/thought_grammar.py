"""The grammar of an answer behind its reasoning: behind the rest of a thought of the prompt, or perhaps a whole one."""

from __future__ import annotations

import json
from collections.abc import Sequence

from actors.text.formats.answer import Thought, WholeFormat
from actors.text.formats.call_tags import TagPart, either, json_of, optional, regex, sequence, text, text_until
from actors.text.formats.held_format import HeldText
from actors.text.formats.table import REASONING, WHOLE, AnswerFormat
from protocol.errors import Unsupported
from protocol.messages.generation import Grammar, GrammarKind

AFTER_THOUGHT = regex("\\n{0,2}")


def has_marks(answers: AnswerFormat) -> bool:
    """Return whether markers may stand before the text of an answer, which a grammar of the text has to allow."""
    return answers.reasoning is not None or whole_format(answers) is not None


def grammar_behind_thought(
    grammar: Grammar, answers: AnswerFormat, *, thinking: bool = False, begun: bool = False
) -> Grammar:
    """Return the grammar of an answer for an engine's grammar of its text.

    The prompt ends within reasoning if `thinking`, and within the text if `begun`. A client's structural tag describes
    a whole answer, and is left as it is. Raises `Unsupported` without a parameter.
    """
    if not has_marks(answers) or (part := tag_part(grammar)) is None:
        return grammar
    answer = text_answer(part, answers, begun=begun and not thinking)
    return structural_tag(behind_thought(answer, answers, thinking=thinking))


def tag_part(grammar: Grammar) -> TagPart | None:
    """Return an engine's grammar as a part of a structural tag; None for a structural tag."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return json_of(json.loads(grammar.text))
        case GrammarKind.REGEX:
            return regex(grammar.text)
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": grammar.text}
        case GrammarKind.STRUCTURAL_TAG:
            return None


def structural_tag(part: TagPart) -> Grammar:
    """Return the grammar that is a part."""
    written = json.dumps({"type": "structural_tag", "format": part}, ensure_ascii=False, separators=(",", ":"))
    return Grammar(GrammarKind.STRUCTURAL_TAG, written)


def text_answer(content: TagPart, answers: AnswerFormat, *, begun: bool) -> TagPart:
    """Return the grammar of an answer whose text is `content`; raises `Unsupported` if that cannot be held."""
    if (whole := whole_format(answers)) is None:
        return content
    if not isinstance(whole, HeldText):
        raise Unsupported(f"the text of an answer in the format {answers.tools} cannot be held to a grammar")
    return whole.answer(content, begun=begun)


def behind_thought(answer: TagPart, answers: AnswerFormat, *, thinking: bool) -> TagPart:
    """Return the grammar of an answer behind its reasoning; an answer in a whole format may begin with its own."""
    if (whole := whole_format(answers)) is not None:
        return sequence(whole.thought_rest, answer) if thinking and isinstance(whole, HeldText) else answer
    if answers.reasoning is None:
        return answer
    return sequence(*_before(REASONING[answers.reasoning], thinking=thinking), answer)


def _before(thought: Thought, *, thinking: bool) -> Sequence[TagPart]:
    rest = either(*(text_until(end) for end in thought.ends)), AFTER_THOUGHT
    if thinking:
        return rest
    return (optional(sequence(either(*map(text, thought.begins)), *rest)),)


def whole_format(answers: AnswerFormat) -> WholeFormat | None:
    """Return the format of a model's whole answers, None if it has none."""
    return WHOLE.get(answers.tools or "")
