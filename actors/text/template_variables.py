"""Variables of a chat template: their names, the operator's values, and their values for an effort of reasoning.

Templates know thinking by many names, and no file of a model lists them. So the known names are tried, one by one, by
rendering a short conversation when the model is loaded: what changes the prompt has an effect. A template
cannot express every effort: the others are refused by a list of the possible ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Self, TypeAlias

import jinja2
from attrs import Factory, evolve, frozen

from actors.text.template_files import TITLE
from actors.text.template_names import keys_read, variables_read
from protocol.dialects.request_body import as_request_error
from protocol.messages.text import Rendering
from protocol.strict.mistakes import Mistake, describe, join, segment

Variables: TypeAlias = Mapping[str, object]

RenderWith: TypeAlias = Callable[[Variables], str]
"""Renders a short conversation with these variables; raises anything where the template refuses them."""

KWARGS = "chat_template_kwargs"  # the client's name of variables, in every dialect
RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message"}
    | {"bos_token", "eos_token", "pad_token", "unk_token", "raise_exception", "strftime_now"}
)
"""Variables that a conversation, a model or this server sets."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
DEFAULT_EFFORT = "medium"  # of OpenAI's APIs
COMMON_EFFORTS = ("low", "medium", "high")
LITTLE_EFFORTS = ("none", "minimal")  # which mean no thinking where the template knows no less
UNKNOWN_EFFORT = "effort90417"  # no template knows it

EFFORT_NAMES = ("reasoning_effort", "thinking_effort", "reasoning_strength")
OFF_EFFORTS = ("none", "no_think", "off")  # values of such a variable that turn thinking off
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # of a message
# The marks of thinking in a template: a tag, or the key of a message. Words of its own texts are none.
THINKS = re.compile(r"[<\[/|◁]think|start_thinking|reasoning_content|\.thinking|['\"]thinking", re.IGNORECASE)
# A mark of thinking with the mark of its end directly behind it.
EMPTY_THOUGHT = re.compile(r"<\W?think\w*\W?>\s*<[^<>]*(?:/|end)[^<>]*>", re.IGNORECASE)
COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


@frozen
class Switch:
    """A variable that turns thinking on and off."""

    name: str
    off: object = False
    on: object = True

    def is_off(self, value: object) -> bool:
        """Return whether a value turns thinking off."""
        return value == self.off if self.off else not value


SWITCHES = (
    Switch("enable_thinking"),  # Qwen, GLM, Gemma and most others
    Switch("thinking"),  # DeepSeek, Kimi, Granite
    Switch("reasoning"),  # Cohere
    Switch("thinking_mode", "disabled", "enabled"),  # MiniMax
    Switch("thinking_budget", 0, -1),  # Seed-OSS
)


@frozen
class TemplateVariables:
    """The variables of a template, and their values."""

    names: frozenset[str] = frozenset()  # that a request may set
    defaults: Variables = Factory(dict)  # the operator's values
    efforts: Mapping[str, Variables] = Factory(dict)  # the variables for each effort that the template can express
    switches: frozenset[str] = frozenset()  # that take true or false alone
    reasoning_key: str | None = None  # the key of a message with its reasoning, if the template reads any
    title: str = TITLE  # of the template, in sentences

    @classmethod
    def named(cls, environment: jinja2.Environment, source: str, defaults: Variables) -> Self:
        """Return the names of a template's variables, without efforts."""
        return cls(variables_read(environment, source) - RESERVED, defaults)

    @classmethod
    def read(cls, environment: jinja2.Environment, source: str, defaults: Variables, render: RenderWith) -> Self:
        """Return the variables of a template; `render` renders it with others than the operator's."""
        named = cls.named(environment, source, defaults)
        thinks = THINKS.search(COMMENT.sub("", source)) is not None
        keys = keys_read(environment, source)
        key = next((key for key in REASONING_KEYS if key in keys), None)
        without = {name: value for name, value in defaults.items() if name not in _thinking_names()}
        trial = _Trial(lambda given: render({**without, **given}))
        turning = [each for each in SWITCHES if each.name in named.names and trial.turns(each)]
        # Templates take a text, even "false", as true, or ignore it.
        switches = frozenset(each.name for each in turning if each.on is True and not trial.writes(each.name))
        efforts = _efforts(named.names, trial, next(iter(turning), None), thinks=thinks)
        return evolve(named, efforts=efforts, switches=switches, reasoning_key=key)

    def mistakes(self) -> dict[str, str]:
        """Return the operator's variables that the template does not read or take, each with a sentence about it."""
        found = {name: self._mistake(name, value) for name, value in self.defaults.items()}
        return {name: sentence for name, sentence in found.items() if sentence is not None}

    def _mistake(self, name: str, value: object) -> str | None:
        if name in self.names:
            if name not in self.switches or isinstance(value, bool):
                return None
            return f"takes true or false alone, got {describe(value)}"
        if name in RESERVED:
            return "is set by the conversation, the model or this server alone"
        readable = f"it reads {', '.join(sorted(self.names))}" if self.names else "it reads none"
        return f"{self.title} reads no such variable; {readable}"

    def values(self, rendering: Rendering) -> Variables:
        """Return the variables for a request; raises `RequestError` for unknown ones."""
        if not rendering.variables and rendering.effort is None:
            return self.defaults
        if mistakes := tuple(self._mistakes(rendering)):
            raise as_request_error(mistakes)
        by_effort = {} if rendering.effort is None else self.efforts[rendering.effort]
        given = {**by_effort, **rendering.variables}
        defaults = self.defaults
        if any(switch.name in given for switch in SWITCHES):
            # A template that reads two switches may prefer the operator's.
            defaults = {name: value for name, value in defaults.items() if name not in _switch_names()}
        return {**defaults, **given}

    def _mistakes(self, rendering: Rendering) -> Iterator[Mistake]:
        for name, value in rendering.variables.items():
            if (sentence := self._mistake(name, value)) is not None:
                yield Mistake(join(KWARGS, segment(name)), sentence)
        if (effort := rendering.effort) is None:
            return
        if effort not in self.efforts:
            possible = ", ".join([level for level in EFFORTS if level in self.efforts and any(self.efforts.values())])
            instead = f"takes {possible} alone" if possible else "has no effort of reasoning; leave it out"
            yield Mistake(rendering.effort_field, f"{self.title} {instead}, got {describe(effort)}")
            return
        for name in _contradicting(self.efforts[effort], rendering.variables):
            yield Mistake(
                rendering.effort_field,
                f"{describe(effort)} contradicts {join(KWARGS, segment(name))}; send one",
            )


