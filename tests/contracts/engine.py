"""The contract of every engine, checked on the engine that is given: simulated or real, in virtual or real time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from hashlib import sha256
from itertools import count
from math import exp, nan, prod
from random import Random
from typing import Any

import pytest
import trio
from attrs import evolve

from actors.engines.port import Engine, Generation
from protocol.errors import (
    AdapterNotLoaded,
    BadRequest,
    ContextTooLong,
    NotReady,
    Overloaded,
    RequestError,
    Unsupported,
)
from protocol.messages.adapters import Adapter, AdapterList, ListAdapters, LoadAdapter, UnloadAdapter
from protocol.messages.engine import EngineLoad, HandOff
from protocol.messages.generation import (
    REQUEST_ID_LENGTH,
    Finished,
    FinishReason,
    Generate,
    Grammar,
    GrammarKind,
    Logprob,
    Sampling,
    Started,
    Tokens,
    Usage,
)
from protocol.messages.leaving import MemoryTag, RunningRequests
from protocol.messages.media import MediaForm, MediaItem, Modality, grid_tokens
from protocol.messages.memory import MemoryState, ReleaseMemory, ResumeMemory
from protocol.messages.operations import OPERATIONS, FlushCache
from protocol.tenants import tenant_salt
from protocol.tensors import BYTES, NO_TENSOR, Dtype, Tensor
from protocol.token_ids import IDS_MAX, TokenIds
from tests.contracts import experts, profile, versions
from tests.contracts.weights import (
    keeps_the_order_of_weight_updates,
    refuses_weights_of_no_folder,
    serves_on_after_a_session_that_a_checksum_refuses,
)
from tests.rig.adapters import tiny_adapter

RELEASED_WITHIN_S = 30.0
ANSWERED_WITHIN_S = 300.0
TRIES = 5  # to leave before the end of an answer
LONG = 128  # tokens: far more than any check lets an answer have before it leaves
LARGE_PROMPT = 1024  # tokens: of two videos
PATCH = 14  # the side of a patch, in pixels, of the models that take them
PROMPTS_MAX = 200  # of which the model answers one at least without ending by itself

MakeEngine = Callable[[], AbstractAsyncContextManager[Engine]]

_numbers = count(1)


def new_id() -> str:
    """Return a new request id; all of them share a long prefix."""
    return f"{next(_numbers):0{REQUEST_ID_LENGTH}x}"


def request(engine: Engine, tokens_max: int = 8, prompt: int = 5, **sampling: Any) -> Generate:
    """Return a greedy request whose prompt differs from the last one's, so that no cache holds it."""
    request_id = new_id()
    start, most = int(request_id, 16), engine.info.vocabulary_size
    tokens = [(start * 31 + place * 7) % most for place in range(prompt)]
    tokens = [token if token not in placeholders(engine) else (token + 2) % most for token in tokens]
    sampling = {"temperature": 0.0, "ignore_eos": True} | sampling
    return Generate(request_id, TokenIds.of(tokens), Sampling(tokens_max, **sampling))


def placeholders(engine: Engine) -> set[int]:
    """Return the tokens that stand for images and videos, which no text has."""
    media = engine.info.media
    tokens = set() if media is None else {media.image_token, media.video_token}
    return {token for token in tokens if token is not None}


def modalities(engine: Engine) -> list[Modality]:
    """Return the kinds of items that an engine takes."""
    media = engine.info.media
    return [] if media is None else [each for each in Modality if media.placeholder(each) is not None]


def item(engine: Engine, modality: Modality) -> MediaItem:
    """Return a new item as the engine takes it; two images of it differ."""
    media, form = engine.info.media, engine.info.media_form
    assert media is not None
    assert form is not None
    number, frames = next(_numbers), 2 if modality is Modality.VIDEO else 1
    chance, side = Random(number), 2 * media.merge
    if form is MediaForm.PIXELS and frames > 1 and engine.info.request_tokens_max > LARGE_PROMPT:
        side = 24  # real models enlarge smaller frames
    grid = (frames, side, side)
    tokens = grid_tokens(grid, media.merge)
    if form is MediaForm.PIXELS:
        shape = (frames**2, side * PATCH, side * PATCH, 3)  # a patch of a video has two frames
        data = Tensor(Dtype.UINT8, shape, memoryview(chance.randbytes(prod(shape))))
    elif form is MediaForm.EMBEDDINGS:
        size, elements = BYTES[media.dtype], bytearray(chance.randbytes(tokens * media.width * BYTES[media.dtype]))
        elements[size - 1 :: size] = bytes(byte & 0x80 | 0x3C for byte in elements[size - 1 :: size])  # small numbers
        data = Tensor(media.dtype, (tokens, media.width), memoryview(elements))
    else:
        data = NO_TENSOR
    seconds = 1.0 if modality is Modality.VIDEO else None
    return MediaItem(modality, sha256(str(number).encode()).hexdigest(), grid, tokens, form, data, seconds)


def about(engine: Engine, *items: MediaItem, text: int = 3, tokens_max: int = 4) -> Generate:
    """Return a request with `text` tokens before its items and twice as many behind them."""
    asked, media = request(engine, tokens_max, 3 * text), engine.info.media
    assert media is not None
    places: list[int] = []
    for each in items:
        places += [] if media.start_token is None else [media.start_token]
        places += [media.placeholder(each.modality) or 0] * each.tokens
    return evolve(asked, tokens=TokenIds.of([*asked.tokens[:text], *places, *asked.tokens[text:]]), media=items)


async def check_engine(make_engine: MakeEngine) -> None:
    """Check one engine against the port; each check leaves it as idle as it found it."""
    async with make_engine() as engine:
        assert engine.info.running_max >= 2, "the checks need an engine with two slots at least"
        await at_rest(engine)
        for check in (*CHECKS, *profile.CHECKS, *experts.CHECKS, *versions.CHECKS):
            try:
                await check(engine)
                await at_rest(engine)
            except BaseException as error:
                error.add_note(f"while checking: {check.__name__}")
                raise


