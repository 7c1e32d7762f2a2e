"""The children of each model on the gateway's node: a router to its workers, and a processor of its text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from attrs import define, field, frozen

from actors.kit.calls import Address, mailbox
from actors.kit.direct import DirectAddress, DirectCalls
from actors.processor import TextReply, TextRequest, TextResult, processor
from actors.routing.policies import POLICIES, PolicyContext
from actors.routing.routing import Routing
from actors.routing.service_levels import ServiceLevels
from actors.text.model import TextModel
from actors.text.prompts import PromptLimits
from protocol.messages import Finished, Generate, Started, Tokens
from supervisor.cluster import models
from supervisor.cluster.directory import Directory
from supervisor.cluster.pool import WorkerPool
from supervisor.config.schema import Cluster
from supervisor.engines.grammar_checks import check_grammar
from supervisor.engines.work import request_inbox
from supervisor.gateway.requests import ServedModel
from supervisor.node import router_child
from supervisor.node.media_child import MediaChildren
from supervisor.node.pools import PoolView, service_levels
from supervisor.node.vision import processor_vision
from supervisor.observers import RoutingMetrics
from supervisor.runtime import Runtime
from supervisor.supervision.tree import Child


@define(eq=False)
class Reloadable:
    """The settings of requests that a reload may change, for requests that come later."""

    prompt_tokens_max: int
    routings: dict[str, Routing] = field(factory=dict)  # by model
    policies: dict[str, PolicyContext] = field(factory=dict)  # what a policy of each model is made of


@frozen
class Models:
    """The models that a gateway serves, and the children that serve them."""

    served: Mapping[str, ServedModel]
    children: tuple[Child, ...]


def model_children(
    cluster: Cluster,
    texts: Mapping[str, TextModel],
    directory: Directory,
    runtime: Runtime,
    reloadable: Reloadable,
    media: MediaChildren,
    pools: PoolView,
) -> Models:
    """Return the models of the cluster and their children; adds their routings to `reloadable`, and to `pools`.

    Without a media actor, no model takes images or videos.
    """
    served: dict[str, ServedModel] = {}
    children: list[Child] = []
    for name in cluster.model:
        levels = pools.levels[name] = service_levels(cluster, name)
        work, work_inbox = request_inbox(cluster.model[name].queue_max, levels.group)
        pools.inboxes[name] = work_inbox
        routed: DirectCalls[Generate, Started | Tokens, Finished] = DirectCalls(work_inbox.pass_by)
        requests: Address[TextRequest, TextReply, TextResult]
        requests, requests_inbox = mailbox(cluster.gateway.requests_max)
        processed: DirectCalls[TextRequest, TextReply, TextResult] = DirectCalls()
        context = reloadable.policies[name] = PolicyContext(runtime.chance(runtime.new_room()).random)
        routing = _routing(cluster, name, texts[name], directory, runtime, context, levels)
        reloadable.routings[name] = routing
        served[name] = ServedModel(
            partial(models.model_object, name, directory, int(runtime.now())),
            DirectAddress(requests.inbox, processed),
            partial(models.request_tokens_max, directory, name),
        )
        limits = partial(_prompt_limits, directory, name, reloadable)
        check = partial(check_grammar, directory, runtime.run_in_thread, name)
        limit = cluster.gateway.requests_max
        vision = processor_vision(cluster, name, texts[name], directory, runtime, media)
        children += (
            router_child.child(name, cluster.model[name], work_inbox, routing, routed),
            Child(
                name=f"processor-{name.replace('/', ':')}",
                run=processor,
                args=(
                    *(requests_inbox, texts[name], DirectAddress(work.inbox, routed), limits, runtime.run_in_thread),
                    *(limit, cluster.gateway.text.tokenize_tokens_max, check, processed, vision),
                ),
                about=f"conversations to tokens and back, for {name}",
                limits=(("requests", limit),),
            ),
        )
    return Models(served, tuple(children))


def _routing(
    cluster: Cluster,
    name: str,
    text: TextModel,
    directory: Directory,
    runtime: Runtime,
    context: PolicyContext,
    levels: ServiceLevels,
) -> Routing:
    section = cluster.model[name]
    return Routing(
        pool=WorkerPool(directory, name),
        policy=POLICIES[section.policy](context),
        limits=router_child.limits(section),
        new_room=runtime.new_room,
        new_id=runtime.new_id,
        prefill_tokens_min=section.prefill_tokens_min,
        ends=text.eos_token_ids,
        observer=RoutingMetrics(runtime.metrics, name, levels),
        ranked=partial(directory.ranked, name),
        levels=levels,
        ranked_among=partial(directory.ranked, name),
    )


def _prompt_limits(directory: Directory, model: str, reloadable: Reloadable) -> PromptLimits | None:
    return models.request_limits(directory, model, reloadable.prompt_tokens_max)
