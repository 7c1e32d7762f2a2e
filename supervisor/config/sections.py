"""The sections of `cluster.toml` that stand for themselves: nodes, their links, the gateway, and models.

A field is a key of the file, its type has the valid values, and its unit stands in its name. `schema.py` has the
sections of engines and the whole file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, Self, get_args
from urllib.parse import urlsplit

from attrs import Factory, evolve, frozen

from actors.routing.policies.kv.policy import KvSettings
from actors.routing.policies.table import POLICIES
from actors.text.formats.detection import AUTO, NONE
from actors.text.formats.table import REASONING, TOOLS
from protocol.dialects.responses.tools import OtherToolName
from protocol.dialects.targets import TargetMs
from protocol.messages.cluster import PORT
from protocol.messages.engine import HandOff
from protocol.strict.checks import Holds, Matches, OneOf, Within
from protocol.strict.mistakes import Mistake, Mistakes, describe, join, segment
from supervisor.config.keyfile import GrammarName
from supervisor.config.limits import Bytes, ClientLimits, Count, Seconds
from supervisor.config.media import MediaSection
from supervisor.config.pools import GridSections
from supervisor.links.endpoint import Endpoint

NodeName = Annotated[str, Matches(r"[a-z0-9][a-z0-9-]{0,31}", "lower-case letters, digits and dashes")]
COLLECTOR = rf"https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:{PORT})?(/[^\s?#]*)?"
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
PROCESSES_MAX = 64  # of one gateway's node; a process costs memory, and links to all workers
PolicyName = Annotated[str, OneOf(tuple(POLICIES))]
HandOffName = Annotated[str, OneOf((HandOff.CONCURRENT.value, HandOff.SEQUENTIAL.value))]
EncoderName = Annotated[str, OneOf(("tokenizers", "fastokens"))]
ToolsName = Annotated[str, OneOf((AUTO, NONE, *TOOLS))]
ReasoningName = Annotated[str, OneOf((AUTO, NONE, *REASONING))]
WILDCARD_HOSTS = ("0.0.0.0", "::", "")  # noqa: S104  # they are recognised here, not bound


def machine_of(host: str) -> str:
    """Return a machine's name for comparison: `localhost` for every loopback host, else the host in lower case."""
    return "localhost" if host in LOOPBACK_HOSTS else host.lower()


@frozen(kw_only=True)
class NodeSection:
    """`[node.NAME]`: one process with one supervision tree."""

    host: str = "localhost"  # the machine on which the node runs, by its name or address
    # address for other nodes; at every address (`:7400`, or `0.0.0.0:7400` of IPv4 alone) they dial `host`. Without it
    # the node dials all others
    listen: Endpoint | None = None
    # address of the node's own probes and `/metrics`, over plain HTTP; `:7500` is every address. Beyond loopback
    # `/metrics` needs an admin key
    metrics: Endpoint | None = None
    # time for running streams to finish after SIGTERM or `drain`; then they continue on other nodes, or are cut
    drain_s: Seconds = 30.0
    # folder for the output of the node's engines; without it the output is deleted when the node ends
    logs: str | None = None
    # memory for tensors of images and videos, shared by the node with its engines' processes; further tensors wait
    shared_bytes_max: Bytes = 512 * 1024 * 1024
    # longest time without a turn of the event loop; then the launcher kills the node and starts it again
    watchdog_s: Seconds = 30.0

    @property
    def dial_address(self) -> Endpoint | None:
        """The node's address for other nodes: at its host, if it listens at a wildcard. None if it does not listen."""
        if self.listen is not None and self.listen.host in WILDCARD_HOSTS:
            return evolve(self.listen, host=self.host)
        return self.listen


@frozen(kw_only=True)
class ClusterSection:
    """`[cluster]`: how nodes authenticate each other, and the times and limits of their links."""

    name: NodeName = "espalier"  # the cluster, also in certificates as `NODE.NAME`; nodes of another one are refused
    # file with the secret of all nodes, unless `ESPALIER_CLUSTER_SECRET` is set; needed beyond loopback
    secret: str | None = None
    # file with the certificate of this machine's nodes; links use TLS if it is given
    tls_certificate: str | None = None
    tls_key: str | None = None  # file with the key of that certificate
    tls_authority: str | None = None  # file with the authority behind the certificates of other nodes
    # names in a certificate: the dialed host, or also the node itself
    tls_names: Literal["hosts", "nodes"] = "hosts"
    # addresses of nodes of a running cluster outside this file, as `--join HOST:PORT`
    join: tuple[Endpoint, ...] = ()
    # large tensors between nodes: `attached` to their messages; or by `nixl`, an extra of the package, which reads them
    # from the memory of the other node where its network lets it
    tensors: Literal["attached", "nixl"] = "attached"
    streams_max: Count = 1024  # open streams of one node at another; further requests wait
    heartbeat_s: Seconds = 1.0  # time between two heartbeats on an idle link
    # time without a frame, then a node gets no new request, and is lost unless its kernel answers
    silent_s: Seconds = 3.0
    stalled_s: Seconds = 15.0  # time without a frame, then a node is lost although its kernel answers

    @property
    def verifies_node_names(self) -> bool:
        """Whether nodes must present certificates that name them."""
        return self.tls_names == "nodes"


