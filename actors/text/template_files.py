"""The sources of a model's chat templates, among the files of its folder or in a file that an operator names.

Where several files have one, the file that transformers would read counts: a model with a processor, for images, has
its template in the processor's files first, and any other model in its tokenizer's. Unless an operator names one of
several templates, `tool_use` is for requests with tools and `default` for all others, as transformers has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias, cast

from attrs import frozen

from protocol.errors import StartFailed
from protocol.model_folder import TEMPLATES

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
At: TypeAlias = Literal["folder", "file", "name"]

Row: TypeAlias = tuple[str, str, str]
"""A template: its file, its name, and its text."""

DEFAULT, TOOL_USE = "default", "tool_use"
TITLE = "the model's chat template"
KEY = "chat_template"
TEXT_FILE = "chat_template.jinja"
PROCESSOR_FILES = ("processor_config.json", "chat_template.json", TEXT_FILE, "tokenizer_config.json")
TOKENIZER_FILES = (TEXT_FILE, "tokenizer_config.json", "chat_template.json", "processor_config.json")
HAS_PROCESSOR = ("processor_config.json", "preprocessor_config.json")


@frozen
class TemplateSource:
    """The text of a chat template, and the requests that it is for."""

    text: str
    title: str = TITLE  # in sentences about it
    for_tools: bool = False  # for requests with tools alone


class BadTemplate(StartFailed):
    """A chat template cannot be used; `at` is whether its folder, its file or its name is at fault."""

    def __init__(self, sentence: str, at: At) -> None:
        super().__init__(sentence)
        self.at = at


def is_read(file: str) -> bool:
    """Return whether a file of a model's folder decides about its chat templates."""
    return file in {*TOKENIZER_FILES, *HAS_PROCESSOR} or _is_further(file)


def own_templates(files: Mapping[str, bytes], name: str | None) -> list[TemplateSource]:
    """Return the templates in a model's folder, or the one of this name; raises `BadTemplate`.

    The first is for all requests, or for those without tools if the other one is for tools.
    """
    first, others = _own(files)
    if not first:
        raise BadTemplate("the model has no chat template: name one with the model's `template`", "folder")
    # Without a name only the first file counts, since transformers reads no further.
    return _chosen(first if name is None else [*first, *others], name)


def templates_of(text: str, name: str | None) -> list[TemplateSource]:
    """Return the templates in the text of an operator's file, which may be JSON, as `own_templates` does."""
    value = _parsed(text)
    if not isinstance(value, dict | list):
        if name not in (None, DEFAULT):
            raise BadTemplate(f"the file has one chat template, which has no name, so none is named {name!r}", "name")
        return [TemplateSource(text)]
    found = [("the file", *each) for each in _listed(value.get(KEY) if isinstance(value, dict) else None)]
    if not found:
        raise BadTemplate(f"the file is JSON without `{KEY}`, so it is no chat template", "file")
    return _chosen(found, name)


def other_names(files: Mapping[str, bytes], text: str | None, name: str | None) -> list[str]:
    """Return the names of the templates that could be chosen instead of this one; `text` is an operator's file."""
    if text is None:
        first, others = _own(files)
        names = [each for _, each, _ in (*first, *others)]
    else:
        value = _parsed(text)
        names = [each for each, _ in _listed(value.get(KEY) if isinstance(value, dict) else None)]
    return [each for each in dict.fromkeys(names) if each != (name or DEFAULT)]


def _own(files: Mapping[str, bytes]) -> tuple[list[Row], list[Row]]:
    """Return the templates of the first file, with further ones in files of their own, and the templates elsewhere."""
    order = PROCESSOR_FILES if any(one in files for one in HAS_PROCESSOR) else TOKENIZER_FILES
    found = [(file, *each) for file in order if file in files for each in _templates(file, files[file])]
    first = [row for row in found if row[0] == found[0][0]]
    further = [(file, *each) for file in sorted(filter(_is_further, files)) for each in _templates(file, files[file])]
    return [*first, *further], found[len(first) :]


def _is_further(file: str) -> bool:
    return file.startswith(f"{TEMPLATES}/")


def _chosen(found: Sequence[Row], name: str | None) -> list[TemplateSource]:
    """Return the template of this name, or the default and, if there is one, the template for tools."""
    text = _named(found, name)
    of_tools = next((each for _, named, each in found if named == TOOL_USE), None)
    if name is not None or of_tools is None:
        return [TemplateSource(text)]
    default, tool_use = (f"{TITLE} {each!r}" for each in (DEFAULT, TOOL_USE))
    return [TemplateSource(text, default), TemplateSource(of_tools, tool_use, for_tools=True)]


def _parsed(text: str) -> Json:
    """Return a text of JSON as a value, None if it is none."""
    try:
        return cast("Json", json.loads(text))
    except ValueError:
        return None


def _templates(file: str, data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each template in a file."""
    try:
        text = data.decode()
        if file == TEXT_FILE or _is_further(file):
            yield DEFAULT if file == TEXT_FILE else file.removeprefix(f"{TEMPLATES}/").removesuffix(".jinja"), text
            return
        value = json.loads(text)
    except ValueError as error:
        raise BadTemplate(f"the model's chat template cannot be read: {file}: {error}", "folder") from error
    if isinstance(value, dict):
        yield from _listed(value.get(KEY))


def _listed(value: Json) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each template, of one text, or of a list or an object of several."""
    if isinstance(value, str):
        yield DEFAULT, value
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, dict):
                name, template = entry.get("name"), entry.get("template")
                if isinstance(name, str) and isinstance(template, str):
                    yield name, template
    elif isinstance(value, dict):
        yield from ((name, template) for name, template in value.items() if isinstance(template, str))


def _named(found: Sequence[Row], name: str | None) -> str:
    """Return the first template of this name, or the one named `default`; raises `BadTemplate`."""
    wanted = name or DEFAULT
    for _, each, template in found:
        if each == wanted:
            return template
    names = ", ".join(dict.fromkeys(f"{each!r} in {file}" for file, each, _ in found))
    if name is None:
        raise BadTemplate(f"of several chat templates none is named {DEFAULT!r}: choose one by name: {names}", "name")
    raise BadTemplate(f"no chat template is named {name!r}; there are {names}", "name")
