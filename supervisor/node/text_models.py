"""The text models of a node: tokenizer, chat template and digest of each model folder, read once at the start."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from attrs import evolve

from actors.engines import model_files
from actors.text.chat_template import compile_template
from actors.text.conversations import ConversationTemplate
from actors.text.formats import detection
from actors.text.formats.table import WHOLE
from actors.text.model import TextModel, load
from actors.text.template_files import READ, BadTemplate, own_template, template_of
from actors.text.template_variables import TemplateVariables
from protocol.errors import StartFailed
from protocol.model_folder import FILES
from protocol.strict.mistakes import Mistake, join, segment
from supervisor.config.load import Misconfigured
from supervisor.config.schema import Cluster
from supervisor.files import reading

FILE_BYTES_MAX = 64 * 1024 * 1024  # of a small file of a model


def load_text_models(cluster: Cluster, node: str, strftime: Callable[[str], str], salt: str) -> dict[str, TextModel]:
    """Return the text models that a node needs, by name; `salt` has digits that no client knows.

    With a model comes its vision layout, which encoders need, too. Raises `Misconfigured` with all of them whose files
    cannot be used.
    """
    models: dict[str, TextModel] = {}
    errors: list[Misconfigured] = []
    for name in names(cluster, (node,)):
        try:
            models[name] = _load(cluster, name, strftime, salt)
        except Misconfigured as error:
            errors.append(error)
    if errors:
        mistakes = [mistake for error in errors for mistake in error.mistakes]
        first, *others = [Misconfigured(mistake.path, mistake.message) for mistake in mistakes]
        raise Misconfigured(first.path, str(first), others) from errors[0]
    return models


def names(cluster: Cluster, nodes: Collection[str]) -> tuple[str, ...]:
    """Return the models whose text side nodes read: all of them at a gateway, else those that their engines read."""
    if not {*nodes}.isdisjoint(cluster.gateway_nodes):
        return tuple(cluster.model)
    engines = [engine for node in nodes for engine in cluster.engines_on(node).values()]
    read = {engine.model for engine in engines if engine.reads_text or engine.leg == "encode"}
    return tuple(name for name in cluster.model if name in read)


def _load(cluster: Cluster, name: str, strftime: Callable[[str], str], salt: str) -> TextModel:
    section, folder = cluster.model[name], cluster.model_path(name)
    try:
        contents = {file: (folder / file).read_bytes() for file in FILES if (folder / file).is_file()}
        file = section.chat_template.file
        template = None if file is None else reading.template(cluster.folder / file)
        chosen = section.chat_template
        model = load(
            contents,
            template,
            chosen.name,
            chosen.variables,
            strftime=strftime,
            salt=salt,
            tools=section.tools,
            reasoning=section.reasoning,
        )
        model = evolve(model, digest=model_files.model_digest(folder))
    except (StartFailed, OSError, UnicodeDecodeError) as error:
        keys = {"folder": "path", "file": section.template_file_key, "name": section.template_name_key}
        key = keys[error.at] if isinstance(error, BadTemplate) else "path"
        raise Misconfigured(join(join("model", segment(name)), key), f"model {name} in {folder}: {error}") from error
    if mistakes := model.template.variables.mistakes():
        first, *others = [Misconfigured(_variable(name, each), sentence) for each, sentence in mistakes.items()]
        raise Misconfigured(first.path, str(first), others)
    return model


def variable_mistakes(cluster: Cluster, name: str) -> Iterator[Mistake]:
    """Yield a mistake for each variable that an operator sets and the template of a model does not read or take.

    Raises `StartFailed`, `OSError` or `ValueError` if the template cannot be read.
    """
    chosen, source = cluster.model[name].chat_template, _template_source(cluster, name)
    template = compile_template(source, str)
    try:
        variables = ConversationTemplate.learned(template, source, {}, chosen.variables).variables
    except StartFailed:  # it may need a special token of its model
        variables = TemplateVariables.named(template.environment, source, chosen.variables)
    for each, sentence in variables.mistakes().items():
        yield Mistake(_variable(name, each), sentence)


def format_lines(cluster: Cluster) -> Iterator[str]:
    """Yield a line about the formats of the answers of each model whose chat template can be read."""
    for name, section in cluster.model.items():
        try:
            source = _template_source(cluster, name)
        except (StartFailed, OSError, ValueError):
            continue
        answers = detection.chosen(source, section.tools, section.reasoning)
        own = answers.tools if answers.tools in WHOLE else None
        calls, thoughts = (each or "in no known format" for each in (answers.tools, answers.reasoning or own))
        yield f"answers of {name}: calls {calls}; reasoning {thoughts}"


def _template_source(cluster: Cluster, name: str) -> str:
    """Return the text of a model's chat template; raises `StartFailed`, `OSError` or `ValueError`."""
    chosen, folder = cluster.model[name].chat_template, cluster.model_path(name)
    if chosen.file is not None:
        return template_of(reading.template(cluster.folder / chosen.file), chosen.name)
    paths = {file: folder / file for file in READ}
    files = {file: reading.read(path, FILE_BYTES_MAX) for file, path in paths.items() if path.is_file()}
    return own_template(files, chosen.name)


def _variable(model: str, name: str) -> str:
    return join(join(join("model", segment(model)), "template"), segment(name))
