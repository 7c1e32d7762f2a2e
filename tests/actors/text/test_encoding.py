"""A text that is too long is refused before it is tokenised, and no text that fits is, with any tokenizer."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import trio
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from trio.testing import MockClock

from actors.kit.offload import Offload, T, run_inline
from actors.text.encoders import ByTokenizers
from actors.text.encoding import tokenize_conversation, tokenize_text
from actors.text.first_parts import SEAM_TOKENS, TooManyTokens
from actors.text.token_bounds import COMPOSED_CHARACTERS_MAX, characters_per_token_max
from protocol.errors import BadRequest, ContextTooLong
from protocol.messages.text import Rendering, Role, Tokenize, Turn
from protocol.messages.tools import Tool, ToolCall
from protocol.token_ids import TokenIds
from supervisor.threads.text_threads import HEAVY_CHARACTERS_MIN
from tests.actors.test_processor import CONTENTS, ask, running
from tests.rig.gateway import TINY, load_with_fixed_clock

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
TEXTS = st.text(st.sampled_from("a e\u0301\u1100\u1161\u11a8ᾂ\n\t日🙂A<|im_end|>"), max_size=60)


class Counting:
    """A `RunInThread` that notes how much it was asked to do."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def __call__(self, function: Callable[[], T], /, *, owner: str, size: int) -> T:
        self.sizes.append(size)
        return await run_inline(function, owner=owner, size=size)


def tokenizer(model: models.Model, normalizer: Any = None, pre: Any = None, added: Sequence[Any] = ()) -> Tokenizer:
    result = Tokenizer(model)
    if normalizer is not None:
        result.normalizer = normalizer
    if pre is not None:
        result.pre_tokenizer = pre
    result.decoder = decoders.ByteFallback()
    result.add_tokens(list(added))
    return result


def bpe(**options: Any) -> models.BPE:
    return models.BPE(vocab={**BYTES, "a": 256, "aa": 257}, merges=[("a", "a")], byte_fallback=True, **options)


def words() -> Tokenizer:
    return tokenizer(models.WordLevel({"sevens": 0, "u": 1}, unk_token="u"), pre=pre_tokenizers.WhitespaceSplit())


BOUNDED = {
    "tiny": TINY.tokenizer,
    "byte fallback": tokenizer(bpe()),
    "composing": tokenizer(bpe(), normalizers.NFKC()),
    "metaspace": tokenizer(bpe(), pre=pre_tokenizers.Metaspace()),
    "replacing": tokenizer(bpe(), normalizers.Replace("aaa", "a")),
    "one unknown each": tokenizer(models.BPE(vocab={"u": 0, "a": 1}, merges=[], unk_token="u")),
    "unigram": tokenizer(models.Unigram([*((name, -9.0) for name in BYTES), ("aaaa", -1.0)], 0, byte_fallback=True)),
    "added": tokenizer(bpe(), added=["<|im_end|>"]),
}
UNBOUNDED = {
    "stripping": tokenizer(bpe(), normalizers.Strip()),
    "removing": tokenizer(bpe(), normalizers.Replace("a", "")),
    "collapsing": tokenizer(bpe(), normalizers.Sequence([normalizers.NFC(), normalizers.BertNormalizer()])),
    "spaces": tokenizer(bpe(), pre=pre_tokenizers.Whitespace()),
    "removed": tokenizer(bpe(), pre=pre_tokenizers.Split("a", "removed")),
    "dropping": tokenizer(models.BPE(vocab={"a": 1}, merges=[])),
    "fusing": tokenizer(models.BPE(vocab={"u": 0, "a": 1}, merges=[], unk_token="u", fuse_unk=True)),
    "fusing unigram": tokenizer(models.Unigram([("u", -1.0), ("a", -1.0)], 0)),
    "words": tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    "swallowing": tokenizer(bpe(), added=[AddedToken("<|im_end|>", lstrip=True)]),
}


def bound(tokenizer: Tokenizer) -> int | None:
    return characters_per_token_max(json.loads(tokenizer.to_str()))


