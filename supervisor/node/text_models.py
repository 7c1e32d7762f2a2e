"""The text models of a node: tokenizer, chat template and digest of each model folder, read once at the start.

A model of vectors or of scores has no chat template, but the prompts of its authors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from attrs import evolve

from actors.engines import model_files
from actors.text import embedding_model
from actors.text.chat_template import compile_template
from actors.text.conversations import ConversationTemplate
from actors.text.embedding_model import EmbeddingModel
from actors.text.encoders import NoEncoder
from actors.text.formats import detection
from actors.text.formats.table import WHOLE
from actors.text.model import TextModel, load
from actors.text.template_files import BadTemplate, TemplateSource, is_read, own_templates, templates_of
from actors.text.template_variables import TemplateVariables, Variables
from protocol.errors import StartFailed
from protocol.messages.cluster import Leg
from protocol.strict.mistakes import Mistake, join, segment
from supervisor.config.load import Misconfigured
from supervisor.config.schema import Cluster
from supervisor.files import reading

FILE_BYTES_MAX = 64 * 1024 * 1024  # of a small file of a model


def load_text_models(cluster: Cluster, node: str, strftime: Callable[[str], str], salt: str) -> dict[str, TextModel]:
    """Return the text models that a node needs, by name; `salt` has digits that no client knows.

    Models of vectors and of scores have none. With a model comes its vision layout, which encoders need, too. Raises
    `Misconfigured` with all of them whose files cannot be used.
    """
    models: dict[str, TextModel] = {}
    errors: list[Misconfigured] = []
    for name in names(cluster, (node,)):
        if cluster.task(name) != "generate":
            continue
        try:
            models[name] = _load(cluster, name, strftime, salt)
        except Misconfigured as error:
            errors.append(error)
    if errors:
        mistakes = [mistake for error in errors for mistake in error.mistakes]
        first, *others = [Misconfigured(mistake.path, mistake.message) for mistake in mistakes]
        raise Misconfigured(first.path, str(first), others) from errors[0]
    return models


def load_embedding_models(cluster: Cluster, node: str) -> dict[str, EmbeddingModel]:
    """Return the text sides of the models of vectors and of scores that a node needs, by name.

    Raises `Misconfigured` for the first whose files cannot be used.
    """
    needed = (name for name in names(cluster, (node,)) if cluster.task(name) != "generate")
    return {name: _load_embedding_model(cluster, name) for name in needed}


def _load_embedding_model(cluster: Cluster, name: str) -> EmbeddingModel:
    folder = cluster.model_path(name)
    try:
        contents = model_files.read_files(folder)
        model = embedding_model.load(contents, encodes=cluster.model[name].tokenizer)
        return evolve(model, digest=model_files.model_digest(folder))
    except (StartFailed, OSError) as error:
        key = "tokenizer" if isinstance(error, NoEncoder) else "path"
        raise Misconfigured(join(join("model", segment(name)), key), f"model {name} in {folder}: {error}") from error


def names(cluster: Cluster, nodes: Collection[str]) -> tuple[str, ...]:
    """Return the models whose text side nodes read: all of them at a gateway, else those that their engines read."""
    if not {*nodes}.isdisjoint(cluster.gateway_nodes):
        return tuple(cluster.model)
    engines = [engine for node in nodes for engine in cluster.engines_on(node).values()]
    of_text = (engine for engine in engines if engine.worker_leg is not Leg.EMBED)
    read = {engine.model for engine in of_text if engine.reads_text or engine.leg == "encode"}
    return tuple(name for name in cluster.model if name in read)


def _load(cluster: Cluster, name: str, strftime: Callable[[str], str], salt: str) -> TextModel:
    section, folder = cluster.model[name], cluster.model_path(name)
    try:
        contents = model_files.read_files(folder)
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
            encodes=section.tokenizer,
        )
        model = evolve(model, digest=model_files.model_digest(folder))
    except NoEncoder as error:
        raise Misconfigured(join(join("model", segment(name)), "tokenizer"), f"model {name}: {error}") from error
    except (StartFailed, OSError, UnicodeDecodeError) as error:
        keys = {"folder": "path", "file": section.template_file_key, "name": section.template_name_key}
        key = keys[error.at] if isinstance(error, BadTemplate) else "path"
        raise Misconfigured(join(join("model", segment(name)), key), f"model {name} in {folder}: {error}") from error
    served = [model] if model.tool_use is None else [model, model.tool_use]
    if mistakes := _mistakes([each.template.variables for each in served]):
        first, *others = [Misconfigured(_variable(name, each), sentence) for each, sentence in mistakes.items()]
        raise Misconfigured(first.path, str(first), others)
    return model


def variable_mistakes(cluster: Cluster, name: str) -> Iterator[Mistake]:
    """Yield a mistake for each variable that an operator sets and no template of a model reads, or one refuses.

    Raises `StartFailed`, `OSError` or `ValueError` if a template cannot be read.
    """
    defaults = cluster.model[name].chat_template.variables
    variables = [_variables(source, defaults) for source in _template_sources(cluster, name)]
    for each, sentence in _mistakes(variables).items():
        yield Mistake(_variable(name, each), sentence)


def _variables(source: TemplateSource, defaults: Variables) -> TemplateVariables:
    template = compile_template(source.text, str, source.title)
    try:
        learned = ConversationTemplate.learned(
            template, source.text, {}, defaults, title=source.title, for_tools=source.for_tools
        )
    except StartFailed:  # it may need a special token of its model
        return TemplateVariables.named(template.environment, source.text, defaults)
    return learned.variables


def _mistakes(templates: Sequence[TemplateVariables]) -> dict[str, str]:
    """Return a sentence for each of the operator's variables that no template reads, or one refuses, by its name."""
    found = [(each, each.mistakes()) for each in templates]
    return {
        name: sentence
        for variables, mistakes in reversed(found)
        for name, sentence in mistakes.items()
        if name in variables.names or all(name in others for _, others in found)
    }


def format_lines(cluster: Cluster) -> Iterator[str]:
    """Yield a line about the formats of the answers of each model whose chat template can be read."""
    for name, section in cluster.model.items():
        if (task := cluster.task(name)) != "generate":
            yield f"{name} computes {'vectors' if task == 'embed' else 'scores'}, and no answers"
            continue
        try:
            sources = _template_sources(cluster, name)
        except (StartFailed, OSError, ValueError):
            continue
        for source in sources:
            answers = detection.chosen(source.text, section.tools, section.reasoning)
            own = answers.tools if answers.tools in WHOLE else None
            calls, thoughts = (each or "in no known format" for each in (answers.tools, answers.reasoning or own))
            requests = "" if len(sources) == 1 else f" with{'' if source.for_tools else 'out'} tools"
            yield f"answers of {name}{requests}: calls {calls}; reasoning {thoughts}"


def _template_sources(cluster: Cluster, name: str) -> list[TemplateSource]:
    """Return the chat templates of a model; raises `StartFailed`, `OSError` or `ValueError`."""
    chosen, folder = cluster.model[name].chat_template, cluster.model_path(name)
    if chosen.file is not None:
        return templates_of(reading.template(cluster.folder / chosen.file), chosen.name)
    present = filter(is_read, model_files.present(folder))
    return own_templates({file: reading.read(folder / file, FILE_BYTES_MAX) for file in present}, chosen.name)


def _variable(model: str, name: str) -> str:
    return join(join(join("model", segment(model)), "template"), segment(name))
