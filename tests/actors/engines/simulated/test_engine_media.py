"""Images and videos in the requests of a simulated engine: its answers and its prefix cache depend on their digests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.hand_off import Rendezvous
from actors.engines.simulated.rendezvous_rooms import RendezvousRooms
from actors.engines.simulated.spec import ADDRESS
from protocol.errors import BadRequest
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate
from protocol.messages.media import MediaForm, MediaItem
from protocol.token_ids import TokenIds
from tests.rig.encoders import IMAGE_TOKEN, MEDIA, embeddings
from tests.rig.simulated_engines import generate, read, running, spec

TEXT = [1, 2, 3, 4, 5, 6, 7, 8]


def about(name: str, *items: MediaItem, tokens_max: int = 4, behind: Sequence[int] = TEXT) -> Generate:
    """Return a request with eight tokens before its images."""
    places = [IMAGE_TOKEN] * sum(item.tokens for item in items)
    return evolve(generate(name, [*TEXT, *places, *behind], tokens_max), media=items)


async def answer(engine: SimulatedEngine, request: Generate) -> tuple[list[int], int]:
    """Return the answer to a request, and how many tokens of its prompt were cached."""
    ids, finished, _ = await read(engine.submit(request))
    return ids, finished.usage.cached_tokens


async def test_another_image_gives_another_answer_and_the_same_one_the_same(autojump_clock: MockClock) -> None:
    async with running(spec(media=MEDIA, prefix_cache=False)) as engine:
        one, again, other = [await answer(engine, about("x", embeddings(name), tokens_max=16)) for name in "aab"]
        assert one == again
        assert one[0] != other[0]


async def test_no_answer_has_a_placeholder_so_that_a_prompt_can_continue_it(autojump_clock: MockClock) -> None:
    async with running(spec(media=MEDIA)) as engine, running(spec()) as other:
        request = generate("x", TEXT, 1000, ignore_eos=True)
        assert IMAGE_TOKEN in (await answer(other, request))[0]
        assert IMAGE_TOKEN not in (await answer(engine, request))[0]


async def test_prompts_share_a_prefix_up_to_the_first_image_that_differs(autojump_clock: MockClock) -> None:
    a, b, c = map(embeddings, "abc")
    async with running(spec(media=MEDIA)) as engine:
        assert (await answer(engine, about("1", a, b)))[1] == 0
        assert (await answer(engine, about("2", c, b)))[1] == 8, "the text before the images"
        assert (await answer(engine, about("3", a, c)))[1] == 8 + 4
        assert (await answer(engine, about("4", a, b)))[1] == 8 + 4 + 4 + 4, "all but the last page"
        assert (await answer(engine, about("5", b, a)))[1] == 8, "the same images in another order"


async def test_an_answer_about_an_image_that_goes_on_elsewhere_is_the_same(autojump_clock: MockClock) -> None:
    wanted = about("1", embeddings("a"), tokens_max=12)
    async with running(spec(media=MEDIA)) as engine:
        whole, _ = await answer(engine, wanted)
    async with running(spec(media=MEDIA)) as other:
        sampling = evolve(wanted.sampling, tokens_max=7)
        rest, _ = await answer(
            other, evolve(wanted, tokens=TokenIds.of([*wanted.tokens, *whole[:5]]), resumed_tokens=5, sampling=sampling)
        )
        assert rest == whole[5:]
        again = evolve(
            wanted, tokens=TokenIds.of([*wanted.tokens, *whole[:8], *TEXT]), sampling=evolve(sampling, tokens_max=1)
        )
        assert (await answer(other, again))[1] == 8 + 4 + 8 + 8, "the answer's pages lie behind those of its own image"


async def test_the_decode_of_a_pair_gets_places_alone_and_continues_what_its_prefill_has_begun(
    autojump_clock: MockClock,
) -> None:
    rooms, wanted = RendezvousRooms(), about("1", embeddings("a"), tokens_max=12)
    met = evolve(wanted, hand_off=Rendezvous(1, 0, ADDRESS).encode())
    places = evolve(met, media=tuple(item.place for item in met.media))
    async with (
        running(spec(media=MEDIA)) as whole,
        running(spec(media=MEDIA, leg=Leg.PREFILL), meetings=rooms) as prefill,
        running(spec(media=MEDIA, leg=Leg.DECODE), meetings=rooms) as decode,
    ):
        assert decode.info.media == MEDIA
        assert decode.info.media_form is MediaForm.PLACES
        with pytest.raises(BadRequest, match="given as embeddings, and the engine takes places"):
            decode.submit(met)
        with pytest.raises(BadRequest, match="given as places, and the engine takes embeddings"):
            prefill.submit(places)
        expected, _ = await answer(whole, wanted)
        results: dict[str, list[int]] = {}

        async def ask(name: str, engine: SimulatedEngine, request: Generate) -> None:
            results[name], _ = await answer(engine, request)

        async with trio.open_nursery() as legs:
            legs.start_soon(ask, "prefill", prefill, met)
            legs.start_soon(ask, "decode", decode, places)
        assert results == {"prefill": expected[:1], "decode": expected}
