"""Priorities where KV memory is short: a scheduler admits higher ones first, and puts lower ones back for them.

SGLang has this for requests without a slot. Here it holds for those without memory, too. It does not need
`enable_priority_scheduling`, which adds a label to each of the engine's metrics. Requests of one priority keep SGLang's
own order. A request put back is retracted: it goes on later from where it was. From then on, until the engine is idle,
lower ones leave a part of the memory, or each small request would put one back. Each rank decides by the state common
to all.

Only engines of whole requests with SGLang's default policy have it: the other policies have an order of their own, and
a decode behind a prefill may have nowhere to keep the cache of a request that is put back. Written for SGLang 0.5.23.
"""

POLICY = "fcfs"
DEFAULT = 0  # of requests that name none, such as those of the warm-up
CLIPPED_MAX = 4096  # the tokens of an answer that SGLang counts at most
PART = 16  # the part of the memory that lower requests leave to others, once one has been put back: a sixteenth


def order_by_priority(scheduler, adder, batch, no_room):
    """Patch SGLang's classes; `no_room` is the result of an admission that fails for memory."""
    init, validate = scheduler.init_schedule_policy, scheduler._set_or_validate_priority
    admit, keep_first = adder.add_one_req, batch._get_decode_retraction_order

    def init_schedule_policy(self):
        init(self)
        if self.schedule_policy == POLICY and self.server_args.disaggregation_mode == "null":
            self.policy.enable_priority_scheduling = self.enable_priority_preemption = True

    def _set_or_validate_priority(self, req):
        req.priority = DEFAULT if req.priority is None else req.priority
        return validate(self, req)

    leaves_part = False  # whether lower requests leave memory, since one has been put back

    def add_one_req(self, req, *args, **kwargs):
        nonlocal leaves_part
        leaves_part = leaves_part and bool(self.running_batch.reqs or self.can_run_list)
        if (
            leaves_part
            and req.priority < DEFAULT
            and _memory_left(self, req) < self.token_to_kv_pool_allocator.size / PART
        ):
            return no_room
        result = admit(self, req, *args, **kwargs)
        while result is no_room and _put_one_back(self, req.priority):
            leaves_part = True
            result = admit(self, req, *args, **kwargs)
        return result

    def _get_decode_retraction_order(reqs):
        return sorted(keep_first(reqs), key=lambda index: -reqs[index].priority)

    scheduler.init_schedule_policy, scheduler._set_or_validate_priority = (
        init_schedule_policy,
        _set_or_validate_priority,
    )
    adder.add_one_req = add_one_req
    batch._get_decode_retraction_order = staticmethod(_get_decode_retraction_order)


def _memory_left(adder, req):
    """Return the tokens of memory that are neither used nor promised, if a request gets all that it may need."""
    answer = min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIPPED_MAX)
    return adder.rem_total_tokens - (len(req.full_untruncated_fill_ids) - req.prefix_len) - answer


def _put_one_back(adder, priority):
    """Retract a running request of a lower priority, with the fewest tokens of the lowest; False if there is none.

    SGLang's `preempt_to_schedule` counts what a request may come to need, and not the memory that it holds already.
    """
    batch = adder.running_batch
    lower = [index for index, req in enumerate(batch.reqs) if req.priority < priority and not req.finished()]
    if not lower:
        return False
    chosen = min(lower, key=lambda index: (batch.reqs[index].priority, len(batch.reqs[index].output_ids)))
    req = batch.reqs[chosen]
    adder.memory_budget.total_offset -= adder._get_running_request_total_token_offset(req)
    batch.release_req(chosen, len(batch.reqs) - 1)
    batch.filter_batch(keep_indices=[index for index in range(len(batch.reqs)) if index != chosen])
    adder.preempt_list.append(req)
    return True
