"""The children of each model on the gateway's node: a router to its workers, and a processor of its text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import trio
from attrs import define, field, frozen

from actors.kit.calls import Address, mailbox
from actors.kit.direct import DirectAddress, DirectCalls
from actors.processor import TextReply, TextRequest, TextResult, processor
from actors.routing.policies.kv.index import PrefixIndex
from actors.routing.policies.kv.policy import KvPolicy
from actors.routing.policies.kv.subscriber import PrefixSubscriber
from actors.routing.policies.table import POLICIES, PolicyContext
from actors.routing.pools.service_levels import ServiceLevels
from actors.routing.routing import Routing
from actors.text.limits import PromptLimits
from actors.text.model import TextModel
from protocol.messages.generation import Finished, Generate, Started, Tokens
from supervisor.cluster import models
from supervisor.cluster.directory import Directory
from supervisor.cluster.pool import WorkerPool
from supervisor.config.schema import Cluster
from supervisor.config.sections import ModelSection
from supervisor.engines.grammar_checks import check_grammar
from supervisor.engines.kinds import hand_offs
from supervisor.engines.work import request_inbox
from supervisor.gateway.requests import ServedModel
from supervisor.node import router_child
from supervisor.node.media_child import MediaChildren
from supervisor.node.pools import PoolView, service_levels
from supervisor.node.vision import processor_vision
from supervisor.observers import RoutingMetrics
from supervisor.runtime import Runtime
from supervisor.supervision.tree import Child, Tree


@define(eq=False)
class ModelRouters:
    """The parts of each model's router that gauges and the status of a node read."""

    routings: dict[str, Routing] = field(factory=dict)  # by model
    policies: dict[str, PolicyContext] = field(factory=dict)  # what a policy of each model is made of
    subscribers: dict[str, PrefixSubscriber] = field(factory=dict)  # to the workers of each model


@frozen
class Models:
    """The models that a gateway serves, and the children that serve them."""

    served: Mapping[str, ServedModel]
    children: tuple[Child | Tree, ...]


def model_children(
    cluster: Cluster,
    texts: Mapping[str, TextModel],
    directory: Directory,
    runtime: Runtime,
    routers: ModelRouters,
    media: MediaChildren,
    pools: PoolView,
) -> Models:
    """Return the models of the cluster and their children; adds their routings to `routers`, and to `pools`.

    Without a media actor, no model takes images or videos.
    """
    served: dict[str, ServedModel] = {}
    children: list[Child | Tree] = []
    for name in cluster.model:
        levels = pools.levels[name] = service_levels(cluster, name)
        work, work_inbox = request_inbox(cluster.model[name].queue_max, levels.group)
        pools.inboxes[name] = work_inbox
        routed: DirectCalls[Generate, Started | Tokens, Finished] = DirectCalls(work_inbox.pass_by)
        requests: Address[TextRequest, TextReply, TextResult]
        requests, requests_inbox = mailbox(cluster.gateway.requests_max)
        processed: DirectCalls[TextRequest, TextReply, TextResult] = DirectCalls()
        context = routers.policies[name] = _policy_context(cluster.model[name], runtime)
        routing = _routing(cluster, name, texts[name], directory, runtime, context, levels)
        routers.routings[name] = routing
        uses_blocks = partial(_uses_blocks, routing)
        subscriber = PrefixSubscriber(WorkerPool(directory, name), context.index, uses_blocks)
        routers.subscribers[name] = subscriber
        served[name] = ServedModel(
            partial(models.model_object, name, directory, int(runtime.now())),
            DirectAddress(requests.inbox, processed),
            partial(models.request_tokens_max, directory, name),
        )
        limits = partial(_prompt_limits, directory, name, routers, cluster.gateway.prompt_tokens_max)
        check = partial(check_grammar, directory, runtime.run_in_thread, name)
        limit = cluster.gateway.requests_max
        vision = processor_vision(cluster, name, texts[name], directory, runtime, media)
        children += (
            router_child.child(name, cluster.model[name], work_inbox, routing, routed),
            router_child.subscriber_child(name, context.index, subscriber),
            Child(
                name=f"processor-{name.replace('/', ':')}",
                run=processor,
                args=(
                    *(requests_inbox, texts[name], DirectAddress(work.inbox, routed), limits, runtime.run_in_thread),
                    *(limit, check, processed, vision),
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
        new_number=runtime.new_number,
        new_id=runtime.new_id,
        prefill_tokens_min=section.prefill_tokens_min,
        ends=text.eos_token_ids,
        observer=RoutingMetrics(runtime.metrics, name, levels),
        ranked=partial(directory.ranked, name),
        levels=levels,
        ranked_among=partial(directory.ranked, name),
        clock=trio.current_time,
        hand_offs=hand_offs(),
    )


def _policy_context(section: ModelSection, runtime: Runtime) -> PolicyContext:
    chance = runtime.chance(runtime.new_number())  # routers of two nodes must not draw the same
    return PolicyContext(chance.random, trio.current_time, section.kv, PrefixIndex(section.kv.blocks_max))


def _uses_blocks(routing: Routing) -> bool:
    return isinstance(routing.policy, KvPolicy)


def _prompt_limits(
    directory: Directory, model: str, routers: ModelRouters, prompt_tokens_max: int
) -> PromptLimits | None:
    by_blocks = _uses_blocks(routers.routings[model])
    return models.request_limits(directory, model, prompt_tokens_max, by_blocks=by_blocks)