@frozen(kw_only=True)
class GatewaySection:
    """`[gateway]`: the server for clients and its admission."""

    node: NodeName | None = None  # the node that has the gateway; by default `main`
    # nodes that have a gateway each, in place of `node`; those of one machine share the port
    nodes: Annotated[tuple[NodeName, ...], Holds(1)] = ()
    # processes of each of these nodes, behind one port
    processes: Annotated[int, Within(at_least=1, at_most=PROCESSES_MAX)] = 1
    host: str = "127.0.0.1"  # address for clients, empty for every one; any but loopback needs client keys
    port: Annotated[int, Within(at_least=0, at_most=65535)] = 8000  # port for clients; 0 takes a free one
    # names of the server in `Host`; by default the loopback names, and `host`
    allowed_hosts: tuple[str, ...] = ()
    # origins of web pages that may use the server, such as `http://localhost:3000`; `*` is any; its own always may
    allowed_origins: tuple[str, ...] = ()
    # kinds of grammars that a request may use if its key lists none
    grammars: tuple[GrammarName, ...] = get_args(GrammarName)
    # types of tools of other servers, such as `web_search`, that are left out of a request of Responses; the others are
    # refused
    leave_out_tools: tuple[OtherToolName, ...] = ()
    keys: str | None = None  # file of client keys
    tls_certificate: str | None = None  # file with the certificate for clients; it turns TLS on
    tls_key: str | None = None  # file with the key of that certificate
    requests_max: Count = 256  # generations at a time; a request takes one for each prompt, times its `n` or `best_of`
    # requests that wait for admission; when it is full, the key with the most of them loses its last one (`overloaded`)
    waiting_max: Count = 256
    admit_s: Seconds = 5.0  # longest wait for admission; then the request gets `overloaded`
    # longest time from a request's arrival to its first token, all waits included; then `deadline_exceeded`
    first_token_s: Seconds = 120.0
    total_s: Seconds = 900.0  # longest time from a request's arrival to the end of its answer; then `deadline_exceeded`
    # silence of a stream over HTTP after which a comment keeps its connection open; 0 turns comments and pings off
    keepalive_s: Annotated[float, Within(at_least=0, at_most=1_000_000)] = 15.0
    # most prompt tokens of a request, for every model; longer prompts are refused
    prompt_tokens_max: Count = 262_144
    limits: ClientLimits = ClientLimits()
    media: MediaSection = MediaSection()


@frozen(kw_only=True)
class TracingSection:
    """`[tracing]`: the export of traces to a collector of OpenTelemetry."""

    # URL of the collector, for OTLP over HTTP with protobuf, such as `http://127.0.0.1:4318/v1/traces`, which is also
    # the path where the URL has none; without it nothing is exported
    endpoint: Annotated[str, Matches(COLLECTOR, "a URL like http://127.0.0.1:4318/v1/traces")] | None = None
    # share of the traces that begin at a gateway; of a trace that a client has begun, its `traceparent` decides
    ratio: Annotated[float, Within(at_least=0, at_most=1)] = 1.0
    # spans of a node that wait for the collector; further ones are dropped
    spans_max: Annotated[int, Within(at_least=1, at_most=1_000_000)] = 4096
    # whether SGLang exports its own spans of the same traces there, too; by the extra `tracing` of the package
    engines: bool = False

    @property
    def url(self) -> str | None:
        """The URL of the collector with its path."""
        if self.endpoint is None:
            return None
        return self.endpoint if urlsplit(self.endpoint).path.strip("/") else f"{self.endpoint.rstrip('/')}/v1/traces"