async def check_short_memory(engine: Engine) -> None:
    """Check the order of requests in an engine whose memory is enough for two of those of the lower priority.

    A request that is put back has the same answer as one that is not.
    """
    assert 400 <= engine.info.kv_tokens_max <= 600
    low = [evolve(request(engine, 200), priority=-1) for _ in range(4)]
    undisturbed = [(await complete(engine, wanted))[0] for wanted in low]
    answers, order = dict[str, list[int]](), list[str]()

    async def ask(wanted: Generate) -> None:
        answers[wanted.id], _ = await complete(engine, wanted)
        order.append(wanted.id)

    again = [evolve(wanted, id=new_id()) for wanted in low]
    large, small = request(engine, 4, 350), request(engine, 4)
    async with trio.open_nursery() as nursery:
        for wanted in again:
            nursery.start_soon(ask, wanted)
        while (load := await engine.load()).kv_tokens_used < 60:  # noqa: ASYNC110  # it can only be asked
            await trio.sleep(0.01)
        assert load.waiting, "not all have memory"
        nursery.start_soon(ask, large)
        nursery.start_soon(ask, small)
    # Those that ran may end first, on a busy machine; those that waited may not.
    assert {large.id, small.id} <= set(order[:4]), "the higher priority goes first"
    assert [answers[wanted.id] for wanted in again] == undisturbed, "what is put back goes on from where it was"


async def at_rest(engine: Engine) -> None:
    """Wait until the engine reports that it holds nothing."""
    load = None
    with trio.move_on_after(RELEASED_WITHIN_S):
        while (load := await engine.load()) != EngineLoad(0, 0, 0):  # noqa: ASYNC110  # it can only be asked
            await trio.sleep(0.05)
    assert load == EngineLoad(0, 0, 0), f"an idle engine holds {load}"


@asynccontextmanager
async def slot(engine: Engine, wanted: Generate) -> AsyncIterator[Generation]:
    """Hold a slot for the body, as `actors.decode` does."""
    generation = engine.submit(wanted)
    try:
        yield generation
    finally:
        engine.abort(wanted.id)
        with trio.move_on_after(RELEASED_WITHIN_S, shield=True) as waiting:
            await engine.wait_released(wanted.id)
        assert not waiting.cancelled_caught, "it kept its slot"
        assert generation.over.is_set(), "a released answer is over"


async def read(generation: Generation) -> tuple[list[int], Finished]:
    """Read an answer to its good end, checking its shape on the way."""
    ids: list[int] = []
    with trio.fail_after(ANSWERED_WITHIN_S):
        promised, begun = generation.credit, False
        async for reply in generation:
            match reply:
                case Started():
                    assert not begun, "an answer starts once"
                    begun = True
                case Tokens():
                    assert begun, "Started comes before the first token"
                    assert reply.ids or reply.version, "no empty replies"
                    ids += reply.ids
        assert generation.over.is_set()
        finished = await generation.result()
    assert isinstance(finished, Finished)
    assert promised >= 0, "what was promised is a number of tokens"
    return ids, finished


async def read_on(generation: Generation) -> tuple[list[int], Finished]:
    """Read an answer whose `Started` has been read already to its good end."""
    ids: list[int] = []
    with trio.fail_after(ANSWERED_WITHIN_S):
        async for reply in generation:
            assert isinstance(reply, Tokens), "an answer starts once"
            assert len(reply.logprobs) == len(reply.ids)
            ids += reply.ids
        finished = await generation.result()
    assert isinstance(finished, Finished)
    return ids, finished


async def complete(engine: Engine, wanted: Generate) -> tuple[list[int], Finished]:
    """Ask for one complete answer, and check its usage and its credit."""
    async with slot(engine, wanted) as generation:
        assert generation.credit <= wanted.sampling.tokens_max
        ids, finished = await read(generation)
        assert generation.credit == wanted.sampling.tokens_max - len(ids), "one unit of credit a token"
    cached = finished.usage.cached_tokens
    assert finished.usage == Usage(len(wanted.tokens), len(ids), cached), "usage counts what was delivered"
    assert 0 <= cached <= len(wanted.tokens)
    assert all(0 <= token < engine.info.vocabulary_size for token in ids)
    return ids, finished


async def serves_on(engine: Engine) -> None:
    """Ask for a small answer, and check that it comes."""
    ids, finished = await complete(engine, request(engine, 2))
    assert (len(ids), finished.reason) == (2, FinishReason.LENGTH)


async def leave(engine: Engine, wanted: Generate, generation: Generation) -> bool:
    """Abort and wait; check that the answer is over and does not look complete.

    Returns False if the engine had computed the whole answer before it received the abort.
    """
    engine.abort(wanted.id)
    with trio.fail_after(RELEASED_WITHIN_S):
        await engine.wait_released(wanted.id)
    assert generation.over.is_set()
    try:
        finished = await generation.result()
    except RequestError:
        return True
    assert isinstance(finished, Finished)
    assert finished.usage.completion_tokens == wanted.sampling.tokens_max
    return False


async def leave_in_time(submit_and_leave: Callable[[], Awaitable[bool]]) -> None:
    """Try until an abort comes before the end of the answer: a busy machine may let this process stand still."""
    for _ in range(TRIES):
        if await submit_and_leave():
            return
    pytest.fail(f"each of {TRIES} answers was whole before its abort")


# The promises, one by one ----------------------------------------------------------------


async def ends_with_length_at_tokens_max(engine: Engine) -> None:
    for tokens_max in (1, 2, 9):
        ids, finished = await complete(engine, request(engine, tokens_max))
        assert (len(ids), finished.reason, finished.matched) == (tokens_max, FinishReason.LENGTH, None)


