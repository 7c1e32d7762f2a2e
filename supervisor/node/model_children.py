"""The models of a gateway's node: for each the router to its workers, the feed of its policy, and the processor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial

import trio
from attrs import frozen

from actors.kit.calls import Address, mailbox
from actors.kit.direct import DirectAddress, DirectCalls
from actors.processor import TextReply, TextRequest, TextResult, processor
from actors.routing.policies.feed import Feed
from actors.routing.policies.row import MadePolicy, PolicyContext
from actors.routing.policies.table import POLICIES
from actors.routing.pools.service_levels import ServiceLevels
from actors.routing.routing import Routing
from actors.text.model import TextModel
from actors.text.prompt_cache import PromptCache
from protocol.messages.generation import Finished, Generate, Started, Tokens
from supervisor.cluster import models
from supervisor.cluster.model_pool import ModelPool
from supervisor.engines.engine_grammars import EngineGrammars
from supervisor.engines.grammar_checks import check_grammar
from supervisor.engines.kind import NodeContext
from supervisor.engines.kinds import hand_offs
from supervisor.engines.work import RequestInbox, request_inbox
from supervisor.gateway.requests import ServedModel
from supervisor.node import router_child
from supervisor.node.credentials import Credentials
from supervisor.node.media_child import MediaChildren
from supervisor.node.pools import PoolView, service_levels
from supervisor.node.vision import processor_vision
from supervisor.observers import RoutingMetrics
from supervisor.supervision.tree import Child, Tree
from supervisor.threads.text_threads import new_lock


@frozen(kw_only=True)
class RoutedModel:
    """One model of a gateway's node: how clients ask it, how its requests are routed, and the children for that."""

    served: ServedModel
    levels: ServiceLevels
    prompt_cache: PromptCache
    inbox: RequestInbox  # of the router
    routing: Routing
    feed: Feed | None
    children: tuple[Child | Tree, ...]


def routed_models(
    context: NodeContext, texts: Mapping[str, TextModel], media: MediaChildren, credentials: Credentials
) -> Mapping[str, RoutedModel]:
    """Return every model of answers by its name; without a media actor, none takes images or videos.

    The number of client keys decides whether one key leaves slots of a model to others.
    """
    kept_slots = partial(credentials.kept_slots, context.cluster.gateway.limits)
    return {name: _routed_model(context, name, texts[name], media, kept_slots) for name in texts}


def pool_view(context: NodeContext, models: Mapping[str, RoutedModel]) -> PoolView:
    """Return the pools of all models."""
    return PoolView(
        cluster=context.cluster,
        directory=context.directory,
        levels={name: model.levels for name, model in models.items()},
        inboxes={name: model.inbox for name, model in models.items()},
    )


def _routed_model(
    context: NodeContext, name: str, text: TextModel, media: MediaChildren, kept_slots: Callable[[], int]
) -> RoutedModel:
    cluster, directory, runtime = context.cluster, context.directory, context.runtime
    section = cluster.model[name]
    levels, made = service_levels(cluster, name), _policy(context, name)
    prompt_cache = PromptCache(section.prompt_cache_bytes_max, new_lock())
    work, work_inbox = request_inbox(section.queue_max, partial(waiting_group, levels))
    routed: DirectCalls[Generate, Started | Tokens, Finished] = DirectCalls(work_inbox.pass_by)
    requests: Address[TextRequest, TextReply, TextResult]
    requests, requests_inbox = mailbox(cluster.gateway.requests_max)
    processed: DirectCalls[TextRequest, TextReply, TextResult] = DirectCalls()
    routing = _routing(context, name, text, made, levels, kept_slots)
    limits = partial(
        models.request_limits,
        directory,
        name,
        cluster.gateway.prompt_tokens_max,
        by_blocks=section.follows_blocks,
    )
    limit = cluster.gateway.requests_max
    processor_child = Child(
        name=f"processor-{name.replace('/', ':')}",
        run=processor,
        args=(
            requests_inbox,
            text,
            DirectAddress(work.inbox, routed),
            limits,
            runtime.run_in_thread,
            limit,
            partial(check_grammar, directory, EngineGrammars(runtime.run_in_thread), name),
            processed,
            processor_vision(cluster, name, text, directory, runtime, media),
            prompt_cache,
        ),
        about=f"conversations to tokens and back, for {name}",
        limits=(("requests", limit),),
    )
    return RoutedModel(
        served=ServedModel(
            partial(models.model_object, name, directory, int(runtime.now())),
            DirectAddress(requests.inbox, processed),
            partial(models.request_tokens_max, directory, name),
            section.grid.targets,
            partial(models.adapters, directory, name),
        ),
        levels=levels,
        prompt_cache=prompt_cache,
        inbox=work_inbox,
        routing=routing,
        feed=made.feed,
        children=(
            router_child.child(name, section, work_inbox, routing, routed),
            *_feed_children(name, section.policy, made.feed),
            processor_child,
        ),
    )


def _feed_children(name: str, policy: str, feed: Feed | None) -> tuple[Tree, ...]:
    return () if feed is None else (router_child.feed_child(name, POLICIES[policy].feed_name, feed),)


def waiting_group(levels: ServiceLevels, request: Generate) -> Hashable:
    """Return what a request waits for: its pools, and workers with its adapter if it has one."""
    group = levels.group(request)
    return group if request.adapter is None else (*group, request.adapter)


def _policy(context: NodeContext, name: str) -> MadePolicy:
    section, runtime = context.cluster.model[name], context.runtime
    chance = runtime.chance(runtime.new_number())  # routers of two nodes must not draw the same
    return POLICIES[section.policy].make(
        PolicyContext(
            chance=chance.random, now=trio.current_time, pool=ModelPool(context.directory, name), kv=section.kv
        )
    )


def _routing(
    context: NodeContext,
    name: str,
    text: TextModel,
    made: MadePolicy,
    levels: ServiceLevels,
    kept_slots: Callable[[], int],
) -> Routing:
    section, directory, runtime = context.cluster.model[name], context.directory, context.runtime
    return Routing(
        pool=ModelPool(directory, name),
        policy=made.policy,
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
        kept_slots=kept_slots,
        spans=runtime.spans,
    )
