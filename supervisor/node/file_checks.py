"""What is wrong with the files and variables that `cluster.toml` names, and what is dangerous about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from actors.text.chat_template import compiled
from protocol.errors import StartFailed
from protocol.strict.mistakes import Mistake, join, segment
from supervisor.cluster import link_credentials
from supervisor.config.certificate import expires_at
from supervisor.config.load import Cluster, Misconfigured
from supervisor.files import permissions, reading
from supervisor.gateway import client_keys

DAY_S = 86_400
EXPIRES_SOON_S = 14 * DAY_S
PEM_BYTES_MAX = 1024 * 1024


def mistakes(cluster: Cluster, environment: Mapping[str, str]) -> Iterator[Mistake]:
    """Yield every mistake, so that none is found only after the ones before it have been mended."""
    examined: list[tuple[str, Callable[[], object]]] = [
        ("cluster.secret", partial(link_credentials.cluster_secret, cluster, environment)),
        ("cluster.tls_certificate", partial(link_credentials.link_tls, cluster)),
    ]
    try:
        known = client_keys.read_keys(cluster, environment)  # once for all nodes: there may be thousands of both
    except Misconfigured as error:
        yield Mistake(error.path, str(error))
    else:
        examined += (
            (f"node.{name}.metrics", partial(client_keys.check_metrics_keys, cluster, name, known))
            for name in cluster.node
        )
        if cluster.gateway.node in cluster.node:
            examined.append(("gateway.keys", partial(client_keys.check_client_keys, cluster, known)))
    if cluster.certificate is not None:
        examined.append(("gateway.tls_certificate", cluster.certificate.context))
    for name, model in cluster.model.items():
        if model.template is not None:
            at = join(join("model", segment(name)), "template")
            examined.append((at, partial(_compiled, cluster.folder / model.template)))
    for path, examine in examined:
        try:
            examine()
        except Misconfigured as error:
            yield Mistake(error.path, str(error))
        except StartFailed as error:
            yield Mistake(path, str(error))


def expired(cluster: Cluster, now: float) -> Iterator[Mistake]:
    """Yield each certificate that no client and no node takes any more; `now` in seconds since 1970."""
    for path, file in _certificates(cluster):
        if (ends_at := _ends_at(file)) is not None and ends_at <= now:
            yield Mistake(path, f"the certificate {file} expired {_days(now - ends_at)} ago")


def warnings(cluster: Cluster, now: float) -> Iterator[str]:
    """Yield what works and is dangerous: secrets that others may read, certificates that end soon."""
    section, gateway = cluster.cluster, cluster.gateway
    for name in filter(None, (section.secret, section.tls_key, gateway.keys, gateway.tls_key)):
        with suppress(OSError):  # a file that is not there is a mistake already
            if (why := permissions.readable_by_others(cluster.folder / name)) is not None:
                yield why
    yield from (each.message for each in expired(cluster, now))
    for _, file in _certificates(cluster):
        if (ends_at := _ends_at(file)) is not None and now < ends_at < now + EXPIRES_SOON_S:
            yield f"the certificate {file} expires in {_days(ends_at - now)}"


def _certificates(cluster: Cluster) -> Iterator[tuple[str, Path]]:
    named = {
        "gateway.tls_certificate": cluster.gateway.tls_certificate,
        "cluster.tls_certificate": cluster.cluster.tls_certificate,
    }
    yield from ((path, cluster.folder / name) for path, name in named.items() if name is not None)


def _ends_at(file: Path) -> float | None:
    """Return when the first certificate of a file ends, None if that cannot be read; other checks say why."""
    with suppress(OSError, ValueError):
        return expires_at(reading.read(file, PEM_BYTES_MAX).decode())
    return None


def _days(seconds: float) -> str:
    days = int(seconds // DAY_S)
    return f"{days} day{'s' * (days != 1)}" if days else "less than a day"


def _compiled(file: Path) -> None:
    try:
        source = reading.template(file)
    except (OSError, UnicodeDecodeError) as error:
        raise StartFailed(f"{file} cannot be read: {error}") from error
    compiled(source, str)