async def ends_with_stop_at_a_stop_token(engine: Engine) -> None:
    for _ in range(PROMPTS_MAX):
        wanted = request(engine, 12, ignore_eos=False)
        ids, finished = await complete(engine, wanted)
        if finished.reason is FinishReason.LENGTH:  # a model that ends by itself would do so before the stop token
            break
    else:
        pytest.fail(f"with ignore_eos=False none of {PROMPTS_MAX} answers of 12 tokens reaches its limit")
    place = max(ids.index(token) for token in ids)  # the last token that is new where it stands
    sampling = Sampling(12, temperature=0.0, stop_token_ids=(ids[place],))  # ignore_eos would ignore it
    got, finished = await complete(engine, Generate(new_id(), wanted.tokens, sampling))
    assert got == ids[: place + 1], "the stop token is the last that is delivered"
    assert (finished.reason, finished.matched) == (FinishReason.STOP, ids[place])


async def ends_with_no_stop_before_tokens_min(engine: Engine) -> None:
    for _ in range(5):
        ids, finished = await complete(engine, request(engine, 12, tokens_min=12, ignore_eos=False))
        assert (len(ids), finished.reason) == (12, FinishReason.LENGTH)


async def continues_an_answer_behind_resumed_tokens(engine: Engine) -> None:
    same = []
    for resumed in (1, 7) * 5:
        wanted = request(engine, 12)
        whole, _ = await complete(engine, wanted)
        sampling = evolve(wanted.sampling, tokens_max=12 - resumed)
        rest, _ = await complete(
            engine,
            Generate(new_id(), TokenIds.of([*wanted.tokens, *whole[:resumed]]), sampling, resumed_tokens=resumed),
        )
        same.append(rest == whole[resumed:])
    # Resumed tokens are computed in other steps than before, and rounded otherwise: in 2 of 100 answers of a model with
    # random weights two tokens are so nearly as likely that the other one comes.
    assert sum(same) >= 7, "an answer does not go on where it was left"


async def answers_an_unread_request_whole(engine: Engine) -> None:
    wanted = request(engine, 16)
    async with slot(engine, wanted) as generation:
        with trio.fail_after(ANSWERED_WITHIN_S):
            await generation.over.wait()
        assert generation.credit == 0
        assert len((await read(generation))[0]) == 16


async def aborts_in_the_turn_of_submit(engine: Engine) -> None:
    wanted = request(engine, LONG)
    generation = engine.submit(wanted)
    assert await leave(engine, wanted, generation)
    assert generation.credit == LONG, "no token was computed for it"


async def aborts_before_the_first_token(engine: Engine) -> None:
    prompt = min(engine.info.request_tokens_max - LONG, 1024)

    async def submit_and_leave(pause_s: float) -> bool:
        wanted = request(engine, LONG, prompt)
        generation = engine.submit(wanted)
        await trio.sleep(pause_s)
        return await leave(engine, wanted, generation)

    for pause_s in (0.0, 0.002, 0.02):
        await leave_in_time(partial(submit_and_leave, pause_s))


async def aborts_in_mid_stream(engine: Engine) -> None:

    async def submit_and_leave(after: int) -> bool:
        wanted = request(engine, LONG)
        generation = engine.submit(wanted)
        got = 0
        with trio.fail_after(ANSWERED_WITHIN_S):
            async for reply in generation:
                got += len(reply.ids) if isinstance(reply, Tokens) else 0
                if got >= after:
                    break
        return await leave(engine, wanted, generation)

    for after in (1, 3):
        await leave_in_time(partial(submit_and_leave, after))


async def aborts_twice_and_again_later(engine: Engine) -> None:
    wanted = request(engine, LONG)
    generation = engine.submit(wanted)
    for _ in range(2):
        engine.abort(wanted.id)
    await trio.lowlevel.checkpoint()
    assert await leave(engine, wanted, generation)
    engine.abort(wanted.id)
    await engine.wait_released(wanted.id)


async def aborts_after_the_end_change_nothing(engine: Engine) -> None:
    wanted = request(engine, 4)
    generation = engine.submit(wanted)
    with trio.fail_after(ANSWERED_WITHIN_S):
        await generation.over.wait()
    engine.abort(wanted.id)
    await engine.wait_released(wanted.id)
    assert len((await read(generation))[0]) == 4
    await serves_on(engine)


async def ignores_unknown_ids(engine: Engine) -> None:
    unknown = "f" * REQUEST_ID_LENGTH
    engine.abort(unknown)
    with trio.fail_after(RELEASED_WITHIN_S):
        await engine.wait_released(unknown)


async def takes_an_id_again_after_its_release(engine: Engine) -> None:
    wanted = request(engine, 4)
    for _ in range(2):
        engine.submit(wanted)
        engine.abort(wanted.id)
        with trio.fail_after(RELEASED_WITHIN_S):
            await engine.wait_released(wanted.id)
    assert len((await complete(engine, wanted))[0]) == 4


async def frees_slots_for_requests_that_wait(engine: Engine) -> None:
    wanted = [request(engine, LONG) for _ in range(engine.info.running_max)]
    for each in wanted:
        engine.submit(each)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serves_on, engine)
        await trio.sleep(0.1)
        for each in wanted:
            engine.abort(each.id)
        with trio.fail_after(RELEASED_WITHIN_S):
            for each in wanted:
                await engine.wait_released(each.id)