@pytest.mark.parametrize("tokenizer", BOUNDED.values(), ids=BOUNDED)
@given(text=TEXTS)
def test_no_token_stands_for_more_characters_than_the_bound(tokenizer: Tokenizer, text: str) -> None:
    characters = bound(tokenizer)
    assert characters is not None
    assert len(text) <= characters * len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("tokenizer", UNBOUNDED.values(), ids=UNBOUNDED)
def test_where_a_tokenizer_may_take_characters_away_there_is_no_bound(tokenizer: Tokenizer) -> None:
    assert bound(tokenizer) is None


def test_the_bound_of_composed_characters_is_unicodes() -> None:
    longest = max(len(unicodedata.normalize("NFD", chr(code))) for code in range(0x11_0000))
    assert longest <= COMPOSED_CHARACTERS_MAX
    assert TINY.characters_per_token_max == COMPOSED_CHARACTERS_MAX * max(map(len, TINY.tokenizer.get_vocab()))


# What a refusal costs --------------------------------------------------------------------------


async def test_what_is_surely_too_long_is_not_tokenised_at_all() -> None:
    aside = Counting()
    with pytest.raises(TooManyTokens, match="more than 100"):
        await tokenize_text("a" * 4_000_000, TINY, 100, Offload(aside, "alice").run)
    assert aside.sizes == []


@pytest.mark.parametrize("tokenizer", UNBOUNDED.values(), ids=UNBOUNDED)
async def test_without_a_bound_a_refusal_costs_what_fits(tokenizer: Tokenizer) -> None:
    """The review's 4 MB prompts were tokenised whole, 1.4 s and half a gigabyte each."""
    model, aside, limit = (
        evolve(TINY, tokenizer=tokenizer, encoder=ByTokenizers(tokenizer), characters_per_token_max=bound(tokenizer)),
        Counting(),
        200,
    )
    text = "ab <|im_end|>" * 20_000
    length = len(tokenizer.encode(text).ids)
    if length > limit + SEAM_TOKENS:
        with pytest.raises(TooManyTokens):
            await tokenize_text(text, model, limit, Offload(aside, "").run)
        assert sum(aside.sizes) <= len(text) / 2
    else:
        assert len(await tokenize_text(text, model, limit, Offload(aside, "").run)) == length


@pytest.mark.parametrize("bound_known", [TINY.characters_per_token_max, None])
@given(
    text=st.text(st.sampled_from("ae \n日🙂"), max_size=300), repeat=st.integers(1, 400), limit=st.integers(1, 5_000)
)
def test_whatever_fits_is_tokenised_as_ever(bound_known: int | None, text: str, repeat: int, limit: int) -> None:
    text *= repeat
    model, ids = evolve(TINY, characters_per_token_max=bound_known), TINY.encode_text(text)

    async def read() -> TokenIds | None:
        try:
            return await tokenize_text(text, model, limit, Offload(run_inline, "").run)
        except TooManyTokens:
            return None

    got = trio.run(read)
    assert got == ids if len(ids) <= limit else got in (None, ids)


async def test_a_text_that_fits_is_tokenised_however_many_characters_it_has() -> None:
    model = evolve(
        TINY, tokenizer=UNBOUNDED["spaces"], encoder=ByTokenizers(UNBOUNDED["spaces"]), characters_per_token_max=None
    )
    text = "a" * 3000 + " " * 100_000
    ids = await tokenize_text(text, model, 2000, Offload(run_inline, "").run)
    assert ids == model.encode_text(text)
    assert len(ids) == 1500


async def test_a_text_that_nearly_fills_the_context_is_tokenised_once() -> None:
    """Texts of more than four characters a token were tokenised twice, and agents work near the limit."""
    tokens = words()
    model, counting = (
        evolve(TINY, tokenizer=tokens, encoder=ByTokenizers(tokens), characters_per_token_max=bound(tokens)),
        Counting(),
    )
    text = "sevens " * 20_000
    assert len(await tokenize_text(text, model, 20_000, Offload(counting, "").run)) == 20_000
    assert counting.sizes == [len(text)]


