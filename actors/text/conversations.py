"""The prompt of a conversation, as the chat template of its model renders it.

Every text of a conversation reaches the prompt, or the conversation is refused by the field that has the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from typing import Self

import jinja2
from attrs import Factory, evolve, frozen

from actors.text.chat_template import render_conversation, watched
from actors.text.continuation import rendered_up_to_last_text
from actors.text.kept_texts import KeptTexts
from actors.text.template_cost import REPEATED_STEPS_MAX, TemplateCost, learn_cost
from actors.text.template_facts import Takes, TemplateFacts, TemplateMessage, learn, part_of
from actors.text.template_files import TITLE
from actors.text.template_steps import LimitReached, Steps, counted
from actors.text.template_tools import TemplateTool, ToolFacts, learn_tools, template_tool, with_calls_apart
from actors.text.template_variables import KWARGS, TemplateVariables, Variables
from protocol.errors import BadRequest, Overloaded, StartFailed
from protocol.messages.media import Media
from protocol.messages.text import DEFAULT_RENDERING, Rendering, Role, Turn
from protocol.messages.tools import Tool
from protocol.strict.mistakes import join, segment

SYSTEM, DEVELOPER, USER, ASSISTANT, TOOL = Role  # by identity: the hash of a role is computed in Python
_ROLES = {each: each.value for each in (USER, ASSISTANT, TOOL)}
PARTS_JOIN = " "  # of a template that takes no lists, as SGLang's own server has it
SYSTEMS_JOIN = "\n\n"
TAIL_CHARACTERS = 64
SENTENCE_CHARACTERS_MAX = 300  # of a template, in a refusal
# A template for tools may render nothing without one.
WITH_TOOL = Rendering(tools=(Tool("example", "An example.", '{"type": "object", "properties": {}}'),))


@frozen
class ConversationTemplate:
    """A chat template, what it is given besides a conversation, and what it does with texts."""

    template: jinja2.Template
    specials: Mapping[str, str] = Factory(dict)  # `bos_token` and the like
    facts: TemplateFacts = TemplateFacts()
    tools: ToolFacts = ToolFacts()
    cost: TemplateCost = TemplateCost()
    kept: KeptTexts = Factory(KeptTexts)
    variables: TemplateVariables = TemplateVariables()
    greeting: object = "Hello"  # the content of a user's message, as the template takes it
    usual: Rendering = DEFAULT_RENDERING  # as it was learned: with a tool, if it is for requests with tools alone
    title: str = TITLE  # in sentences

    @classmethod
    def learned(
        cls,
        template: jinja2.Template,
        source: str,
        specials: Mapping[str, str],
        variables: Variables | None = None,
        salt: str = "",
        *,
        title: str = TITLE,
        for_tools: bool = False,
    ) -> Self:
        """Return a template with the facts about it; raises `StartFailed` if it does not render a user's message.

        `variables` are the operator's values of its variables; `salt` has digits that no client knows. `title` names
        it in sentences. A template that is `for_tools` alone is tried with one.
        """
        bare = cls(template, specials, usual=WITH_TOOL if for_tools else DEFAULT_RENDERING, title=title)
        defaults, usual = variables or {}, bare.usual
        unknown = evolve(bare, variables=TemplateVariables(defaults=defaults))
        facts = learn(lambda messages: unknown.rendered(messages, usual))
        cost = learn_cost(lambda messages, steps: unknown.rendered(messages, usual, steps))
        role = Role.USER.value
        greeting = _content(Turn(Role.USER, "Hello"), facts.takes[role])
        hello = [{"role": role, "content": greeting}]

        def render_tools(messages: Sequence[TemplateMessage], tools: Sequence[TemplateTool] | None) -> str:
            return bare.rendered_with(messages, defaults, Steps(), begins_answer=True, tools=tools)

        def hello_with(given: Variables) -> str:
            return evolve(bare, variables=TemplateVariables(defaults=given)).rendered(hello, usual, Steps())

        read = evolve(TemplateVariables.read(template.environment, source, defaults, hello_with), title=title)
        tools = learn_tools(render_tools, greeting)
        learned = evolve(
            bare, facts=facts, tools=tools, cost=cost, kept=KeptTexts(salt), variables=read, greeting=greeting
        )
        if not facts.renders_text:
            # A template that fails on this fails on everything.
            try:
                learned.rendered(hello, usual)
            except Exception as error:
                why = f"{title} renders no plain conversation ({error}){'' if for_tools else '; it may need tools'}"
                raise StartFailed(why) from error
            raise StartFailed(f"this is no chat template: the text of a user's message is not in what {title} renders")
        return learned

    def render(self, turns: Sequence[Turn], rendering: Rendering = DEFAULT_RENDERING) -> str:
        """Return the prompt of a conversation; raises `BadRequest` if the template refuses it, or leaves a text out."""
        merged = self._merged(turns)
        if rendering.tools or any(turn.calls or turn.call_id for turn in turns):
            merged = self._with_calls(merged, rendering)
        messages = self._messages(merged)
        steps = Steps(self.cost.steps_max(len(messages)))
        try:
            prompt = self.rendered(messages, rendering, steps)
            lost = self.kept.first_lost(
                messages,
                prompt,
                lambda probes: self.rendered(probes, rendering),
                rendering,
                may_render=steps.taken <= REPEATED_STEPS_MAX,
            )
        except BadRequest:
            raise
        except MemoryError:
            raise Overloaded("the server has too little memory to render this conversation now") from None
        except Exception as error:
            # A template may raise anything to refuse a conversation.
            raise self._refused(
                merged, messages, rendering, error, may_render=steps.taken <= REPEATED_STEPS_MAX
            ) from error
        if lost is not None:
            raise self._left_out(merged, lost)
        return prompt

    def rendered(self, messages: Sequence[TemplateMessage], rendering: Rendering, steps: Steps | None = None) -> str:
        """Return what the template makes of messages, counting its `steps`; raises its own error."""
        variables = self.variables.values(rendering)
        steps = steps or Steps(self.cost.steps_max(len(messages)))
        # A template that is for tools alone may walk them without a look at whether there are any.
        tools = list(map(template_tool, rendering.tools)) or ([] if self.usual.tools else None)

        def render(messages: Sequence[TemplateMessage]) -> str:
            return self.rendered_with(messages, variables, steps, begins_answer=rendering.begins_answer, tools=tools)

        return rendered_up_to_last_text(messages, render, self.title) if rendering.continues else render(messages)

    def tail(self, rendering: Rendering) -> str:
        """Return the last characters of every prompt that is rendered in this way."""
        if not rendering.begins_answer:
            return ""
        plain = evolve(rendering, tools=self.usual.tools)
        return self.rendered([{"role": USER.value, "content": self.greeting}], plain)[-TAIL_CHARACTERS:]

    def rendered_with(
        self,
        messages: Sequence[TemplateMessage],
        variables: Variables,
        steps: Steps,
        *,
        begins_answer: bool,
        tools: Sequence[TemplateTool] | None = None,
    ) -> str:
        """Return what the template makes of messages with these variables; raises its own error, or `LimitReached`."""
        given = {name: counted(value) for name, value in variables.items()}
        given |= {"add_generation_prompt": begins_answer, "tools": tools, **self.specials}
        return render_conversation(self.template, messages, given, steps)

    def _merged(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        """Return a conversation with its leading instructions as the template takes them: each, or all in one.

        Where it renders them with the last question alone, they are the beginning of that question.
        """
        join = self.facts.question_join
        if join is not None and turns[-1].role is not USER and _instructs(turns[0]):
            return _with_question(turns, join)
        if self.facts.several_systems or len(turns) < 2 or not _instructs(turns[1]):
            return turns
        leading = list(takewhile(_instructs, turns))
        if len(leading) < 2:
            return turns
        name = next((turn.name for turn in leading if turn.name), "")
        return [Turn(Role.SYSTEM, _as_one(leading), name, leading[0].param), *turns[len(leading) :]]

    def _with_calls(self, turns: Sequence[Turn], rendering: Rendering) -> Sequence[Turn]:
        """Return a conversation with calls as the template takes them: all of an answer, or one each.

        Raises `BadRequest` if the template has no place for tools, or for calls.
        """
        if rendering.tools and not self.tools.shows_tools:
            raise BadRequest(f"{self.title} shows no tools, so the model cannot call any", param="tools")
        called = next((turn for turn in turns if turn.calls or turn.call_id), None)
        if called is None:
            return turns
        if not self.tools.shows_calls:
            sentence = f"{self.title} has no place for calls of tools and their results"
            raise BadRequest(sentence, param=called.param or None)
        return with_calls_apart(turns, self.tools)

    def _messages(self, turns: Sequence[Turn]) -> list[TemplateMessage]:
        """Return turns as templates read them; a result is that of the nearest call with its id before it."""
        names, numbers, calls = dict[str, str](), dict[str, int](), count()
        messages = list[TemplateMessage]()
        for turn in turns:
            for call in turn.calls:
                names[call.id], numbers[call.id] = call.name, next(calls)
            messages.append(self._message(turn, names, numbers))
        return messages

    def _message(self, turn: Turn, names: Mapping[str, str], numbers: Mapping[str, int]) -> TemplateMessage:
        """Return a turn as templates read it; `names` and `numbers` of all calls are by their ids."""
        facts = self.facts
        content: object = turn.content
        role = _ROLES.get(turn.role) or facts.instructions
        takes = facts.takes.get(role, Takes.TEXT)
        if takes is Takes.PARTS or not isinstance(content, str):
            content = _content(turn, takes)
        message: dict[str, object] = {"role": role, "content": content}
        if turn.calls or turn.call_id:
            self.tools.add(message, turn, names, numbers)
        if turn.name:
            message["name"] = turn.name
        if turn.reasoning and self.variables.reasoning_key is not None:
            message[self.variables.reasoning_key] = turn.reasoning
        return message

    def _refused(
        self,
        turns: Sequence[Turn],
        messages: Sequence[TemplateMessage],
        rendering: Rendering,
        error: Exception,
        *,
        may_render: bool,
    ) -> BadRequest:
        """Return the refusal of a conversation for an error of the template."""
        sentence, param = f"{self.title} refuses this conversation: {_line(error)}", None
        if rendering.variables and self._renders_without_variables(messages, rendering):
            name, *others = rendering.variables
            param = KWARGS if others else join(KWARGS, segment(name))
        elif isinstance(error, LimitReached):
            sentence += f"; send fewer or shorter messages{' or tools' if rendering.tools else ''}"
        elif may_render:
            param = self._refused_field(turns, messages, rendering, error)
        return BadRequest(sentence, param=param)

    def _renders_without_variables(self, messages: Sequence[TemplateMessage], rendering: Rendering) -> bool:
        steps = Steps(min(REPEATED_STEPS_MAX, self.cost.steps_max(len(messages))))
        try:
            self.rendered(messages, evolve(rendering, variables={}), steps)
        except Exception:  # noqa: BLE001  # a template may raise anything to refuse a conversation
            return False
        return True

    def _refused_field(
        self, turns: Sequence[Turn], messages: Sequence[TemplateMessage], rendering: Rendering, error: Exception
    ) -> str | None:
        """Return the client's name of the message that a template refuses, None if that is none alone."""
        copies, last = watched(messages)
        if self._refusal(copies, rendering) != str(error) or last.place is None:
            return None
        read = last.place
        for others in (messages[:read], [*messages[:read], *messages[read + 1 :]]):
            # Nothing before the first message can be at fault.
            if not others or self._refusal(others, rendering) != str(error):
                return turns[read].param or None
        return None

    def _left_out(self, turns: Sequence[Turn], lost: int) -> BadRequest:
        """Return the refusal of a conversation of which the template leaves out a message."""
        role, named = turns[lost].role, lost
        if _instructs(turns[lost]):
            # One that comes later takes the place of the one that is lost.
            later = (index for index, turn in enumerate(turns) if index > lost and _instructs(turn))
            named = next(later, lost)
        text = f"the text of {turns[lost].param}" if turns[lost].param else f"a text of the {role}"
        sentence = f"{self.title} leaves {text} out of the prompt of this conversation"
        if named != lost:
            sentence += f", since {turns[named].param or role} has instructions, too; send all of them at the beginning"
        elif lost and _instructs(turns[lost]):
            sentence += "; send instructions at the beginning of the conversation"
        return BadRequest(sentence, param=turns[named].param or None)

    def _refusal(self, messages: Sequence[TemplateMessage], rendering: Rendering) -> str | None:
        try:
            self.rendered(messages, rendering)
        except Exception as error:  # noqa: BLE001  # a template may raise anything to refuse a conversation
            return str(error)
        return None