async def keeps_requests_apart(engine: Engine) -> None:
    alone = request(engine, 12)
    expected, _ = await complete(engine, alone)
    again = Generate(new_id(), alone.tokens, alone.sampling)
    neighbour = request(engine, LONG)  # its id differs in the last digits only
    assert again.id[:-4] == neighbour.id[:-4]
    leaving = engine.submit(neighbour)
    async with slot(engine, again) as generation:
        ids: list[int] = []
        with trio.fail_after(ANSWERED_WITHIN_S):
            async for reply in generation:
                if isinstance(reply, Tokens):
                    ids += reply.ids
                    engine.abort(neighbour.id)
            finished = await generation.result()
    await leave(engine, neighbour, leaving)
    assert isinstance(finished, Finished)
    assert (ids, finished.reason) == (expected, FinishReason.LENGTH)


async def counts_what_it_holds(engine: Engine) -> None:
    wanted = request(engine, LONG, prompt=20)
    async with slot(engine, wanted) as generation:
        with trio.fail_after(ANSWERED_WITHIN_S):
            await anext(generation)
            load = await engine.load()
            while load.running != 1 or load.kv_tokens_used < 20:
                if generation.over.is_set():
                    break  # too fast to be seen at it
                load = await engine.load()
                await trio.sleep(0.001)
        assert generation.over.is_set() or load.waiting == 0


async def sends_log_probabilities_when_asked(engine: Engine) -> None:
    for top in (0, 3):
        usual_request = request(engine, 6)
        wanted = evolve(usual_request, id=new_id(), logprobs=top)
        logprobs: list[Logprob] = []
        ids: list[int] = []
        async with slot(engine, wanted) as generation:
            with trio.fail_after(ANSWERED_WITHIN_S):
                async for reply in generation:
                    if isinstance(reply, Tokens):
                        assert len(reply.logprobs) == len(reply.ids), "one a token, with the token"
                        ids += reply.ids
                        logprobs += reply.logprobs
        assert len(logprobs) == 6
        for token, each in zip(ids, logprobs, strict=True):
            assert each.logprob <= 0
            assert len(each.top) == top
            values = [value for _, value in each.top]
            assert values == sorted(values, reverse=True), "the likeliest first"
            assert sum(map(exp, values)) <= 1.01
            if top:
                # Logits of two bytes are equal in 3 of 100 tokens: then each of the likeliest may be taken.
                likeliest = [taken for taken, value in each.top if values[0] - value < 1e-3]
                assert token in likeliest or len(likeliest) == top, "no token is likelier than a greedy one"
                assert abs(values[0] - each.logprob) < 1e-3
        assert (await complete(engine, usual_request))[0] == ids, "asking changes nothing"


async def sends_log_probabilities_of_the_prompt_when_asked(engine: Engine) -> None:
    prompt = min(engine.info.request_tokens_max - 16, 700)  # several pieces of a prompt, on most engines
    usual_request = request(engine, 4, prompt)
    usual, _ = await complete(engine, usual_request)
    kept: list[Sequence[float]] = []
    for top, tokens_max, resumed in ((0, 4, 0), (3, 4, 0), (2, 2, 2), (1, 1, 0)):
        sampling = evolve(usual_request.sampling, tokens_max=tokens_max)
        tokens = [*usual_request.tokens, *usual[:resumed]]
        wanted = Generate(
            new_id(),
            TokenIds.of(tokens),
            sampling,
            logprobs=top,
            prompt_logprobs=True,
            resumed_tokens=resumed,
            cached_tokens=prompt,
        )
        async with slot(engine, wanted) as generation:
            with trio.fail_after(ANSWERED_WITHIN_S):
                started = await anext(generation)
            ids, finished = await read_on(generation)
        assert isinstance(started, Started)
        assert started.scores is not None
        assert (started.cached_tokens, finished.usage.cached_tokens) == (0, 0), "it is computed whole"
        started.check_tensors()
        assert started.scores.top_ids.shape == (prompt - 1, top), "the first token has none, nor have resumed ones"
        logprobs = started.scores.logprobs.data.cast("B").cast("f").tolist()
        values = started.scores.top_logprobs.data.cast("B").cast("f").tolist()
        likeliest = started.scores.top_ids.data.cast("B").cast("i").tolist()
        kept.append(logprobs)
        assert max(logprobs) <= 0
        for row in range(prompt - 1):
            own, place = tokens[row + 1], slice(row * top, (row + 1) * top)
            each, best = likeliest[place], values[place]
            assert best == sorted(best, reverse=True), "the likeliest first"
            assert len(set(each)) == top
            assert all(0 <= token < engine.info.vocabulary_size for token in each)
            assert not top or logprobs[row] < best[0] + 1e-3
            assert own not in each or abs(logprobs[row] - best[each.index(own)]) < 1e-3, "one number for one token"
        assert len(ids) == tokens_max
    for other in kept[1:]:
        assert all(abs(one - another) < 0.3 for one, another in zip(kept[0], other, strict=True)), "the prompt's alone"
    short = evolve(usual_request, id=new_id(), tokens=TokenIds.of([7]), logprobs=2, prompt_logprobs=True)
    async with slot(engine, short) as generation:
        started = await anext(generation)
        await read_on(generation)
    assert isinstance(started, Started)
    assert started.scores is not None
    assert started.scores.logprobs.shape == (0,)


async def leaves_while_log_probabilities_of_a_prompt_are_on_their_way(engine: Engine) -> None:
    prompt = min(engine.info.request_tokens_max - LONG, 700)

    async def submit_and_leave(pause_s: float) -> bool:
        wanted = evolve(
            request(engine, LONG, prompt), logprobs=min(20, engine.info.vocabulary_size), prompt_logprobs=True
        )
        generation = engine.submit(wanted)
        await trio.sleep(pause_s)
        return await leave(engine, wanted, generation)

    for pause_s in (0.0, 0.01, 0.1):
        await leave_in_time(partial(submit_and_leave, pause_s))
    await serves_on(engine)