def _switch_names() -> frozenset[str]:
    return frozenset(switch.name for switch in SWITCHES)


def _thinking_names() -> frozenset[str]:
    return _switch_names() | {*EFFORT_NAMES}


def _contradicting(by_effort: Variables, given: Variables) -> Iterator[str]:
    """Yield the names of a client's variables that contradict its effort."""
    off = any(switch.is_off(by_effort[switch.name]) for switch in SWITCHES if switch.name in by_effort)
    off = off or any(by_effort.get(name) in OFF_EFFORTS for name in EFFORT_NAMES)
    for switch in SWITCHES:
        if switch.name in given and by_effort and switch.is_off(given[switch.name]) != off:
            yield switch.name
    for name in EFFORT_NAMES:
        if name in given and name in by_effort and given[name] != by_effort[name]:
            yield name


# Efforts ----------------------------------------------------------------------------------


@frozen
class _Trial:
    """The prompts that a template makes of a short conversation by values of its variables."""

    render: RenderWith

    def prompt(self, variables: Variables) -> str | None:
        """Return the prompt, None if the template refuses a value."""
        try:
            return self.render(variables)
        except Exception:  # noqa: BLE001  # a template may raise anything to refuse a value
            return None

    def turns(self, switch: Switch) -> bool:
        """Return whether a switch changes the prompt."""
        off, on = self.prompt({switch.name: switch.off}), self.prompt({switch.name: switch.on})
        return off is not None and on is not None and off != on

    def writes(self, name: str) -> bool:
        """Return whether the template writes any value of a variable into the prompt as it is."""
        return UNKNOWN_EFFORT in (self.prompt({name: UNKNOWN_EFFORT}) or "")

    def words(self, name: str, on: Variables) -> Mapping[str, str] | None:
        """Return the prompts for efforts with a meaning of their own, by the value of a variable.

        None if the template writes any value into the prompt as it is.
        """
        unknown = self.prompt({**on, name: UNKNOWN_EFFORT})
        if unknown is not None and UNKNOWN_EFFORT in unknown:
            return None
        prompts = ((word, self.prompt({**on, name: word})) for word in (*EFFORTS, *OFF_EFFORTS))
        return {word: prompt for word, prompt in prompts if prompt not in (None, unknown)}


def _efforts(names: frozenset[str], trial: _Trial, switch: Switch | None, *, thinks: bool) -> Mapping[str, Variables]:
    """Return the variables for each effort that a template can express; an effort that asks for nothing has none."""
    on: Variables = {} if switch is None else {switch.name: switch.on}
    off: Variables | None = None if switch is None else {switch.name: switch.off}
    graded = next((name for name in EFFORT_NAMES if name in names), None)
    efforts: dict[str, Variables] = {}
    if graded is not None:
        words = trial.words(graded, on)
        if off is None:
            word = _off_word(words or {}, trial.prompt({}))
            off = None if word is None else {graded: word}
        efforts = {level: {**on, graded: level} for level in _levels(trial, graded, on, off, words)}
    elif switch is not None:
        efforts = {level: on for level in EFFORTS if level not in LITTLE_EFFORTS}
    efforts.setdefault(DEFAULT_EFFORT, {})  # a client that names the default of an API asks for nothing
    if off is not None:
        return {"minimal": off, **efforts, "none": off}
    return efforts if thinks else {**efforts, "none": {}, "minimal": {}}


def _off_word(words: Mapping[str, str], usual: str | None) -> str | None:
    """Return the effort that turns thinking off, None if there is none; `words` and `usual` are prompts."""
    word = next((word for word in OFF_EFFORTS if word in words), None)
    if word is None and EMPTY_THOUGHT.search(words.get("minimal", "")) and not EMPTY_THOUGHT.search(usual or ""):
        return "minimal"
    return word


def _levels(
    trial: _Trial, name: str, on: Variables, off: Variables | None, words: Mapping[str, str] | None
) -> Iterator[str]:
    """Yield the efforts that are values of a variable."""
    if words is None:
        yield from COMMON_EFFORTS
        return
    without_thinking = None if off is None else trial.prompt(off)
    for level in EFFORTS:
        prompt = trial.prompt({**on, name: level})
        # An effort that the template does not know is its thinking as such, if it is that.
        if level in words or (level not in LITTLE_EFFORTS and prompt not in (None, without_thinking)):
            yield level