def _line(error: Exception) -> str:
    """Return a template's sentence as one line of a bounded length."""
    line = " ".join(str(error).split())
    return line if len(line) <= SENTENCE_CHARACTERS_MAX else f"{line[:SENTENCE_CHARACTERS_MAX]}..."


def _instructs(turn: Turn) -> bool:
    return turn.role is SYSTEM or turn.role is DEVELOPER


def _as_one(instructions: Sequence[Turn]) -> str:
    return SYSTEMS_JOIN.join([text for turn in instructions if (text := _joined(turn))])


def _with_question(turns: Sequence[Turn], join: str) -> Sequence[Turn]:
    """Return a conversation whose leading instructions are the beginning of its last question."""
    leading = list(takewhile(_instructs, turns))
    place = max((place for place, turn in enumerate(turns) if turn.role is USER), default=None)
    if place is None:
        return turns
    question, text = turns[place], f"{_as_one(leading)}{join}"
    content = question.content
    if isinstance(content, str):
        begun: str | tuple[str | Media, ...] = f"{text}{content}"
    elif content and isinstance(content[0], str):
        begun = (f"{text}{content[0]}", *content[1:])
    else:
        begun = (text, *content)
    return [*turns[len(leading) : place], evolve(question, content=begun), *turns[place + 1 :]]


def _content(turn: Turn, takes: Takes) -> str | list[dict[str, str]]:
    """Return the content of a message: a text, or a list of texts, images and videos."""
    parts = (turn.content,) if isinstance(turn.content, str) else turn.content
    if takes is Takes.TEXT and not any(isinstance(part, Media) for part in parts):
        return _joined(turn)
    return [part_of(part) if isinstance(part, str) else {"type": part.modality.value} for part in parts]


def _joined(turn: Turn) -> str:
    """Return the texts of a turn as one, for a template that takes no lists."""
    content = turn.content
    return content if isinstance(content, str) else PARTS_JOIN.join([part for part in content if isinstance(part, str)])