async def a_bias_forces_and_forbids_a_token(engine: Engine) -> None:
    usual_request = request(engine, 4)
    usual, _ = await complete(engine, usual_request)
    forced = next(token for token in range(5, 100) if token not in usual)
    sampling = evolve(usual_request.sampling, logit_bias={forced: 100.0})
    assert (await complete(engine, Generate(new_id(), usual_request.tokens, sampling)))[0] == [forced] * 4
    sampling = evolve(usual_request.sampling, logit_bias={usual[0]: -100.0})
    assert usual[0] not in (await complete(engine, Generate(new_id(), usual_request.tokens, sampling)))[0]


async def a_tenant_finds_in_the_cache_what_it_would_find_alone(engine: Engine) -> None:
    """Ask as two tenants and as the default one, each twice with its own salt and without one."""
    text = 4 * engine.info.page_size
    wanted = [request(engine, 2, prompt=text)]
    if text <= engine.info.request_tokens_max // 4:
        wanted += [about(engine, item(engine, modality), text=text, tokens_max=2) for modality in modalities(engine)]
    for usual in wanted:
        alone = await cached_tokens(engine, usual, tenant_salt("alone", None))
        assert [*alone] == [0, max(alone)], "nothing is cached of a new prompt"
        # Without a salt, the default tenant has what other checks have left.
        for tenant, salt in (("red", None), ("red", "a"), ("", "a"), ("", "tenant:red"), ("blue", "a")):
            assert await cached_tokens(engine, usual, tenant_salt(tenant, salt)) == alone
    await engine.operate(FlushCache())


async def cached_tokens(engine: Engine, usual: Generate, salt: str | None) -> list[int]:
    """Return how many tokens are found in the cache by two equal requests with a salt, one after the other."""
    wanted = evolve(usual, cache_salt=salt, media=tuple(each.salted(salt) for each in usual.media))
    answers = [await complete(engine, evolve(wanted, id=new_id())) for _ in range(2)]
    return [finished.usage.cached_tokens for _, finished in answers]


async def answers_with_the_adapters_that_it_has_loaded(engine: Engine) -> None:
    """An adapter changes the tokens, no prompt finds that of another adapter in the cache, and the model stays itself."""
    if "load-adapter" not in engine.info.operations:
        return
    plain = request(engine, 12, prompt=4 * engine.info.page_size)
    usual, _ = await complete(engine, plain)
    one = await loaded_adapter(engine, "one", 1)
    two = await loaded_adapter(engine, "two", 2)
    assert one in engine.info.adapters
    answers: dict[Adapter | None, list[int]] = {None: usual}
    for adapter in (one, two):
        first, finished = await complete(engine, evolve(plain, id=new_id(), adapter=adapter))
        assert finished.usage.cached_tokens == 0, "neither the model's cache nor another adapter's has its prompt"
        assert first not in answers.values()
        answers[adapter] = first
        again, _ = await complete(engine, evolve(plain, id=new_id(), adapter=adapter))
        assert again == first
    got = []

    async def ask(adapter: Adapter | None) -> None:
        got.append((adapter, (await complete(engine, evolve(plain, id=new_id(), adapter=adapter)))[0]))

    async with trio.open_nursery() as nursery:  # in one batch
        for named in [*answers] * 2:
            nursery.start_soon(ask, named)
    assert all(ids == answers[named] for named, ids in got)
    for adapter in (one, two):
        await engine.operate(UnloadAdapter(adapter.name))
        with pytest.raises(AdapterNotLoaded, match=adapter.name):
            await complete(engine, evolve(plain, id=new_id(), adapter=adapter))
    assert (await complete(engine, evolve(plain, id=new_id())))[0] == usual


async def refuses_adapters_that_it_cannot_load_or_unload(engine: Engine) -> None:
    if "load-adapter" not in engine.info.operations:
        return
    one = await loaded_adapter(engine, "one", 1)
    with pytest.raises(BadRequest, match="loaded already"):
        await engine.operate(LoadAdapter("one", tiny_adapter(2)))
    with pytest.raises(BadRequest, match="name of an adapter"):
        await engine.operate(LoadAdapter("a/b", tiny_adapter(2)))
    with pytest.raises(AdapterNotLoaded, match="there is one"):
        await engine.operate(UnloadAdapter("two"))
    with pytest.raises(AdapterNotLoaded):
        await complete(engine, evolve(request(engine), adapter=evolve(one, digest="other")))
    asked = evolve(request(engine, LONG), adapter=one)
    async with slot(engine, asked) as generation:
        with trio.fail_after(ANSWERED_WITHIN_S):
            await anext(generation)
        with pytest.raises(Overloaded, match="still use"):
            await engine.operate(UnloadAdapter("one", wait_s=0))
        assert list(engine.info.adapters) == [one]
    await complete(engine, evolve(request(engine), adapter=one))
    await engine.operate(UnloadAdapter("one"))
    assert not engine.info.adapters
    assert await engine.operate(ListAdapters()) == AdapterList((), (await adapters_max(engine)))
    await serves_on(engine)


async def unloads_an_adapter_once_its_requests_have_ended(engine: Engine) -> None:
    if "load-adapter" not in engine.info.operations:
        return
    one = await loaded_adapter(engine, "one", 1)
    asked = evolve(request(engine, LONG), adapter=one)
    async with trio.open_nursery() as nursery, slot(engine, asked) as generation:
        with trio.fail_after(ANSWERED_WITHIN_S):
            await anext(generation)
        nursery.start_soon(engine.operate, UnloadAdapter("one"))
    again = await loaded_adapter(engine, "one", 2)
    assert again != one, "one name, other files"
    with pytest.raises(AdapterNotLoaded):
        await complete(engine, evolve(request(engine), adapter=one))
    await complete(engine, evolve(request(engine), adapter=again))
    await engine.operate(UnloadAdapter("one"))


