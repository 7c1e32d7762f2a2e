"""The source of a model's chat template, among the files of its folder or in a file that an operator names.

Where a folder has several, the one that transformers would use counts: a model with a processor, for images, has its
template in the processor's files first, and any other model in its tokenizer's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias, cast

from protocol.errors import StartFailed

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
At: TypeAlias = Literal["folder", "file", "name"]

DEFAULT = "default"
KEY = "chat_template"
TEXT_FILE = "chat_template.jinja"
PROCESSOR_FILES = ("processor_config.json", "chat_template.json", TEXT_FILE, "tokenizer_config.json")
TOKENIZER_FILES = (TEXT_FILE, "tokenizer_config.json", "chat_template.json", "processor_config.json")
HAS_PROCESSOR = ("processor_config.json", "preprocessor_config.json")
READ = frozenset((*TOKENIZER_FILES, *HAS_PROCESSOR))


class BadTemplate(StartFailed):
    """A chat template cannot be used; `at` is whether its folder, its file or its name is at fault."""

    def __init__(self, sentence: str, at: At) -> None:
        super().__init__(sentence)
        self.at = at


def own_template(files: Mapping[str, bytes], name: str | None) -> str:
    """Return the template in a model's folder, the one of this name if it has several; raises `BadTemplate`."""
    found = _own(files)
    if not found:
        raise BadTemplate("the model has no chat template: name one with the model's `template`", "folder")
    first_file = found[0][0]
    # Without a name only the first file counts, since transformers reads no further.
    return _named([each for each in found if name is not None or each[0] == first_file], name)


def template_of(text: str, name: str | None) -> str:
    """Return the template in the text of an operator's file, which may be JSON that has it; raises `BadTemplate`."""
    value = _parsed(text)
    if not isinstance(value, dict | list):
        if name not in (None, DEFAULT):
            raise BadTemplate(f"the file has one chat template, which has no name, so none is named {name!r}", "name")
        return text
    found = [("the file", *each) for each in _listed(value.get(KEY) if isinstance(value, dict) else None)]
    if not found:
        raise BadTemplate(f"the file is JSON without `{KEY}`, so it is no chat template", "file")
    return _named(found, name)


def other_names(files: Mapping[str, bytes], text: str | None, name: str | None) -> list[str]:
    """Return the names of the templates that could be chosen instead of this one; `text` is an operator's file."""
    if text is None:
        names = [each for _, each, _ in _own(files)]
    else:
        value = _parsed(text)
        names = [each for each, _ in _listed(value.get(KEY) if isinstance(value, dict) else None)]
    return [each for each in dict.fromkeys(names) if each != (name or DEFAULT)]


def _own(files: Mapping[str, bytes]) -> list[tuple[str, str, str]]:
    """Return the file, the name and the text of each template in a model's folder, as they count."""
    order = PROCESSOR_FILES if any(one in files for one in HAS_PROCESSOR) else TOKENIZER_FILES
    return [(file, *each) for file in order if file in files for each in _templates(file, files[file])]


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
        if file == TEXT_FILE:
            yield DEFAULT, text
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


def _named(found: list[tuple[str, str, str]], name: str | None) -> str:
    """Return the first template of this name, or the one named `default`; raises `BadTemplate`."""
    wanted = name or DEFAULT
    for _, each, template in found:
        if each == wanted:
            return template
    names = ", ".join(dict.fromkeys(f"{each!r} in {file}" for file, each, _ in found))
    if name is None:
        raise BadTemplate(f"of several chat templates none is named {DEFAULT!r}: choose one by name: {names}", "name")
    raise BadTemplate(f"no chat template is named {name!r}; there are {names}", "name")