@pytest.mark.parametrize("turns", [(), (Turn(Role.USER, "oak " * 3000),)])
async def test_tokenize_has_a_limit_of_its_own(turns: tuple[Turn, ...], autojump_clock: MockClock) -> None:
    async with running(tokenize_max=2000) as address:
        with pytest.raises(ContextTooLong, match="can have 2000") as caught:
            await ask(address, Tokenize(turns=turns, text="" if turns else "oak " * 3000))
        assert caught.value.param == ("messages" if turns else "prompt")
        _, result = await ask(address, Tokenize(text="oak"))
        assert result.ids == TINY.encode_text("oak")


# Chat templates -------------------------------------------------------------------------------


QUADRATIC = {
    "two loops": "{% for a in messages %}{% for b in messages %}{% set x = 1 %}{% endfor %}{% endfor %}",
    "slices": "{% for a in messages %}{% for b in messages[:-1] %}{% set x = 1 %}{% endfor %}{% endfor %}",
    "ranges": "{% for a in messages %}{% for b in range(messages|length) %}{% set x = 1 %}{% endfor %}{% endfor %}",
    "items": "{% for a in messages %}{% for b in messages %}{% set x = b.role %}{% endfor %}{% endfor %}",
    "filters": "{% for a in messages %}{% set x = messages|selectattr('role', 'equalto', 'tool')|list %}{% endfor %}",
    "members": "{% for a in messages %}{% if not messages.index(a) in messages %}{% endif %}{% endfor %}",
}
ENDLESS = {
    "calls": "{% macro f() %}{% endmacro %}{% for a in range(99999) %}{% for b in range(99) %}{{ f() }}{% endfor %}{% endfor %}",
    "three loops": "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}{% endfor %}",
}
RENDERED = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("source", [*ENDLESS.values(), *QUADRATIC.values()])
async def test_a_template_is_held_to_a_number_of_steps(source: str) -> None:
    # None of the conversations that are tried when a model is loaded is as long.
    model = load_with_fixed_clock(CONTENTS, f"{{% if messages|length > 50 %}}{source}{{% endif %}}{RENDERED}")
    with pytest.raises(BadRequest, match="it takes more than 1000000 steps"):
        await tokenize_conversation([Turn(Role.USER, "x")] * 9000, model, 100_000, Offload(run_inline, "").run)


@pytest.mark.parametrize("source", QUADRATIC.values(), ids=QUADRATIC)
async def test_a_conversation_is_rendered_by_a_template_whose_cost_is_quadratic(source: str) -> None:
    model, counting = load_with_fixed_clock(CONTENTS, source + RENDERED), Counting()
    turns = [Turn(Role.USER, "x")] * 1100
    ids = (await tokenize_conversation(turns, model, 100_000, Offload(counting, "").run)).tokens
    assert ids == TINY.encode_text("x" * 1100, special=False)
    assert counting.sizes[0] > HEAVY_CHARACTERS_MIN  # so it waits with other heavy work


async def test_a_conversation_with_too_many_messages_is_refused_before_it_is_rendered() -> None:
    counting = Counting()
    with pytest.raises(TooManyTokens, match="more than 20000"):
        await tokenize_conversation([Turn(Role.USER, "")] * 9000, TINY, 20_000, Offload(counting, "").run)
    assert counting.sizes == []
    ids = (await tokenize_conversation([Turn(Role.USER, "")] * 3000, TINY, 20_000, Offload(counting, "").run)).tokens
    assert 15_000 < len(ids) < 20_000


WITH_TOOLS = (
    RENDERED
    + "{% for t in tools or [] %}{{ t|tojson }}{% endfor %}"
    + ("{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function|tojson }}{% endfor %}{% endfor %}")
)


HI = Turn(Role.USER, "hi")
LONG_CALL = ToolCall("c", "f", json.dumps({"key": "oak " * 250}))
LONG_SCHEMA = json.dumps({"type": "object", "properties": {"key": {"enum": ["value"] * 400}}})