async def loaded_adapter(engine: Engine, name: str, seed: int) -> Adapter:
    """Load an adapter, and return it as requests name it."""
    listed = await engine.operate(LoadAdapter(name, tiny_adapter(seed)))
    assert isinstance(listed, AdapterList)
    (digest,) = (each.digest for each in listed.adapters if each.name == name)
    return Adapter(name, digest)


async def adapters_max(engine: Engine) -> int:
    listed = await engine.operate(ListAdapters())
    assert isinstance(listed, AdapterList)
    return listed.loaded_max


async def refuses_a_grammar_that_it_cannot_follow(engine: Engine) -> None:
    for kind in set(GrammarKind).difference(engine.info.grammars):
        with pytest.raises(Unsupported):
            await complete(engine, request(engine, grammar=Grammar(kind, "a")))


async def refuses_or_queues_but_never_blocks(engine: Engine) -> None:
    taken: list[tuple[Generate, Generation]] = []
    for _ in range(2 * engine.info.running_max + 64):
        wanted = request(engine, 3)
        try:
            taken.append((wanted, engine.submit(wanted)))
        except Overloaded:
            continue
    assert len(taken) >= engine.info.running_max, "as many as run at once are never too many"
    for wanted, generation in taken:
        try:
            ids, _ = await read(generation)
        except Overloaded:
            continue
        finally:
            await engine.wait_released(wanted.id)
        assert len(ids) == 3


async def refuses_what_is_wrong_and_serves_on(engine: Engine) -> None:
    most, longest = engine.info.vocabulary_size, engine.info.request_tokens_max
    wrong = [
        Generate(new_id(), TokenIds(), Sampling(4)),
        Generate(new_id(), TokenIds.of([1, most]), Sampling(4)),
        Generate(new_id(), TokenIds.of([1, IDS_MAX - 1]), Sampling(4)),
        Generate(new_id(), TokenIds.of([1]), Sampling(0)),
        Generate(new_id(), TokenIds.of([1]), Sampling(4, stop_token_ids=(most,))),
        Generate(new_id(), TokenIds.of([1]), Sampling(4, stop_token_ids=(-1,))),
        Generate(new_id(), TokenIds.of([1]), Sampling(4, logit_bias={most: 1.0})),
        Generate(new_id(), TokenIds.of([1]), Sampling(4, logit_bias={-1: 1.0})),
        Generate(new_id(), TokenIds.of([1]), Sampling(4, logit_bias={1: nan})),
        Generate(new_id(), TokenIds.of([1]), Sampling(4), logprobs=most + 1),
        Generate(new_id(), TokenIds.of([1]), Sampling(4), logprobs=-1),
        Generate(new_id(), TokenIds.of([1]), Sampling(4), prompt_logprobs=True),
        Generate(new_id(), TokenIds.of([1] * longest), Sampling(1)),
        Generate(new_id(), TokenIds.of([1]), Sampling(longest)),
    ]
    for each in wrong:
        with pytest.raises(BadRequest):
            await complete(engine, each)
    with pytest.raises(ContextTooLong):
        engine.submit(wrong[-1])
    await serves_on(engine)


async def serves_the_longest_prompt(engine: Engine) -> None:
    ids, _ = await complete(engine, request(engine, 2, engine.info.request_tokens_max - 2))
    assert len(ids) == 2


async def drops_its_cache_only_when_idle(engine: Engine) -> None:
    wanted = request(engine, LONG)
    async with slot(engine, wanted) as generation:
        with trio.fail_after(ANSWERED_WITHIN_S):
            await anext(generation)
        if not generation.over.is_set():
            with pytest.raises(Overloaded):
                await engine.operate(FlushCache())
    await at_rest(engine)
    await engine.operate(FlushCache())
    await serves_on(engine)


async def refuses_operations_that_it_does_not_list(engine: Engine) -> None:
    names = engine.info.operations
    assert "flush-cache" in names
    assert ("metrics" in names) is engine.info.metrics
    for operation in OPERATIONS:
        if operation.name not in names and not operation.has_fields:
            with pytest.raises(Unsupported, match=operation.name):
                await engine.operate(operation.request())
    await serves_on(engine)


async def drops_its_cache_right_after_the_last_answer(engine: Engine) -> None:
    """The scheduler may still be in a step of a request whose end the asker has seen, be it ended or aborted."""
    for number in range(10):
        wanted = request(engine, LONG if number % 2 else 4)
        async with slot(engine, wanted) as generation:
            if number % 2:
                with trio.fail_after(ANSWERED_WITHIN_S):
                    await anext(generation)
            else:
                await read(generation)
        await engine.operate(FlushCache())


async def computes_with_images_and_videos(engine: Engine) -> None:
    for modality in modalities(engine):
        one, two = item(engine, modality), item(engine, modality)
        await complete(engine, about(engine, one))
        await complete(engine, about(engine, one, two))
        wanted = about(engine, two)
        first, _ = await complete(engine, wanted)
        assert (await complete(engine, evolve(wanted, id=new_id())))[0] == first, "the same image, the same answer"
    if modalities(engine):
        await complete(engine, about(engine, *(item(engine, modality) for modality in modalities(engine))))


async def keeps_prompts_with_different_images_apart(engine: Engine) -> None:
    text = 2 * engine.info.page_size
    if not modalities(engine) or 4 * text > engine.info.request_tokens_max:
        return
    first, other = (item(engine, modalities(engine)[0]) for _ in range(2))
    wanted = about(engine, first, text=text, tokens_max=2)
    await complete(engine, wanted)
    _, finished = await complete(engine, evolve(wanted, id=new_id(), media=(other,)))
    assert finished.usage.cached_tokens <= text, "another image behind the same text"


