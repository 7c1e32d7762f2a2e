"""Validation of the files and environment variables that `cluster.toml` names, and warnings about them.

It runs before a node starts, at `--check` and at each reload, and makes each value in the way a node does: a node can
start with files that pass here. It runs after the checks across keys, without the keys that already have a mistake. It
may be slow, as disks are, so a running node calls it in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from actors.text.chat_template import compile_template
from actors.text.model import NEEDED
from actors.text.template_files import BadTemplate, templates_of
from protocol.errors import StartFailed
from protocol.model_folder import FILES
from protocol.strict.mistakes import Mistake, join, segment
from supervisor.cluster import link_credentials
from supervisor.config import gateway_nodes, placement
from supervisor.config.certificate import expires_at
from supervisor.config.keyfile import KeySection
from supervisor.config.load import Misconfigured
from supervisor.config.pools import TARGETS
from supervisor.config.schema import Cluster
from supervisor.engines import kinds
from supervisor.files import model_folder, permissions, reading
from supervisor.gateway.keys import client_keys
from supervisor.gateway.keys.key_sources import KeySources
from supervisor.node import text_models, tracing

DAY_S = 86_400
EXPIRES_SOON_S = 14 * DAY_S
NEEDED_BY_ENGINES = ("config.json",)
READ_BY_ENGINES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py")
PEM_BYTES_MAX = 1024 * 1024


def mistakes(cluster: Cluster, environment: Mapping[str, str], node: str | None = None) -> Iterator[Mistake]:
    """Yield every mistake in what the file names, all of them in one pass.

    Folders of models and devices are those of this host: for `node`, else for all nodes that the file places here.
    """
    checks: list[tuple[str, Callable[[], object]]] = [
        ("cluster.secret", partial(link_credentials.cluster_secret, cluster, environment)),
        ("cluster.tls_certificate", partial(link_credentials.link_tls, cluster)),
        ("tracing.endpoint", partial(tracing.check_packages, cluster)),
    ]
    try:
        keys = client_keys.read_keys(cluster, environment)  # once for all nodes: there may be thousands of both
    except Misconfigured as error:
        yield Mistake(error.path, str(error))
    else:
        checks += (
            (f"node.{name}.metrics", partial(client_keys.check_metrics_keys, cluster, name, keys))
            for name in cluster.node
        )
        if not cluster.node.keys().isdisjoint(cluster.gateway_nodes):
            checks.append(("gateway.keys", partial(client_keys.check_client_keys, cluster, keys)))
    if cluster.certificate is not None:
        checks.append(("gateway.tls_certificate", cluster.certificate.context))
    for name, model in cluster.model.items():
        if (file := model.chat_template.file) is not None:
            path = join(join("model", segment(name)), model.template_file_key)
            checks.append((path, partial(_check_template, cluster.folder / file, model.chat_template.name)))
    for path, check in checks:
        try:
            check()
        except Misconfigured as error:
            yield Mistake(error.path, str(error))
        except StartFailed as error:
            yield Mistake(path, str(error))
    yield from _variable_mistakes(cluster)
    with suppress(StartFailed):  # no node is placed here
        nodes = placement.select_nodes(gateway_nodes.expand(cluster), node)
        yield from _folder_mistakes(cluster, nodes)
        yield from kinds.mistakes_here(cluster, nodes, environment)


def _variable_mistakes(cluster: Cluster) -> Iterator[Mistake]:
    for name, model in cluster.model.items():
        if model.chat_template.variables:
            with suppress(StartFailed, OSError, ValueError, RuntimeError):  # other checks report such a template
                yield from text_models.variable_mistakes(cluster, name)


def _folder_mistakes(cluster: Cluster, nodes: Collection[str]) -> Iterator[Mistake]:
    """Yield the mistakes in the folders of models that nodes of this host read, each in what is read of it."""
    engines_here = [engine for engine in cluster.engine.values() if not {*nodes}.isdisjoint(engine.nodes)]
    read_as_text = text_models.names(gateway_nodes.expand(cluster), nodes)
    for name in cluster.model:
        engines = [each for each in engines_here if each.model == name]
        if not engines and name not in read_as_text:
            continue
        weights = next((engine.weights for engine in engines if engine.weights), ())
        with suppress(OSError, RuntimeError):  # other checks report a path that leads nowhere
            if (folder := cluster.model_path(name)).is_dir():
                for sentence in model_folder.mistakes(
                    folder,
                    needed=NEEDED if name in read_as_text else NEEDED_BY_ENGINES,
                    read=READ_BY_ENGINES if weights else FILES,
                    weights=weights,
                ):
                    yield Mistake(join(join("model", segment(name)), "path"), sentence)


def expired(cluster: Cluster, now: float) -> Iterator[Mistake]:
    """Yield a mistake for each expired certificate; `now` in seconds since 1970."""
    for path, file in _certificates(cluster):
        if (expires := _expires_at(file)) is not None and expires <= now:
            yield Mistake(path, f"the certificate {file} expired {_days(now - expires)} ago")


def warnings(cluster: Cluster, now: float) -> Iterator[str]:
    """Yield warnings of dangers (secrets readable by others, certificates about to expire), and of idle settings."""
    section, gateway = cluster.cluster, cluster.gateway
    for name in filter(None, (section.secret, section.tls_key, gateway.keys, gateway.tls_key)):
        with suppress(OSError):  # a missing file is a mistake, which other checks report
            if (why := permissions.readable_by_others(cluster.folder / name)) is not None:
                yield why
    yield from (mistake.message for mistake in expired(cluster, now))
    for _, file in _certificates(cluster):
        if (expires := _expires_at(file)) is not None and now < expires < now + EXPIRES_SOON_S:
            yield f"the certificate {file} expires in {_days(expires - now)}"
    yield from _unread_targets(cluster)


def _unread_targets(cluster: Cluster) -> Iterator[str]:
    """Yield each target of a key that no model of the cluster reads; a key may be for several models."""
    read = {target for model in cluster.model.values() for target in model.grid.targets}
    sections: Mapping[str, KeySection] = {}
    with suppress(StartFailed):  # a mistake in the file, which other checks report
        sections = KeySources(cluster.keys).read()
    for name, section in sections.items():
        for target in TARGETS:
            if getattr(section, target) is not None and target not in read:
                yield f"{target} of the key {name} changes nothing: no model has a grid that reads it"


def _certificates(cluster: Cluster) -> Iterator[tuple[str, Path]]:
    named = {
        "gateway.tls_certificate": cluster.gateway.tls_certificate,
        "cluster.tls_certificate": cluster.cluster.tls_certificate,
    }
    yield from ((path, cluster.folder / name) for path, name in named.items() if name is not None)


def _expires_at(file: Path) -> float | None:
    """Return when the first certificate of a file expires, None if it cannot be read, which other checks report."""
    with suppress(OSError, ValueError):
        return expires_at(reading.read(file, PEM_BYTES_MAX).decode())
    return None


def _days(seconds: float) -> str:
    days = int(seconds // DAY_S)
    return f"{days} day{'s' * (days != 1)}" if days else "less than a day"


def _check_template(file: Path, name: str | None) -> None:
    """Raise `StartFailed` if chat templates cannot be read or compiled; a name is checked when they are loaded."""
    try:
        source = reading.template(file)
    except (OSError, UnicodeDecodeError) as error:
        raise StartFailed(f"{file} cannot be read: {error}") from error
    try:
        for each in templates_of(source, name):
            compile_template(each.text, str, each.title)
    except BadTemplate as error:
        if error.at != "name":
            raise
