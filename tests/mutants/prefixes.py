"""Bugs of routing by prefix: of what engines tell, how it is passed on, what an index keeps, and how a worker is chosen."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "protocol/block_hashes.py": (
        Bug("tenants share prompts", "sha256(_SALT_TAG + cache_salt.encode()).digest()", 'b""'),
        Bug("a block does not depend on those before it", "before = hashed(before + packed", "before = hashed(packed"),
    ),
    "protocol/kv_events.py": (
        Bug(
            "a reply may have any number of blocks",
            "    if sum(max(1, len(event.hashes)) for event in events) > HASHES_MAX:",
            "    if False:",
        ),
    ),
    "actors/engines/block_log.py": (
        Bug("long names of adapters make a reply too large", ' + len(event.lora or "") // HASH_BYTES', ""),
        Bug(
            "a reader that comes back has lost its life",
            "if self.life == log.life and self.since else None",
            "if self.since else None",
        ),
        Bug("an interrupted list counts as complete", "number if place == last else 0", "number"),
        Bug(
            "what changes during a list is lost",
            "    number = log.number\n",
            "    number = log.number + 1\n",
        ),
        Bug("a list that has no room for all blocks never ends", "min(total, replies_max) - 1", "total - 1"),
        Bug(
            "a reader from the future waits for ever",
            "if not 0 <= missed <= len(self._tail):",
            "if missed > len(self._tail):",
        ),
        Bug(
            "an engine that is gone keeps its second rank",
            "for rank in {rank for rank, *_ in self._blocks}",
            "for rank in (0,)",
        ),
    ),
    "actors/engines/simulated/held_request.py": (
        Bug(
            "of waiting requests the first one's prefix is evicted first",
            "in reversed([*islice(waiting, PROTECTED_MAX)]):",
            "in [*islice(waiting, PROTECTED_MAX)]:",
        ),
        Bug(
            "each of a burst of prompts computes what all share",
            " and self.digests[end - 1] in computing\n",
            " and False\n",
        ),
        Bug(
            "a prompt that has begun finds what others compute",
            "        if self.has_begun:\n            return 0\n",
            "",
        ),
        Bug(
            "what a preempted request finds again counts as cached",
            "        if not self.given:\n            self.cached = self.computed\n",
            "        self.cached = self.computed\n",
        ),
    ),
    "actors/engines/simulated/batch.py": (
        Bug(
            "what a waiting request is to find is evicted for the prompt before it",
            "held.lease = self.memory.take(held.reusable(size), -(-most // size), needed)",
            "held.lease = self.memory.take(held.reusable(size), -(-most // size))",
        ),
    ),
    "actors/engines/simulated/kv_memory.py": (
        Bug("an answer that grows evicts what is needed next", "self._make_room(1, needed)", "self._make_room(1, ())"),
        Bug("of a prefix that is touched the beginning is evicted first", "in reversed(cached):", "in cached:"),
        Bug(
            "an eviction is not told",
            "            digest, _ = self._idle.popitem(last=False)\n            self.events.removed(digest)\n",
            "            self._idle.popitem(last=False)\n",
        ),
        Bug("a flush is not told", "            self.events.cleared()\n", "            pass\n"),
    ),
    "actors/publisher.py": (
        Bug(
            "a change is told late",
            "                await changed.park()\n",
            "                await changed.park()\n                await trio.sleep(every_s)\n",
        ),
        Bug("each change is told alone", "every_s if reader.is_caught_up else 0", "0"),
        Bug("of all blocks one part is told at a time", "every_s if reader.is_caught_up else 0", "every_s"),
        Bug(
            "an engine that could not be watched is not watched again",
            "        await trio.sleep(pause_s)\n",
            "        break\n",
        ),
        Bug(
            "the pause after a hiccup never becomes shorter",
            "            pause_s = RETRY_S\n        await",
            "            pass\n        await",
        ),
        Bug("what an engine told before it could not be watched is believed", "        forget()\n", ""),
        Bug(
            "a lost engine keeps its blocks",
            "        finally:\n            published.blocks.clear()\n",
            "        finally:\n",
        ),
        Bug(
            "a watcher that has left keeps its place",
            "                watchers.release_on_behalf_of(call)\n",
            "                pass\n",
        ),
        Bug(
            "an idle engine tells its load again and again",
            "if published.loads is not None and published.loads != sent:",
            "if published.loads is not None:",
        ),
    ),
    "actors/prefix_subscriber.py": (
        Bug(
            "after a flush nothing is expected until it is told",
            "if self.ranks_known and self.named_ranks < self.ranks:",
            "if False:",
        ),
        Bug(
            "after the second flush nothing is expected until it is told",
            "        if _ends_lives(events):\n            self.named_ranks = 0\n",
            "",
        ),
        Bug("a gap is not noticed", "return events.number == self.since + len(events.events)", "return True"),
        Bug("events of another life are applied", "if events.life != self.life:", "if False:"),
        Bug("a worker that lies is believed again at once", "                    await trio.sleep(DISTRUST_S)\n", ""),
        Bug(
            "a worker that lies is still believed",
            "                    self._forget()\n                    await trio.sleep(DISTRUST_S)",
            "                    await trio.sleep(DISTRUST_S)",
        ),
        Bug(
            "a liar is limited only while its engine is up",
            "blocks_max = self.blocks_max\n",
            "blocks_max = self.blocks_max if info else 10**9\n",
        ),
        Bug("a worker that has gone is remembered for ever", "if subscription.gone_for_s > FORGET_S:", "if False:"),
        Bug(
            "a new list of blocks is added to the old one",
            "        if events.reset:\n            self._forget()\n        self.index.apply",
            "        self.index.apply",
        ),
        Bug(
            "a list of all blocks is waited with as all else", "part = 1.0 if self.since else LISTED_PART", "part = 1.0"
        ),
        Bug("messages without blocks are listened to all the time", "MESSAGE_BLOCKS + sum(", "sum("),
        Bug("a worker that tells little is waited with", "return self.rests_until > now + REST_MIN_S", "return True"),
        Bug(
            "a worker that tells without end is listened to all the time",
            "                if self._tells_too_much(events):",
            "                if False:",
        ),
        Bug(
            "what a new list of blocks lacks is expected all the same",
            "        if self.since and not was_known:\n            self.index.tell_known(self.name)\n",
            "",
        ),
        Bug(
            "what a list of blocks has not told of yet is gone",
            "        if self.since and not was_known:",
            "        if not was_known:",
        ),
        Bug(
            "a worker is asked for all of its blocks each time",
            "WatchBlocks(self.life, self.since), credit",
            "WatchBlocks(), credit",
        ),
        Bug(
            "the credit of a question is not enough for all blocks of a large cache",
            "credit = CREDIT + all_max // REPLY_HASHES_MAX",
            "credit = CREDIT",
        ),
        Bug(
            "a worker that ends its answers at once is asked again at once",
            "if self.since != number:  # its credit",
            "if True:  # its credit",
        ),
    ),
    "actors/routing/prefix_index.py": (
        Bug(
            "what is computed again in the same message is told to be gone",
            "                gone += event.hashes\n",
            "                gone += event.hashes\n                if self.on_removed:\n"
            "                    self.on_removed({holder: event.hashes})\n",
        ),
        Bug(
            "of an incomplete list the gaps are told", "if removed and worker not in self.unknown and", "if removed and"
        ),
        Bug(
            "once all blocks of one worker are known those of all may be gone",
            "self.on_removed(dict.fromkeys(holder for holder in self._bits if holder[0] == worker))",
            "self.on_removed(dict.fromkeys(self._bits))",
        ),
        Bug("an eviction is told as a flush", "removed.setdefault(holder, [])", "removed.setdefault(holder, None)"),
        Bug(
            "of prompts in turns some never count as used",
            "hash((self._matches, *hashes[:1])) % TOUCHED_ONE_OF == 0",
            "self._matches % TOUCHED_ONE_OF == 0",
        ),
        Bug("a long prompt holds up the loop", "max(0, end - TURN_MAX)", "0"),
        Bug(
            "the beginning of a long prompt never counts as used",
            "            if not self._untouched:\n",
            "            if self._untouched:\n",
        ),
        Bug("a sweep leaves a part of a shard", "for number in self._unswept[-TURN_MAX:]:", "for number in ():"),
        Bug("a bit is used again before it was removed", "taken = self._used | self._retired", "taken = self._used"),
        Bug(
            "a retired worker still matches",
            "having, count, total = list[tuple[int, int]](), self._used,",
            "having, count, total = list[tuple[int, int]](), self._used | self._retired,",
        ),
        Bug("a worker has a block more of a prompt than it has", "        return last\n", "        return last + 1\n"),
        Bug("the whole of a sweep's end is taken for clean", "self._retired &= ~gone", "self._retired = 0"),
        Bug(
            "blocks of an adapter match all prompts",
            "elif event.medium != GPU or event.lora is not None:",
            "elif event.medium != GPU:",
        ),
        Bug(
            "blocks on a disk match as if they were in memory",
            "elif event.medium != GPU or event.lora is not None:",
            "elif event.lora is not None:",
        ),
        Bug(
            "the beginning of a prefix is dropped first",
            "for number in reversed(hashes):  # so",
            "for number in hashes:  # so",
        ),
        Bug("the index has no limit", "if len(shard) >= shard_max:", "if False:"),
        Bug("a worker drives out the blocks of all others", "if not crowding or bits & crowding:", "if True:"),
        Bug(
            "a worker with many ranks drives out the blocks of all others",
            "own = self._workers[worker]",
            "own = self._bits.get((worker, 0), 0)",
        ),
        Bug(
            "a worker that clears its cache again and again drives out the blocks of all others",
            "            self._used &= ~bit\n",
            "            self._used &= ~bit\n            self._workers[holder[0]] &= ~bit\n",
        ),
        Bug(
            "blocks that are stored again count again",
            "                if not before & bit:\n",
            "                if True:\n",
        ),
        Bug(
            "blocks that are dropped still count",
            "                        self._discount(bits)\n",
            "                        pass\n",
        ),
    ),
    "actors/routing/kv.py": (
        Bug(
            "the last token is expected in a cache",
            "common, len(request.tokens) - 1,",
            "common, len(request.tokens),",
        ),
        Bug("a prompt is expected in pages of any size", "if not load.page_size:", "if True:"),
        Bug("what is queued costs nothing", " + settings.queued_weight * load.queued", ""),
        Bug(
            "what is computed anyway counts as much as what is not",
            "uncached_weight * uncached",
            "queued_weight * uncached",
        ),
        Bug(
            "a burst is sent to one worker",
            "settings.load_tokens * (load.busy +",
            "settings.load_tokens * (0 * load.busy +",
        ),
        Bug(
            "prompts that come together are computed by everybody",
            "overlap = max(overlap, cached, min(computing // size, self.reusable // size) * size)",
            "overlap = max(overlap, cached)",
        ),
        Bug(
            "near equals are always the first",
            "near[int(self.chance() * len(near))] if len(near) > 1 else near[0]",
            "near[0]",
        ),
        Bug(
            "a choice that comes to nothing moves a session",
            "        return evolve(chosen, on_taken=partial(self._take",
            "        self.sessions.set(chosen.load.leg, session, chosen.load.name)\n"
            "        return evolve(chosen, on_taken=partial(self._take",
        ),
        Bug("a full memory is no reason", "            cost += load.kv_tokens_max\n", "            pass\n"),
        Bug("an answer is expected in a cache that was flushed meanwhile", " or bit != self._bit", ""),
        Bug(
            "an answer that is told of in part is expected no more",
            "recent.add(bit, hashes[told:])",
            "recent.add(bit, hashes)",
        ),
        Bug(
            "what is told of is expected all the same",
            "self.index.on_stored, self.index.on_removed = self.recent.told, self.counted.may_be_gone",
            "self.index.on_removed = self.counted.may_be_gone",
        ),
        Bug(
            "what is evicted is expected all the same",
            "self.index.on_stored, self.index.on_removed = self.recent.told, self.counted.may_be_gone",
            "self.index.on_stored = self.recent.told",
        ),
        Bug(
            "a request that has begun counts on its prefix",
            "        self.policy.counted.count(self._counted, ())\n        for prefix",
            "        for prefix",
        ),
        Bug(
            "a request that has not looked begins",
            "        if self.policy.counted.is_doubted(self._counted):\n            self._look()\n",
            "",
        ),
        Bug(
            "who leaves lets those look that count on other blocks",
            "self.policy.counted.doubt(holder, blocks.hashes[told:], self._counted.turn)",
            "self.policy.counted.doubt(holder, None, self._counted.turn)",
        ),
        Bug(
            "what was forgotten of a worker is gone",
            "        if holder[0] in index.unknown:  # it looks again once all blocks of the worker are known\n"
            "            return\n",
            "",
        ),
        Bug(
            "what a request that leaves was to compute is expected",
            "                self.policy.counted.doubt(holder, blocks.hashes[told:], self._counted.turn)\n",
            "                del told\n",
        ),
        Bug(
            "after one eviction no further one is heard of",
            "            self.lost = self.overlap - found\n            self._count()\n",
            "            self.lost = self.overlap - found\n",
        ),
        Bug(
            "what is computed before a prompt is not expected once its cache has evicted it",
            "found = max(found, self.policy.expected.blocks_before(prefix) * blocks.page_size)",
            "pass",
        ),
        Bug(
            "what a prompt that leaves was to compute is expected",
            "        if self._expect_no_more():  # those",
            "        if self._expect_no_more() and False:  # those",
        ),
    ),
    "actors/routing/expected_prefixes.py": (
        Bug(
            "each of equal prompts is to find what the others compute",
            "row[max(0, place - GROUP_MAX) : place]",
            "[*row[max(0, place - GROUP_MAX) : place], *row[place + 1 :]]",
        ),
        Bug(
            "the prompts of a worker are kept for ever by their first block",
            "            del self._rows[prefix.worker, first]\n",
            "            pass\n",
        ),
        Bug(
            "the prompts before one are searched however many they are",
            "row[max(0, place - GROUP_MAX) : place]",
            "row[:place]",
        ),
    ),
    "actors/routing/counted_blocks.py": (
        Bug("an empty cache has what was counted on", "(hashes is None or not", "(hashes is not None and not"),
        Bug(
            "a worker that tells much holds up the others",
            "                    self._doubted[holder] = prefix.turn + 1  # behind the other holders\n",
            "                    self._doubted = {holder: prefix.turn + 1, **self._doubted}\n",
        ),
        Bug("a liar lets all requests look", "        self.look(LOOKS_MAX)", "        self.look(10**6)"),
        Bug("a later doubt hides an earlier one", "min(turn, self._doubted.get(holder, turn))", "turn"),
        Bug("the last of a queue stays in doubt", "if place + 1 < len(queue.prefixes):", "if True:"),
        Bug(
            "of a block that two count on, one that leaves takes both",
            "            if not queue.numbers[number]:\n                del",
            "            if True:\n                del",
        ),
        Bug(
            "a holder is kept when nobody counts on it",
            "            del self._queues[prefix.holder]\n            self._doubted",
            "            self._doubted",
        ),
    ),
    "actors/engines/sglang/host/waiting_prefixes.py": (
        Bug("most passes touch nothing", "    policies.WAITING_PREFIX_REFRESH_INTERVAL = 1\n", ""),
        Bug("each pass touches all that waits", "waiting_queue[:PROTECTED_MAX]", "waiting_queue"),
    ),
    "actors/engines/sglang/host/step_events.py": (
        Bug(
            "what is evicted for a step is told when it has ended",
            "        scheduler.kv_events_publisher.publish_kv_events()\n",
            "",
        ),
    ),
    "actors/engines/sglang/host/shared_prompts.py": (
        Bug(
            "each of a burst of prompts computes the same beginning",
            "        if steps.shared and waits(adder, req, steps.now):\n",
            "        if False:\n",
        ),
        Bug(
            "a prompt waits for one that found its beginning elsewhere",
            "if not self.start < end <= min(self.end, len(self.tokens)) or",
            "if not end <= min(self.end, len(self.tokens)) or",
        ),
        Bug(
            "a prompt waits for the cache of another tenant",
            " or self.keys != (req.extra_key, req.cache_salt)",
            "",
        ),
        Bug("a prompt waits for one that only looks like it", " and self.tokens[:end] == tokens[:end]", ""),
        Bug("a prompt waits where nothing is cached", 'getattr(cache, "disable", True) or ', ""),
        Bug("a prompt waits for what it may not look for", "end > req._compute_max_prefix_len(len(tokens))", "False"),
        Bug(
            "a scheduler that runs ahead computes the same beginning twice",
            "[*unknown, *_computed(adder.can_run_list)]",
            "_computed(adder.can_run_list)",
        ),
        Bug(
            "a prompt waits for a step whose result is known",
            "(computed for computed in self.last if not computed.is_known)",
            "(computed for computed in self.last)",
        ),
        Bug("a prompt waits in vain for ever", "if count >= WAITS_MAX or not any(", "if not any("),
        Bug("waits that were of use count as well", "count if req.prefix_len <= place else 0", "count"),
        Bug(
            "what a waiting prompt needs is given to a later one",
            "            adder.memory_budget.total_offset += _needed(adder, req, answer_max)",
            "            pass",
        ),
        Bug(
            "a prompt that waits shuts the engine until an answer has ended",
            "if result is results.NO_TOKEN and steps.waiting:",
            "if False:",
        ),
        Bug(
            "a slot of a waiting prompt is given to a later one",
            "len(adder.can_run_list) + waiting < slots",
            "len(adder.can_run_list) < slots",
        ),
        Bug("a prompt of many steps passes those that wait", " - req.prefix_len > chunk:", " < 0:"),
        Bug("a prompt waits in a pipeline", "stages() == 1 and _shares(self)", "_shares(self)"),
        Bug("others make room for a prompt that waits", " or adder.preempt_list:", ":"),
        Bug("a prompt waits for answers", "if id(req) not in answers", ""),
        Bug("a prompt waits where a window alone is kept", " or cache.supports_swa()", ""),
    ),
    "actors/routing/recent_blocks.py": (
        Bug("recent blocks are expected for ever", "next(iter(rows.values())).ends_at <= now", "False"),
        Bug("a row that is told of in part is expected no more", "self._put(bit, row.after(", "(bit, row.after("),
        Bug("a row ends what another worker has told of", "if holders.get(number, 0) & bit:", "if number in holders:"),
        Bug("a row begins anew behind what is told of", "self.start + count", "count"),
        Bug("what is told of is kept for another moment", "_Row(self.ends_at, ", "_Row(self.ends_at + RECENT_S, "),
        Bug("an older row hides what a later one has besides", "        self.told(bit, hashes)  #", "        pass  #"),
        Bug("recent blocks have no limit", "if len(self._rows) > RECENT_MAX:", "if False:"),
        Bug(
            "recent blocks are those of any worker",
            "rows.get((bit, hashes[count]))",
            "rows.get((4, hashes[count]))",
        ),
        Bug("one block more than is common counts as recent", "low, high = 1, min(", "low, high = 1, 1 + min("),
    ),
    "actors/routing/routed_request.py": (
        Bug(
            "an answer is not expected in the cache",
            "            route.answered(self._sent, finished.reason)\n",
            "            pass\n",
        ),
        Bug(
            "an answer that was continued is expected as if one worker had computed it",
            "if is_whole and not self._moving:",
            "if not self._moving:",
        ),
    ),
    "actors/routing/route.py": (
        Bug(
            "what was lost is predicted",
            "(self.chosen_prefill or self.chosen).choice.overlap - self.lost",
            "(self.chosen_prefill or self.chosen).choice.overlap",
        ),
        Bug(
            "the token that stops an answer is never computed",
            "reason is not FinishReason.STOP or info is",
            "True or info is",
        ),
        Bug("the last token of every answer is computed", "reason is not FinishReason.STOP or info is", "info is"),
        Bug("no engine computes ahead", " or not info.computes_ahead", ""),
        Bug("a prompt is expected for ever", "            taken.ended()\n", "            pass\n"),
        Bug(
            "a policy does not hear that a prompt is computed",
            "                taken.begun()\n",
            "                pass\n",
        ),
        Bug("what is cached counts as to be computed", "max(0, self._prompt - self.cached)", "self._prompt"),
        Bug(
            "what an earlier request may compute counts as computed",
            "        return (self.chosen_prefill or self.chosen).choice.cached\n",
            "        return self.overlap\n",
        ),
    ),
    "supervisor/cluster/workers.py": (
        Bug(
            "a worker has pages of a size that is not known",
            "(info.kv_tokens_max, info.page_size)",
            "(info.kv_tokens_max, 0)",
        ),
        Bug(
            "a computed prompt is queued until its answer ends",
            "            if pending.discard(request_id):\n                self.directory.load_changed(self, asker)\n                return",
            "            if pending is None:\n                return",
        ),
        Bug(
            "a router hears of its own prompts",
            "queued = self.queued - (0 if own is None else own.tokens)",
            "queued = self.queued",
        ),
        Bug(
            "others do not hear that a gateway's own prompt is computed",
            "self.directory.load_changed(self, None)  # of which other nodes are to hear",
            "self.directory.prefill_done(cast('RemoteWorker', self))",
        ),
    ),
    "actors/text/prompt_blocks.py": (
        Bug(
            "images are hashed by their placeholders",
            "tokens = first.tokens[: _text_tokens(first, media)]",
            "tokens = first.tokens",
        ),
        Bug(
            "the salt of a request is forgotten",
            "partial(_blocks, tokens, page_sizes, first.cache_salt)",
            "partial(_blocks, tokens, page_sizes, None)",
        ),
    ),
    "actors/decode.py": (
        Bug(
            "prompts in the cache wait for each other",
            "pending.fits_behind_longer(request.uncached_tokens)",
            "pending.fits_behind_longer(len(request.tokens))",
        ),
    ),
}