async def refuses_wrong_images_before_it_computes_and_serves_on(engine: Engine) -> None:
    for modality in modalities(engine):
        wanted = about(engine, item(engine, modality))
        for wrong in wrong_media(engine, wanted):
            with pytest.raises(BadRequest):
                engine.submit(wrong)
        await complete(engine, wanted)
    if not modalities(engine):
        picture = MediaItem(Modality.IMAGE, "0" * 64, (1, 2, 2), 1, MediaForm.PLACES)
        with pytest.raises(Unsupported):
            engine.submit(evolve(request(engine), media=(picture,)))
    await serves_on(engine)


def wrong_media(engine: Engine, wanted: Generate) -> Iterator[Generate]:
    """Yield requests that would hang an engine, end it, or be answered about another picture."""
    media, (good,) = engine.info.media, wanted.media
    assert media is not None
    place = media.placeholder(good.modality) or 0
    yield evolve(wanted, media=())
    yield evolve(wanted, tokens=TokenIds.of([*wanted.tokens, place]))
    yield evolve(wanted, tokens=TokenIds.of([token for token in wanted.tokens if token != place]))
    yield evolve(wanted, media=(good, good))
    if media.start_token is not None:
        yield evolve(
            wanted, tokens=TokenIds.of([7 if token == media.start_token else token for token in wanted.tokens])
        )
    first = wanted.tokens.index(place)
    yield evolve(
        wanted, tokens=TokenIds.of([*wanted.tokens[: first + 1], 7, *wanted.tokens[first + 1 :]])
    )  # in two pieces
    time, height, width = good.grid
    changes: list[dict[str, Any]] = [
        {"tokens": good.tokens + 1},
        {"tokens": 0},
        {"grid": (time, height, width + media.merge)},
        {"grid": (time, height + 1, width)},
        {"grid": (0, height, width)},
        {"digest": "0" * 63},
        {"digest": "g" * 64},
        {"seconds_per_grid": nan},
        {"seconds_per_grid": 0.0},
        *({"form": form} for form in MediaForm if form is not good.form),
        {"data": evolve(good.data, dtype=Dtype.INT64)},
        {"data": evolve(good.data, shape=(*good.data.shape, 1))},
    ]
    if good.form is MediaForm.EMBEDDINGS:
        rows, elements = good.data.shape
        changes += [{"data": evolve(good.data, shape=shape)} for shape in ((rows + 1, elements), (rows, elements - 1))]
        changes.append({"data": evolve(good.data, data=good.data.data[1:])})
    if good.form is MediaForm.PIXELS:
        frames, rows, columns, _ = good.data.shape
        changes += [{"data": evolve(good.data, shape=(frames, rows, columns, 1))}]
    for change in changes:
        yield evolve(wanted, id=new_id(), media=(evolve(good, **change),))


ADAPTER_CHECKS: tuple[Callable[[Engine], Awaitable[None]], ...] = (
    answers_with_the_adapters_that_it_has_loaded,
    refuses_adapters_that_it_cannot_load_or_unload,
    unloads_an_adapter_once_its_requests_have_ended,
)


# Memory -------------------------------------------------------------------------------


RELEASED_AT_ONCE = {"trtllm": (MemoryTag.KV_CACHE, MemoryTag.WEIGHTS)}
"""The tags that engines of a kind can release, where these are not all of them, or not one after the other.

Such a kind holds no requests, either.
"""


async def releases_what_it_can_at_once(engine: Engine) -> None:
    if "release-memory" not in engine.info.operations or engine.info.kind not in RELEASED_AT_ONCE:
        return
    tags = RELEASED_AT_ONCE[engine.info.kind]
    wanted = request(engine, prompt=3 * engine.info.page_size)
    undisturbed, _ = await complete(engine, wanted)
    with pytest.raises(Unsupported, match=r"cuda_graph: .*kv_cache, weights alone"):
        await engine.operate(ReleaseMemory())
    with pytest.raises(Unsupported, match="drain or end them"):
        await engine.operate(ReleaseMemory(tags=tags, running=RunningRequests.HOLD))
    with pytest.raises(BadRequest, match="no memory is released"):
        await engine.operate(ResumeMemory())
    await serves_on(engine)
    released = "out of service: memory released: "
    for tag in tags:
        assert await engine.operate(ReleaseMemory(tags=(tag,))) == MemoryState((tag,), f"{released}{tag}")
        with pytest.raises(NotReady):
            await complete(engine, request(engine))
        with pytest.raises(BadRequest, match=f"{tag}: released already"):
            await engine.operate(ReleaseMemory(tags=(tag,)))
        with pytest.raises(Unsupported, match="resume-memory first"):
            await engine.operate(ReleaseMemory(tags=tuple({*tags} - {tag})))
        assert await engine.operate(ResumeMemory()) == MemoryState((), "in service")
        await serves_on(engine)
    assert await engine.operate(ReleaseMemory(tags=tags)) == MemoryState(tags, f"{released}kv_cache, weights")
    state = await engine.operate(ResumeMemory(tags=tags[1:]))
    assert state == MemoryState(tags[:1], f"{released}kv_cache")
    with pytest.raises(NotReady):
        await complete(engine, request(engine))
    with pytest.raises(BadRequest, match="weights: not released"):
        await engine.operate(ResumeMemory(tags=tags))
    assert await engine.operate(ResumeMemory()) == MemoryState((), "in service")
    again, finished = await complete(engine, evolve(wanted, id=new_id()))
    assert (again, finished.usage.cached_tokens) == (undisturbed, 0), "a released cache is empty"