@pytest.mark.parametrize(
    ("turns", "tools"),
    [
        ((HI,), (Tool("f", parameters=LONG_SCHEMA),)),
        ((HI,), (Tool("f", "oak " * 250),)),
        ((HI, Turn(Role.ASSISTANT, "", calls=(LONG_CALL,)), Turn(Role.TOOL, "x", call_id="c")), ()),
    ],
)
async def test_long_tools_and_calls_are_rendered_in_a_thread(turns: Sequence[Turn], tools: tuple[Tool, ...]) -> None:
    """The review's 30 tools of 117 kB stopped the event loop for 200 to 400 ms, since the question was short."""
    model, counting = load_with_fixed_clock(CONTENTS, WITH_TOOLS), Counting()
    rendering = Rendering(tools=tools)
    prompt = model.prompt(turns, rendering)
    ids = (await tokenize_conversation(turns, model, 100_000, Offload(counting, "").run, rendering)).tokens
    assert ids == model.encode_text(prompt, special=False)
    assert counting.sizes[0] >= 6_000 > len(prompt), "the rendering comes first, and is more work than its prompt"


SCANS = {
    "backward": """
{%- for i in range(messages|length) %}
    {%- set found = namespace(role=none, done=false) %}
    {%- for j in range(i - 1, -1, -1) %}
        {%- if not found.done %}
            {%- if messages[j].role != 'tool' %}{% set found.role = messages[j].role %}{% set found.done = true %}{% endif %}
        {%- endif %}
    {%- endfor %}
    {{- messages[i].content }}
{%- endfor %}""",
    "forward": """
{%- for m in messages %}
    {%- set scan = namespace(stopped=false) %}
    {%- for next in messages[loop.index:] %}
        {%- if scan.stopped %}
        {%- elif next.role != 'tool' %}{% set scan.stopped = true %}
        {%- endif %}
    {%- endfor %}
    {{- m.content }}
{%- endfor %}""",
}


@pytest.mark.parametrize("source", SCANS.values(), ids=SCANS)
def test_a_scan_for_the_nearest_message_costs_what_it_looks_at(source: str) -> None:
    model = load_with_fixed_clock(CONTENTS, source)
    assert model.template.cost.square < 0.05
    assert model.prompt([Turn(Role.USER, "x")] * 9000) == "x" * 9000


@pytest.mark.parametrize(
    ("body", "rendered"),
    [
        ("{% if not ns.done %}{{ i }}{% set ns.done = i == 2 %}{% endif %}", "012"),
        ("{% if ns.done %}{% else %}{{ i }}{% set ns.done = i == 2 %}{% endif %}", "012"),
        ("{% if not ns.done %}{{ i }}{% set ns.done = i == 2 %}{% else %}.{% endif %}", "012.."),
        ("{% if not ns.done %}{{ i }}{% set ns.done = i == 2 %}{% endif %}-", "0-1-2---"),
        ("{% if i != 2 %}{{ i }}{% endif %}", "0134"),
        ("{% if loop.index != 2 %}{{ i }}{% endif %}", "0234"),
        ("{% if ns.next() != 2 %}{{ i }}{% endif %}", "01234"),
    ],
)
def test_a_loop_that_may_still_do_something_goes_on(body: str, rendered: str) -> None:
    body = body.replace("ns.next()", "ns|length")
    source = f"{{% set ns = namespace(done=false) %}}{{% for i in range(5) %}}{body}{{% endfor %}}{{{{ messages[0].content }}}}"
    if "length" in body:
        source = source.replace("ns|length", "messages|length")
    assert load_with_fixed_clock(CONTENTS, source).prompt([Turn(Role.USER, "x")]) == f"{rendered}x"


async def test_a_template_is_held_to_a_number_of_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.text.chat_template.RENDERED_CHARACTERS_MAX", 100_000)
    model = load_with_fixed_clock(CONTENTS, "{% for a in messages %}{{ messages[0].content }}{% endfor %}")
    with pytest.raises(BadRequest, match="it makes more than 100000 characters"):
        await tokenize_conversation([Turn(Role.USER, "x" * 1000)] * 101, model, 10**6, Offload(run_inline, "").run)
    assert (
        await tokenize_conversation([Turn(Role.USER, "x" * 1000)] * 100, model, 10**6, Offload(run_inline, "").run)
    ).tokens


def test_a_short_template_over_as_many_turns_as_a_body_holds_is_not_refused() -> None:
    prompt = TINY.prompt([Turn(Role.USER, "x")] * 11_000)
    assert prompt.count("<|im_start|>") == 11_001