@frozen(kw_only=True)
class TemplateSection:
    """`[model.NAME.template]`: the chat template, and its variables; `template = "FILE"` sets its file alone."""

    value_types: ClassVar[tuple[type, ...]] = (dict,)

    file: str | None = None  # file with a chat template in place of the model's own
    # the template for all requests where there are several; by default `tool_use` for those with tools, else `default`
    name: str | None = None
    # a variable that the template reads, such as `enable_thinking`, unless a request sets it
    variables: Mapping[str, object] = Factory(dict)

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Return the section of a table of the file; raises `Mistakes`."""
        assert isinstance(value, dict)
        texts = {key: value[key] for key in ("file", "name") if key in value}
        variables = {key: inner for key, inner in value.items() if key not in texts}
        mistakes = [
            Mistake(key, f"expected a string, got {describe(inner)}")
            for key, inner in texts.items()
            if not isinstance(inner, str)
        ]
        mistakes += [mistake for key, inner in variables.items() for mistake in _not_json(inner, segment(key))]
        if mistakes:
            raise Mistakes(tuple(mistakes))
        return cls(**texts, variables=variables)


def _not_json(value: object, path: str) -> Iterator[Mistake]:
    """Yield a mistake for each date and each time: no request could send one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _not_json(inner, join(path, segment(key)))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _not_json(inner, f"{path}[{number}]")
    elif not isinstance(value, str | int | float):
        yield Mistake(path, f"expected a string, a number, true or false, a list or an object, got {describe(value)}")


@frozen(kw_only=True)
class ModelSection:
    """`[model.NAME]`: a model, with its name for clients."""

    path: Annotated[str, Holds(1)]  # folder with the model's configuration, tokenizer and weights
    template: str | TemplateSection = TemplateSection()
    # the chat template for all requests where there are several; by default `tool_use` for those with tools, else
    # `default`
    template_name: str | None = None
    tools: ToolsName = AUTO  # format of its calls of tools: `auto`, found in its chat template; `none`; or a name
    reasoning: ReasoningName = AUTO  # format of its reasoning, in the same way
    # encoder of its texts: `tokenizers`; or `fastokens`, which is quicker and an extra of the package, and has to agree
    # with `tokenizers` on trial texts when the model is loaded
    tokenizer: EncoderName = "tokenizers"
    # memory of a gateway's process for the token ids of conversations, so that a turn costs what is new in it; 0: none
    prompt_cache_bytes_max: Annotated[int, Within(at_least=0, at_most=2**50)] = 256 * 1024 * 1024
    queue_max: Count = 64  # requests that wait for a worker; further ones get `overloaded`
    # choice of a worker: `least_loaded`; `random_two`, the less loaded of two drawn at random; `round_robin`;
    # `session`, the worker of the session's last request while it has room; `kv`, by the contents of prefix caches and
    # the queued tokens
    policy: PolicyName = "least_loaded"
    # order in which a pair of engines is asked: `concurrent`, both at once; or `sequential`, the prefill first, and the
    # decode once the prompt is computed; by default the engines' own, which is `concurrent` for `sglang`
    hand_off: HandOffName | None = None
    # prompts with fewer tokens skip a remote prefill
    prefill_tokens_min: Annotated[int, Within(at_least=0, at_most=1_000_000_000)] = 0
    # continuations of a request on another worker after the loss of its own; then it fails
    resumes_max: Annotated[int, Within(at_least=0, at_most=1_000)] = 3
    resume_s: Seconds = 10.0  # longest search for another worker after such a loss
    kv: KvSettings = KvSettings()
    # target of the first token, unless body, headers or key of a request have one; by default the middle of the grid
    ttft_target_ms: TargetMs | None = None
    itl_target_ms: TargetMs | None = None  # target between two tokens, in the same way
    grid: GridSections = GridSections()

    @property
    def chat_template(self) -> TemplateSection:
        """The section of its chat template, whose file may stand in place of the whole section."""
        section = TemplateSection(file=self.template) if isinstance(self.template, str) else self.template
        return section if self.template_name is None else evolve(section, name=self.template_name)

    @property
    def template_file_key(self) -> str:
        """The path of the key that names the file of its chat template."""
        return "template" if isinstance(self.template, str) else "template.file"

    @property
    def template_name_key(self) -> str:
        """The path of the key that chooses one of several chat templates."""
        return "template_name" if isinstance(self.template, str) or self.template.name is None else "template.name"

    @property
    def follows_blocks(self) -> bool:
        """Whether its policy looks for blocks of prompts in the prefix caches of workers."""
        return POLICIES[self.policy].follows_blocks