async def releases_its_memory_and_has_it_again(engine: Engine) -> None:
    if "release-memory" not in engine.info.operations or engine.info.kind in RELEASED_AT_ONCE:
        return
    await complete(engine, request(engine))
    with pytest.raises(BadRequest, match="no memory is released"):
        await engine.operate(ResumeMemory())
    weights, rest = (MemoryTag.WEIGHTS,), (MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH)
    state = await engine.operate(ReleaseMemory(tags=rest))
    assert state == MemoryState(rest, "out of service: memory released: kv_cache, cuda_graph")
    with pytest.raises(NotReady):
        await complete(engine, request(engine))
    with pytest.raises(BadRequest, match="kv_cache, cuda_graph: released already"):
        await engine.operate(ReleaseMemory())
    with pytest.raises(BadRequest, match="weights: not released"):
        await engine.operate(ResumeMemory(tags=weights))
    state = await engine.operate(ReleaseMemory(tags=weights))
    assert state == MemoryState(tuple(MemoryTag), "out of service: memory released: kv_cache, weights, cuda_graph")
    state = await engine.operate(ResumeMemory(tags=(*rest, *rest)))  # a second return ended SGLang's scheduler
    assert state == MemoryState(weights, "out of service: memory released: weights")
    with pytest.raises(NotReady):
        await complete(engine, request(engine))
    assert await engine.operate(ResumeMemory()) == MemoryState((), "in service")
    await serves_on(engine)


async def releases_no_memory_while_requests_run_that_it_may_not_hold(engine: Engine) -> None:
    if "release-memory" not in engine.info.operations:
        return
    for running in (RunningRequests.DRAIN, RunningRequests.END):
        for _ in range(TRIES):
            async with slot(engine, request(engine, LONG)) as generation:
                with trio.fail_after(ANSWERED_WITHIN_S):
                    await anext(generation)
                if not generation.over.is_set():
                    tags = RELEASED_AT_ONCE.get(engine.info.kind, tuple(MemoryTag))
                    with pytest.raises(Overloaded):
                        await engine.operate(ReleaseMemory(tags=tags, running=running))
                    break
        await at_rest(engine)
    await serves_on(engine)


async def holds_requests_while_its_memory_is_released(engine: Engine) -> None:
    """They go on as if nothing had been; one whose asker leaves meanwhile is released at once."""
    if "release-memory" not in engine.info.operations or engine.info.kind in RELEASED_AT_ONCE:
        return
    if engine.info.hand_off is not HandOff.NONE:
        with pytest.raises(Unsupported, match="drain or end them"):
            await engine.operate(ReleaseMemory(running=RunningRequests.HOLD))
        await serves_on(engine)
        return
    wanted = request(engine, LONG)
    undisturbed, _ = await complete(engine, wanted)
    again, left = evolve(wanted, id=new_id()), request(engine, LONG)
    async with slot(engine, again) as generation:
        async with slot(engine, left) as leaving:
            first = [await anext(generation) for _ in range(3)]
            await engine.operate(ReleaseMemory(running=RunningRequests.HOLD))
            engine.abort(left.id)
            with trio.fail_after(RELEASED_WITHIN_S):
                await engine.wait_released(left.id)
            assert leaving.over.is_set()
        assert not generation.over.is_set()
        load = await engine.load()
        assert (load.running, load.kv_tokens_used) == (0, 0)
        await engine.operate(ResumeMemory())
        with trio.fail_after(ANSWERED_WITHIN_S):
            replies = [*first, *[reply async for reply in generation]]
            finished = await generation.result()
    ids = [token for reply in replies if isinstance(reply, Tokens) for token in reply.ids]
    assert finished is not None
    assert len(ids) == finished.usage.completion_tokens == LONG
    await is_the_same_answer(engine, wanted, ids, undisturbed)


async def is_the_same_answer(engine: Engine, wanted: Generate, ids: list[int], undisturbed: list[int]) -> None:
    """Check that an answer equals the undisturbed one, but for a token that the engine would choose, too.

    What was held is computed anew, in another order of additions: between two tokens of almost one probability it may
    choose the other.
    """
    same = next((place for place in range(LONG) if ids[place] != undisturbed[place]), LONG)
    if same < LONG:
        anew = evolve(request(engine, 1), tokens=TokenIds.of([*wanted.tokens, *ids[:same]]))
        assert (await complete(engine, anew))[0] == [ids[same]]


CHECKS: tuple[Callable[[Engine], Awaitable[None]], ...] = (
    ends_with_length_at_tokens_max,
    ends_with_stop_at_a_stop_token,
    ends_with_no_stop_before_tokens_min,
    continues_an_answer_behind_resumed_tokens,
    answers_an_unread_request_whole,
    aborts_in_the_turn_of_submit,
    aborts_before_the_first_token,
    aborts_in_mid_stream,
    aborts_twice_and_again_later,
    aborts_after_the_end_change_nothing,
    ignores_unknown_ids,
    takes_an_id_again_after_its_release,
    frees_slots_for_requests_that_wait,
    keeps_requests_apart,
    counts_what_it_holds,
    refuses_or_queues_but_never_blocks,
    refuses_what_is_wrong_and_serves_on,
    serves_the_longest_prompt,
    drops_its_cache_only_when_idle,
    refuses_operations_that_it_does_not_list,
    drops_its_cache_right_after_the_last_answer,
    releases_its_memory_and_has_it_again,
    releases_what_it_can_at_once,
    releases_no_memory_while_requests_run_that_it_may_not_hold,
    holds_requests_while_its_memory_is_released,
    keeps_the_order_of_weight_updates,
    serves_on_after_a_session_that_a_checksum_refuses,
    refuses_weights_of_no_folder,
    sends_log_probabilities_when_asked,
    sends_log_probabilities_of_the_prompt_when_asked,
    leaves_while_log_probabilities_of_a_prompt_are_on_their_way,
    a_bias_forces_and_forbids_a_token,
    a_tenant_finds_in_the_cache_what_it_would_find_alone,
    *ADAPTER_CHECKS,
    refuses_a_grammar_that_it_cannot_follow,
    computes_with_images_and_videos,
    keeps_prompts_with_different_images_apart,
    refuses_wrong_images_before_it_computes_and_serves_on,
)
