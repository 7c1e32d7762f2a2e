"""The choices of one answer: each is one generation, detokenised into text as its tokens come.

The first choice of a prompt is asked for alone, and the others once its prompt is computed: then the prompt is in the
prefix cache of the engine, and each of them costs its own tokens only. With `best_of` more choices are computed than
answered. They are kept as token ids (`candidates`) until the last of them has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

import trio
from attrs import define, evolve, field

from actors.kit.calls import Answer, Askable
from actors.kit.fast_path import FastPath, RelayedAnswer
from actors.text.candidates import TOKENS_A_TURN, CandidateChoice, Emit
from actors.text.detokenizer import IncrementalDetokenizer
from actors.text.echo import Echo
from actors.text.formats.answer import Expected
from actors.text.formats.stage import PLAIN, Stage
from actors.text.formats.table import NO_FORMATS, make_stage
from actors.text.formats.tool_table import ToolTable
from actors.text.judging import JudgedChoice, Judges
from actors.text.logprobs import PendingLogprobs
from actors.text.model import TextModel
from actors.text.staged_text import SCORED_A_PIECE, StagedText
from actors.text.stop_strings import StopStrings
from actors.text.thought_budget import ThoughtBudget
from protocol.errors import EngineLost, Unsupported
from protocol.messages.generation import Finished, FinishReason, Generate, PromptScores, Started, Tokens, Usage
from protocol.messages.text import ChoiceEnded, Respond, Text
from protocol.weight_versions import VersionRecord

AskRouter: TypeAlias = Askable[Generate, Started | Tokens, Finished]


@define(eq=False)
class Choices:
    """Passes the text of each choice of one request to `emit` while it comes, and counts tokens."""

    request: Respond
    model: TextModel
    decode: AskRouter
    emit: Emit
    stops: StopStrings | None = None  # the stop strings of the request
    echoes: Sequence[str] = ()  # the text of each prompt, if choices begin with their prompts
    answer: RelayedAnswer | None = None  # the answer behind `emit`, if `emit` does nothing but put
    judges: Judges = Judges()  # of each whole choice
    tools: ToolTable = ToolTable()  # of the request, as formats read them
    _scores: dict[int, PromptScores] = field(factory=dict)  # of the prompts that have been computed
    _echoing: trio.Lock | None = None  # prompts are echoed one after the other, a piece a turn
    _cached: int = 0
    _completion: int = 0
    _reasoning: int = 0
    _started: bool = False

    async def read(self, generations: Sequence[Sequence[Generate]]) -> Usage:
        """Read every choice of every prompt and return their usage together.

        Raises the error of the first choice that fails; the others are cancelled.
        """
        # Nearly every request has one choice of one prompt, and needs no task of its own.
        if len(generations) == len(generations[0]) == 1:
            if self.echoes and not self.request.scores_prompts:
                await self._echo(generations[0][0], 0, 0, self.emit)
            await self._choice(generations[0][0], 0, self.emit, alone=True)
        else:
            async with trio.open_nursery() as nursery:
                for prompt, choices in enumerate(generations):
                    nursery.start_soon(self._prompt, choices, prompt)
        return Usage(
            sum(len(choices[0].tokens) for choices in generations), self._completion, self._cached, self._reasoning
        )

    async def _prompt(self, generations: Sequence[Generate], prompt: int) -> None:
        """Read the choices of one prompt; if more are computed than wanted, pass on the likeliest in the end."""
        first = prompt * self.request.n
        scored = self.request.logprobs is not None
        candidates = (
            [CandidateChoice(self.emit, scored) for _ in generations] if len(generations) > self.request.n else []
        )
        async with trio.open_nursery() as nursery:
            for index, generate in enumerate(generations):
                emit = candidates[index] if candidates else self.emit
                if self.echoes and not generate.prompt_logprobs:
                    await self._echo(generate, prompt, first + index, emit)
                if index == 0 and generations[1:]:
                    # The other choices find its prompt in the prefix cache, once `start` returns.
                    await nursery.start(self._choice, generate, first, emit, prompt)
                else:
                    nursery.start_soon(self._choice, generate, first + index, emit, prompt, index == 0)
        candidates.sort(key=CandidateChoice.likelihood, reverse=True)
        for index, candidate in enumerate(candidates[: self.request.n]):
            # The list must not keep a candidate that has been passed on.
            candidates[index] = CandidateChoice(self.emit)
            if self.echoes:
                await self._echo(generations[index], prompt, first + index, self.emit)
            scored = self.request.logprobs is not None
            detokenizer = self._detokenizer(generations[index], first + index, scored=scored)
            kept, give = self._keeping(self.emit)
            staged = self._staged(detokenizer, generations[index], TOKENS_A_TURN)
            ended = await candidate.replay(staged, give)
            self._reasoning += staged.reasoning_tokens
            if kept is not None:
                await self._judge_whole(kept, ended)
            self.emit(ended)

    async def _echo(self, generate: Generate, prompt: int, choice: int, emit: Emit) -> None:
        """Pass on the prompt at the beginning of a choice; a candidate has no echo before it is chosen.

        A prompt may be long, and be echoed 128 times: each piece of an echo has a turn of its own.
        """
        await trio.lowlevel.checkpoint()
        if emit is not self.emit:
            return
        echo = Echo(self.model, generate.tokens, self.echoes[prompt], choice, self._scores.get(prompt))
        self._echoing = self._echoing or trio.Lock()
        async with self._echoing:
            for piece in echo.pieces():
                emit(piece)
                await trio.lowlevel.checkpoint()

    async def _choice(
        self,
        generate: Generate,
        choice: int,
        emit: Emit,
        prompt: int = 0,
        leads: bool = True,
        *,
        alone: bool = False,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Read one choice; `task_status.started()` is called when its prompt is computed.

        `leads` is for the first choice of a prompt: its cached tokens are those of earlier requests, not of its
        siblings. `alone` is for the only choice of an answer.
        """
        detokenizer = self._detokenizer(generate, choice, scored=generate.logprobs is not None)
        candidate, (kept, give) = emit if isinstance(emit, CandidateChoice) else None, self._keeping(emit)
        text = self._staged(detokenizer, generate) if candidate is None else StagedText(detokenizer)
        versions, budget, asked = VersionRecord(), ThoughtBudget.of(self.request, self.model), generate

        def pass_on(reply: Started | Tokens) -> None:
            # Nearly every step has one token.
            one = isinstance(reply, Tokens) and len(reply.ids) == 1 and candidate is None
            if one and (whole := detokenizer.feed_whole(cast("Tokens", reply).ids[0])) is not None:
                give(whole)
                _open_fast_path(self.answer if alone else None, generation, detokenizer, kept)
                return
            if isinstance(reply, Started) or not reply.ids:
                versions.announce(reply.version, detokenizer.tokens)
                if isinstance(reply, Started) and asked is generate:
                    self._begun(reply, emit, generation, leads=leads)
                    task_status.started()
                return
            _close_fast_path(generation)
            _take(text, reply if candidate is None else candidate.noted(reply), give)
            # Leaving aborts the request: no further token is computed.
            if budget.ends(reply.ids, text, generate) or detokenizer.matched is not None or text.complete:
                generation.abandon()

        closing: tuple[int, ...] | None = None
        while closing is None or closing:
            async with self.decode.ask(asked, asked.sampling.tokens_max) as generation:
                if asked.prompt_logprobs:
                    pass_on(await self._take_scores(generation, prompt))
                    await self._echo(asked, prompt, choice, emit)
                finished = await generation.relay(pass_on)
            if closing := budget.closing():
                asked = budget.rest(generate)
                _take(text, Tokens(closing), give)
        cut = finished is not None and finished.reason is FinishReason.LENGTH and detokenizer.matched is None
        await self._rest(text, give, cut=cut)
        self._reasoning += text.reasoning_tokens
        if finished is None and text.complete:
            # As where a stop string ends a choice, its tokens are those that have come.
            finished = Finished(FinishReason.STOP, Usage(0, detokenizer.tokens - asked.resumed_tokens))
        emit(await self._end(detokenizer, finished, versions, kept, asked.resumed_tokens))

    def _begun(
        self, started: Started, emit: Emit, generation: Answer[Started | Tokens, Finished], *, leads: bool
    ) -> None:
        """Note that the prompt of a choice is computed, which ends a warm-up, and pass on the first beginning."""
        self._cached += started.cached_tokens if leads else 0
        if not self._started:
            self._started = True
            emit(started if started.scores is None else evolve(started, scores=None))
        if self.request.warm_up:
            generation.abandon()

    async def _take_scores(self, generation: Answer[Started | Tokens, Finished], prompt: int) -> Started:
        """Wait for the first reply, and keep the scores of a prompt in it; the replies behind it wait meanwhile."""
        started = await anext(generation, None)
        if not isinstance(started, Started):
            raise EngineLost("the answer ended before it had begun")
        if started.scores is None:
            sentence = "the engine of this model computes no log probabilities of a prompt"
            raise Unsupported(sentence, param=self.request.param("echo"))
        self._scores[prompt] = started.scores
        return started

    async def _rest(self, text: StagedText, emit: Emit, *, cut: bool) -> None:
        """Pass on the rest of the text of a choice, which may have been cut at its limit of tokens."""
        if not self.request.warm_up:
            text.finish(cut=cut)
        await trio.lowlevel.checkpoint()
        while text.waits:
            for piece in text.give():
                emit(piece)
            await trio.lowlevel.checkpoint()

    async def _end(
        self,
        detokenizer: IncrementalDetokenizer,
        finished: Finished | None,
        versions: VersionRecord,
        kept: JudgedChoice | None,
        resumed: int,
    ) -> ChoiceEnded:
        """Return how a choice ended, once it is judged, and count its tokens; its last prompt has those `resumed`."""
        ended = self._ended(detokenizer, finished, versions, resumed)
        if kept is not None:
            await self._judge_whole(kept, ended)
        return ended  # noqa: ASYNC910  # most choices wait for nothing

    def _ended(
        self, detokenizer: IncrementalDetokenizer, finished: Finished | None, versions: VersionRecord, resumed: int
    ) -> ChoiceEnded:
        """Return how a choice ended, and count its tokens."""
        choice = detokenizer.choice
        if self.request.warm_up:
            return ChoiceEnded(FinishReason.LENGTH, choice)
        if detokenizer.matched is not None:
            self._completion += detokenizer.tokens
            return ChoiceEnded(FinishReason.STOP, choice, detokenizer.matched, versions.spans(detokenizer.tokens))
        if finished is None:
            raise EngineLost("the answer ended without a result")
        tokens = finished.usage.completion_tokens + resumed
        self._completion += tokens
        return ChoiceEnded(finished.reason, choice, finished.matched, versions.spans(tokens))

    def _keeping(self, emit: Emit) -> tuple[JudgedChoice | None, Emit]:
        """Return what keeps a choice for its judges, and the `emit` that fills it; None without a judge.

        A candidate is judged only if it is chosen.
        """
        if self.judges == Judges() or isinstance(emit, CandidateChoice):
            return None, emit
        kept = JudgedChoice(emit, self.judges.calls is not None)
        return kept, kept.give

    async def _judge_whole(self, kept: JudgedChoice, ended: ChoiceEnded) -> None:
        """Judge a choice, and pass its calls on; the text of one that was cut at its number of tokens is not whole."""
        await trio.lowlevel.checkpoint()
        matched, whole = ended.matched, ended.reason is FinishReason.STOP
        ends_by_itself = matched not in self.request.stop_token_ids or matched in self.model.eos_token_ids
        own_stop = None if isinstance(matched, int) and ends_by_itself else matched
        # Beside tools, an answer is either calls or the text of its grammar.
        if self.judges.text is not None and whole and not kept.calls:
            await self.judges.text("".join(kept.texts), own_stop)
        if self.judges.calls is not None:
            await self.judges.calls.judge(kept.calls, ended=whole, matched=own_stop)
            await kept.release()

    def _staged(
        self, detokenizer: IncrementalDetokenizer, generate: Generate, scored_max: int = SCORED_A_PIECE
    ) -> StagedText:
        """Return the text of a choice behind the stage of its model's format."""
        model = self.model
        stage: Stage = PLAIN
        if self.request.turns and model.answers != NO_FORMATS:
            offer = Expected(self.tools, model.thinks(self.request, generate.tokens))
            stage = make_stage(model.answers, offer)
        if stage is not PLAIN:
            detokenizer.markers = model.markers
        # A budget counts every token.
        table = model.whole_tokens if self.request.thinking_token_budget is None else None
        return StagedText(detokenizer, stage, table, scored_max, one_call=not self.request.parallel_calls)

    def _detokenizer(self, generate: Generate, choice: int, *, scored: bool) -> IncrementalDetokenizer:
        request, model = self.request, self.model
        return IncrementalDetokenizer(
            model.tokenizer,
            self.stops,
            frozenset(request.stop_token_ids),
            frozenset() if request.ignore_eos else model.eos_token_ids,
            request.tokens_min,
            request.stop_included,
            choice,
            PendingLogprobs(model.tokenizer.id_to_token, model.data) if scored else None,
            request.token_ids,
            model.whole_tokens,
            generate.tokens,
            # Behind an echo an evaluation counts on an entry for each token, whatever the token is.
            scores_end=request.scores_prompts,
        )


def _take(text: StagedText, tokens: Tokens, give: Emit) -> None:
    """Take the next tokens of a choice, and give out the pieces that are certain now."""
    text.take(tokens.ids, tokens.logprobs)
    for piece in text.give():
        give(piece)


def _open_fast_path(
    answer: RelayedAnswer | None, source: RelayedAnswer, detokenizer: IncrementalDetokenizer, kept: JudgedChoice | None
) -> None:
    """Let whole tokens of `source` skip the stages before `answer`, if its asker has a fast path; `kept` gets texts.

    What comes behind a call that waits for its judgement waits as well.
    """
    path, texts = None if answer is None else answer.fast_path, detokenizer.whole_tokens
    if path is not None and texts is not None and not path.is_open and not (kept is not None and kept.waits):

        def record(ids: Sequence[int], _: float) -> None:
            detokenizer.record_whole(ids)
            if kept is not None:
                kept.texts.extend([whole.text for token in ids if (whole := texts[token]) is not None])

        path.attach(source, answer, record)
        # The payload of the asker's path is a reply of `answer`: `Text` for a token.
        cast("FastPath[Text]", path).open(texts)


def _close_fast_path(source: RelayedAnswer) -> None:
    if source.fast_path is not None:
        source.fast_path.close()
