"""The host's own parts, with SGLang imported and no engine: liveness, failures, warm-up, outputs, metrics, attention on a CPU."""

from __future__ import annotations

import pytest

from tests.rig.host_parts import HEAD, RunParts

pytestmark = pytest.mark.engine

LIVENESS = """
import tempfile
from pathlib import Path
from actors.engines.host import liveness
from actors.engines.host.liveness import LivenessProbe
from actors.engines.sglang.host.liveness import scheduler_probe

SPIN, SLEEP = "exec('while True: pass')", "time.sleep(60)"
RUNS = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"

class Manager:
    answers = False
    asked = 0
    async def slow_down(self, request):
        assert request.forward_sleep_time is None
        self.asked += 1
        if not self.answers:
            await asyncio.Event().wait()

async def main():
    def process(code, before=""):
        code = before + "import time; print(flush=True);" + code
        started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        started.stdout.readline()  # to start an interpreter is to compute as well
        return started
    busy, waiting = process(SPIN), process(SLEEP)
    compiling, sleeping_child = process(RUNS.format(SPIN)), process(RUNS.format(f"import time; {SLEEP}"))
    polling = process(f"import threading; threading.Thread(target=exec, args=({SPIN!r},)).start(); {SLEEP}")
    zombie_child = process(SLEEP, "import subprocess; subprocess.Popen(['true']);")
    every = busy, waiting, sleeping_child, polling, zombie_child, compiling
    on_disk = Path(tempfile.mkdtemp()) / "stat"
    on_disk.write_text("1 (a b) D 0 0 " + "0 " * 40)
    async def alive(manager, *processes, running, meanwhile=lambda probe: None, ranks=1):
        probe = scheduler_probe(manager, [each.pid for each in processes], ranks)
        asyncio.get_running_loop().call_later(0.2, meanwhile, probe)
        try:
            await asyncio.wait_for(probe.probe(lambda: running), 5.0)
        except TimeoutError:
            return False
        return True
    async def lost(*some, **options):
        return not await alive(*some, **options)
    async def reads(stat):
        probe = LivenessProbe(asyncio.Event().wait, [stat], processes=[])
        alive = await asyncio.wait_for(probe.probe(lambda: True), 10.0)
        liveness.DISK_S = 1.0
        try:
            await asyncio.wait_for(probe.probe(lambda: True), 3.0)
        except TimeoutError:
            return alive.held_up
        return False
    living = Manager()
    living.answers = True
    facts = {
        "it answers": alive(living, waiting, running=False),
        "any output is an answer": alive(Manager(), waiting, running=False, meanwhile=lambda probe: probe.on_output()),
        "a long step counts as alive": alive(Manager(), busy, running=True),
        "one that computes without a request is lost": lost(Manager(), busy, running=False),
        "one that does not compute a request is lost": lost(Manager(), waiting, running=True),
        "a thread that waits for a compiler counts as alive": alive(Manager(), compiling, running=True),
        "so do all ranks, of which one waits for a compiler": alive(Manager(), waiting, compiling, running=True),
        "a compiler that no request waits for counts for nothing": lost(Manager(), compiling, running=False),
        "a child that sleeps counts for nothing": lost(Manager(), sleeping_child, running=True),
        "a child that has ended counts for nothing": lost(Manager(), zombie_child, running=True),
        "another thread of the scheduler counts for nothing": lost(Manager(), polling, running=True),
        "a thread that waits for a disk counts as alive": reads(on_disk),
        "one rank of two waits for ever": lost(Manager(), busy, waiting, running=True),
        "of independent ranks one computes": alive(Manager(), waiting, busy, waiting, running=True, ranks=2),
        "the process before independent ranks computes nothing": lost(Manager(), busy, waiting, running=True, ranks=2),
    }
    async def check(facts):
        for fact, holds in zip(facts, await asyncio.gather(*facts.values())):
            assert holds, fact
    await check(facts)
    polling.kill()
    for stopped in (busy, sleeping_child):
        os.kill(stopped.pid, signal.SIGSTOP)
    await check({f"a stopped one is lost: {at}": lost(Manager(), each, running=True) for at, each in enumerate(every[:3:2])})
    liveness.BUILD_S = 2.5
    probe = scheduler_probe(Manager(), [compiling.pid])
    await asyncio.wait_for(probe.probe(lambda: True), 2.5)
    await asyncio.sleep(1.5)
    try:
        await asyncio.wait_for(probe.probe(lambda: True), 3.0)
    except TimeoutError:
        pass
    else:
        raise AssertionError("a compiler that never ends counts for ever")
    quiet = Manager()
    probe = scheduler_probe(quiet, [waiting.pid])
    for _ in range(3):
        try:
            await asyncio.wait_for(probe.probe(lambda: False), 0.1)
        except TimeoutError:
            pass
    assert quiet.asked == 1, "one question at a time, however often it is asked for"
    for each in every:
        each.kill(); each.wait()

asyncio.run(main())
"""
FAILING = """
from actors.engines.adapter_table import AdapterTable
from actors.engines.sglang.host import server
from actors.engines.host.adapters import Adapters
from actors.engines.sglang.host.adapters import SglangAdapterLoader
from protocol.link import codec
from protocol.messages.engine import EngineInfo
from protocol.link.frames import Bye, Fail, Hello, Open
from protocol.messages.generation import Generate, Sampling
from protocol.link.peer import Peer
from protocol.token_ids import TokenIds

class Manager:
    enable_trace = False
    rid_to_state = {}
    async def generate_request(self, asked, _):
        if asked.rid == "good":
            raise ValueError("SGLang's own check")
        if asked.rid == "stuck":
            reason = {"type": "abort", "status_code": 500, "message": "Grammar accept_token failed: not accepted: 0"}
            yield {"meta_info": {"finish_reason": reason}}
            return
        raise KeyError("of SGLang's: " + asked.rid)

async def main():
    ours, theirs = socket.socketpair()
    engine = SimpleNamespace(tokenizer_manager=Manager(), get_all_child_pids=lambda: [], loop=asyncio.get_running_loop())
    info = EngineInfo("sglang", "1", 100, 100, 100, 100, 4, 1, honours_seed=False)
    adapters = Adapters(SglangAdapterLoader(engine.tokenizer_manager), "", None, AdapterTable(0))
    serving = asyncio.create_task(server.Host(engine, info, Peer("e", serves_max=20), theirs, None, adapters=adapters).link.serve())
    node, (reader, writer) = Peer("node", serves_max=0), await asyncio.open_connection(sock=ours)
    seen = []
    async def until(kind):
        before = len(seen)
        while not any(isinstance(each, kind) for each in seen[before:]):
            seen.extend(node.receive_data(await reader.read(65536)))
    await until(Hello)
    for stream, name in enumerate(["good"] * 9 + ["stuck"] * 9 + [f"bad{at}" for at in range(6)], 1):
        node.send(Open(stream, codec.encode(Generate(name, TokenIds.of([1]), Sampling(4))), 4))
        writer.write(node.data_to_send())
        await until(Fail)
        assert stream > 18 or not serving.done(), "a request that is refused is no failure of the engine"
    refused = {each.detail for each in seen if isinstance(each, Fail) and each.code == "engine_refused"}
    assert refused == {"SGLang's own check", "no token is left that the grammar and the request's other options allow"}
    if not isinstance(seen[-1], Bye):
        await until(Bye)
    details = {each.detail for each in seen if isinstance(each, Fail) and each.code == "internal"}
    assert details == {"the engine failed the request: KeyError"}, details
    reason = await serving
    assert seen[-1] == Bye("failing", reason), seen[-1]
    assert reason == "it failed 6 requests within 60 s, the last by KeyError: \\"of SGLang's: bad5\\"", reason

asyncio.run(main())
"""

WARM = """
from attrs import evolve
from actors.engines.sglang.host.warm_up import warm_up
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import GrammarKind

INFO = EngineInfo("x", "1", 20, 640, 640, 640, 8, 1, True, grammars=tuple(GrammarKind))

class Manager:
    flushed = 0
    tokens = 4
    ends = {"type": "length", "length": 4}
    def __init__(self, **changes):
        self.asked = []
        vars(self).update(changes)
    async def generate_request(self, asked, _):
        self.asked.append(asked)
        if self.ends is not None:
            yield {"meta_info": {"finish_reason": None}, "output_ids": [1] * min(self.tokens, 1)}
            yield {"meta_info": {"finish_reason": self.ends}, "output_ids": [1] * (self.tokens - 1)}
    mm_processor, busy_ranks = None, 0
    def auto_create_handle_loop(self):
        pass
    async def flush_cache_communicator(self, wanted):
        self.flushed += len(self.asked)
        ranks = [SimpleNamespace(success=self.flushed < 9, message="busy")]
        return ranks + [SimpleNamespace(success=False, message="busy too")] * self.busy_ranks

async def main():
    for mode, grammars, kinds in [("null", True, 3), ("prefill", True, 3), ("decode", True, 2), ("null", False, 2)]:
        manager = Manager()
        await warm_up(manager, INFO if grammars else evolve(INFO, grammars=()), mode)
        assert len(manager.asked) == manager.flushed == kinds, (mode, grammars)
        assert len({each.rid for each in manager.asked}) == kinds
        assert {each.bootstrap_host for each in manager.asked} == {None if mode == "null" else "2.2.2.2"}
        assert all(each.input_ids == [*range(20), *range(12)] for each in manager.asked)
    ranks = Manager()
    await warm_up(ranks, evolve(INFO, data_parallel=2), "prefill")
    assert [each.routed_dp_rank for each in ranks.asked] == [0, 1] * 3
    assert len({each.rid for each in ranks.asked}) == len({each.bootstrap_room for each in ranks.asked}) == 6
    assert all(each.bootstrap_room % 2 == each.routed_dp_rank for each in ranks.asked)
    small = Manager()
    await warm_up(small, evolve(INFO, request_tokens_max=7), "null")
    assert {(len(each.input_ids), each.sampling_params["max_new_tokens"]) for each in small.asked} == {(3, 3)}
    for broken, sentence in [
        (Manager(ends={"type": "abort", "message": "no memory"}), "its own first request was not answered: no memory"),
        (Manager(ends=None), "its own first request was not answered: it ended without a token"),
        (Manager(tokens=0), "its own first request was not answered: it ended without a token"),
        (Manager(flushed=9), "its first requests could not be forgotten: busy"),
        (Manager(busy_ranks=1), "its first requests could not be forgotten: busy too"),
    ]:
        try:
            await warm_up(broken, INFO, "null")
        except RuntimeError as error:
            assert str(error) == sentence, error
        else:
            raise AssertionError(f"it does not raise: {sentence}")

asyncio.run(main())
"""

OUTPUTS = """
import tempfile
from array import array
from pathlib import Path
from actors.engines.adapter_table import AdapterTable
from actors.engines.sglang.host import outputs, server
from actors.engines.host.adapters import Adapters
from actors.engines.sglang.host.adapters import SglangAdapterLoader
from actors.engines.sglang.host.outputs import Finish, Likeliest, Scored, StepOutput, StepReceiver, StepSender, step_output
from protocol.link import codec
from protocol.messages.engine import EngineInfo
from protocol.link.frames import Begun, Ended, Fail, Hello, Open, Step
from protocol.messages.generation import FinishReason, Generate, Logprob, Sampling
from protocol.token_ids import TokenIds
from protocol.link.peer import Peer

LENGTH, STOP = {"type": "length", "length": 2}, {"type": "stop", "matched": 7}
GONE = {"type": "abort", "message": "full", "status_code": 503}

def batch(ids, tokens, reasons, **logprobs):
    none = dict.fromkeys(f"{part}_{name}" for part in ("input", "output")
                         for name in ("token_logprobs_val", "top_logprobs_idx", "top_logprobs_val"))
    return SimpleNamespace(
        rids=ids, output_ids=[array("q", each) for each in tokens], finished_reasons=reasons,
        prompt_tokens=[10 + place for place in range(len(ids))], cached_tokens=[8] * len(ids),
        **(none | logprobs))

def sends_what_the_host_reads():
    assert step_output(batch(["a", "b", "c"], [[1], [], [2, 3]], [None, STOP, None]), "one") == StepOutput(
        ["a", "b", "c"], [1, 0, 2], [1, 2, 3], [8, 8, 8], {1: Finish(STOP, 11)}, {}, {}, "one")
    found = step_output(batch(["a", "b"], [[1], [2]], [None, None], output_token_logprobs_val=[[], [-0.5]],
                              output_top_logprobs_idx=[[], [[2, 4]]], output_top_logprobs_val=[[], [[-0.5, -1.0]]]), "one")
    assert found.logprobs == {1: Likeliest([-0.5], [[2, 4]], [[-0.5, -1.0]])}
    found = step_output(batch(["a", "b", "c"], [[1], [2], [3]], [None] * 3, input_token_logprobs_val=[[], [None, -0.5, -2], [None]],
                              input_top_logprobs_idx=[[], [None, [2], [4]], None], input_top_logprobs_val=[[], [None, [-0.25], [-1]], None]), "one")
    packed = Scored(1, array("f", [-0.5, -2]).tobytes(), array("i", [2, 4]).tobytes(), array("f", [-0.25, -1]).tobytes())
    assert found.scored == {1: packed, 2: Scored(0, b"", b"", b"")}, found.scored
    StepSender(SimpleNamespace(socket=None), lambda: "one").push_generation(None, {})  # not the first rank

async def until(holds):
    for _ in range(6000):
        if holds():
            return
        await asyncio.sleep(0.01)

async def receives_in_order():
    listener, (seen, ends) = outputs.listen(Path(tempfile.gettempdir())), ([], [])
    def handle(step):
        seen.append(step)
        if step.ids == ["bad"]:
            raise KeyError("a bad one")
    first, second = (StepSender(SimpleNamespace(socket="SGLang's"), lambda: "one") for _ in range(2))  # two schedulers
    first.push_generation(batch(["a"], [[0]], [None]), {})  # before anybody accepts
    StepReceiver(listener, handle, ends.append).start(asyncio.get_running_loop())
    for number in range(1, 300):
        long = [number] * 9999 if number % 50 == 0 else [number]  # longer than what is read at once, and short ones
        await asyncio.to_thread(first.push_generation, batch(["a"], [long] * 9, [None]), {})
    second.push_generation(batch(["b"], [[7]], [LENGTH]), {})
    second._socket.close()
    await until(lambda: len(seen) == 301)
    assert [step.tokens[0] for step in seen if step.ids == ["a"]] == list(range(300)), seen
    assert {len(step.tokens) for step in seen} == {1, 9, 9 * 9999}
    assert [step.finished for step in seen if step.ids == ["b"]] == [{0: Finish(LENGTH, 10)}] and not ends
    first.push_generation(batch(["bad"], [[7]], [None]), {})
    await until(lambda: ends)
    assert ends == ["an output of the scheduler could not be handled: KeyError('a bad one')"], ends

async def ends_when_outputs_cannot_be_read():
    ours, theirs, ends = *socket.socketpair(), []
    receiver = StepReceiver(SimpleNamespace(accept=lambda: (ours, None)), None, ends.append)
    receiver._loop = asyncio.get_running_loop()
    receiver._accept()
    receiver._receive(ours, bytearray())  # there is nothing
    assert not ends and ours.fileno() >= 0
    ours.send(b"never read")
    theirs.close()  # so the kernel resets the connection
    await until(lambda: ends)
    await asyncio.sleep(0.05)  # it would be called again in each turn
    assert len(ends) == 1 and "could not be read: ConnectionResetError" in ends[0], ends
    assert ours.fileno() < 0

async def turns_a_step_into_a_frame():
    async def never(asked, _):
        await asyncio.Event().wait()
        yield
    def state():
        return SimpleNamespace(finished=False, out_list=[], event=asyncio.Event())
    names = ["a", "b", "c", "d"]
    warm, states = state(), {name: state() for name in names}
    manager = SimpleNamespace(enable_trace=False, rid_to_state={"warm": warm, **states}, generate_request=never,
                              _release_lora_once=lambda state: None)
    engine = SimpleNamespace(tokenizer_manager=manager, get_all_child_pids=lambda: [], loop=asyncio.get_running_loop())
    ours, theirs = socket.socketpair()
    host = server.Host(engine, EngineInfo("sglang", "1", 100, 100, 100, 100, 4, 1, honours_seed=False), Peer("e", serves_max=20), theirs, None,
                       adapters=Adapters(SglangAdapterLoader(manager), "", None, AdapterTable(0)))
    host._stepped(step_output(batch(["warm", "unknown"], [[1, 2], [3]], [None, None]), "one"))  # nobody is connected yet
    serving = asyncio.create_task(host.link.serve())
    node, (reader, writer) = Peer("node", serves_max=0), await asyncio.open_connection(sock=ours)
    assert [type(each) for each in node.receive_data(await reader.read(65536))] == [Hello]
    for stream, name in enumerate(names, 1):
        node.send(Open(stream, codec.encode(Generate(name, TokenIds.of([1]), Sampling(4), logprobs={"b": 0, "c": 1}.get(name))), 4))
    writer.write(node.data_to_send())
    async def frames(count):
        got = []
        while len(got) < count:
            got += node.receive_data(await reader.read(65536))
        return got
    while len(host.requests.by_id) < len(names):
        await asyncio.sleep(0.01)
    logprobs = dict(output_token_logprobs_val=[[], [], [-0.5], [-1.5, -2.5], [], []],
                    output_top_logprobs_idx=[[], [], [[]], [[5], [6]], [], []],
                    output_top_logprobs_val=[[], [], [[]], [[-1.5], [-2.5]], [], []])
    host._stepped(step_output(batch(["unknown", *names, "warm"], [[9, 9], [1], [2], [5, 6], [8, 8], [3]],
                                    [None, None, None, None, GONE, LENGTH], **logprobs), "one"))
    step, fail = await frames(2)
    assert step == Step([1, 2, 3], [1, 1, 2], [1, 2, 5, 6], [Begun(n, 8, "one") for n in (1, 2, 3)], [], {
        2: (Logprob(-0.5),), 3: (Logprob(-1.5, ((5, -1.5),)), Logprob(-2.5, ((6, -2.5),)))}), step
    assert fail == Fail(4, "overloaded", "full"), fail
    assert states["d"].finished and states["d"].out_list[-1]["meta_info"]["finish_reason"] == GONE
    chunks = [(each["output_ids"], each["meta_info"]["finish_reason"]) for each in warm.out_list]
    assert warm.finished and warm.event.is_set() and chunks == [([1, 2], None), ([3], LENGTH)], chunks
    host._stepped(step_output(batch(["c", "a", "d"], [[7], [4], [9]], [STOP, None, None]), "one"))
    (step,) = await frames(1)
    assert step == Step([3, 1], [1, 1], [7, 4], [], [Ended(3, FinishReason.STOP, 10, 3, 8, 7)], {3: ()}), step
    assert set(manager.rid_to_state) == {"a", "b"} and set(host.requests.by_id) == {"a", "b"}
    host._stepped(step_output(batch(["a"], [[6]], [None]), "two"))
    (step,) = await frames(1)
    assert step == Step([1], [1], [6], [Begun(1, 8, "two", continues=True)], []), step
    host._stepped(step_output(batch(["a", "b"], [[5], [0]], [None, {"type": "stop", "matched": "NaN happened"}]), "two"))
    step, fail = await frames(2)
    assert (step.streams, step.tokens, step.begun, step.ended, fail.stream, fail.code) == ([1], [5], [], [], 2, "internal"), (
        step, fail)
    serving.cancel()

async def main():
    sends_what_the_host_reads()
    with tempfile.TemporaryDirectory(dir="/tmp") as tempfile.tempdir:  # a Unix socket has a short path
        await receives_in_order()
    await ends_when_outputs_cannot_be_read()
    await turns_a_step_into_a_frame()

asyncio.run(main())
"""

ATTENTION = """
import espalier_cpu_attention, torch
from sglang.srt.layers.attention import torch_native_backend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.plugins import load_plugins

torch.manual_seed(1)
heads, kv_heads, size, places = 4, 2, 16, 2048
keys, values = (torch.randn((places, kv_heads, size)).bfloat16() for _ in range(2))
prefixes, new = torch.tensor([900, 0, 200, 16]), torch.tensor([3, 40, 300, 300])
query = torch.randn((int(new.sum()), heads * size)).bfloat16()
table = torch.randperm(places, dtype=torch.int32).view(2, -1).repeat(2, 1)
batch = SimpleNamespace(req_pool_indices=torch.tensor([2, 0, 1, 3]), seq_lens=prefixes + new, extend_prefix_lens=prefixes,
                        extend_seq_lens=new, encoder_lens=None, out_cache_loc=None)
backend = object.__new__(torch_native_backend.TorchNativeAttnBackend)
backend.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer: keys, get_value_buffer=lambda layer: values)
backend.req_to_token_pool = SimpleNamespace(req_to_token=table)
layer = SimpleNamespace(qk_head_dim=size, v_head_dim=size, tp_q_head_num=heads, tp_k_head_num=kv_heads, scaling=0.37,
                        layer_id=0, is_cross_attention=False, attn_type=AttentionType.DECODER)
computed = []

def counting(module):
    compute = module.scaled_dot_product_attention
    def counted(query, *rest, **named):
        computed.append(query.shape[-2])
        return compute(query, *rest, **named)
    module.scaled_dot_product_attention = counted

counting(torch_native_backend)
counting(espalier_cpu_attention)

def attend(window):
    layer.sliding_window_size = window
    computed.clear()
    return backend.forward_extend(query, None, None, layer, batch), list(computed)

rows_of = {-1: [3, 40, 256, 44, 316], 70: [3, 40, 256, 44, 256, 44]}  # by sliding window
whole = [attend(window) for window in rows_of]
load_plugins()
for window, (expected, rows) in zip(rows_of, whole):
    assert rows == [903, 40, 500, 316], rows
    found, rows = attend(window)
    assert rows == rows_of[window], rows
    torch.testing.assert_close(found, expected)
"""

METRICS = """
from actors.engines.sglang.host import scheduler
from sglang.srt.managers.scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher

class Socket:
    closed = False
    def send(self, *message, **options):
        raise AssertionError("nobody reads this")

publisher = object.__new__(SchedulerKvEventsPublisher)
publisher.enable_kv_cache_events = True
publisher.send_metrics_from_scheduler = Socket()
scheduler.prepare()
publisher.emit_kv_metrics()
"""

TERMS = """
from actors.engines.sglang.host import hand_off_terms
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.managers.scheduler import Scheduler

def reported(states=(), **changes):
    named = {"kv_cache_dtype_str": "bfloat16", "kv_layout": None, "dsv41_spec_layout": None, "attn_tp_size": 2, **changes}
    manager = SimpleNamespace(kv_args=SimpleNamespace(state_types=list(states)), **named)
    queues = {"disagg_prefill_bootstrap_queue": None, "disagg_decode_prealloc_queue": SimpleNamespace(kv_manager=manager)}
    return hand_off_terms.terms(SimpleNamespace(**queues))

assert reported() == {"kv_cache_dtype": "bfloat16"}
assert reported([StateType.BLOCK_SCALE], kv_layout="paged") == {
    "kv_cache_dtype": "bfloat16", "kv_layout": "paged", "attention tp size": "2"}
whole = SimpleNamespace(disagg_prefill_bootstrap_queue=None, disagg_decode_prealloc_queue=None)
assert hand_off_terms.terms(whole) == {}
"""

PENALTIES = """
import torch
from actors.engines.sglang.host.penalties import KINDS, RESUMED_TOKENS

class Request:
    def __init__(self, output_ids, custom_params=None, frequency_penalty=0.0):
        self.origin_input_ids, self.output_ids = [7, 8, 3], output_ids
        self.sampling_params = SimpleNamespace(custom_params=custom_params, frequency_penalty=frequency_penalty)

frequency = KINDS[0]
new, plain = Request([], frequency_penalty=0.5), Request([4, 4])
resumed = Request([], {RESUMED_TOKENS: 1}, frequency_penalty=0.5)
retracted = Request([3, 3, 5], frequency_penalty=0.5)  # its prompt is computed again, with these at its end
requests = [new, plain, resumed, retracted]
orchestrator = SimpleNamespace(device="cpu")
penalizer = SimpleNamespace(orchestrator=orchestrator, cumulated_frequency_penalties=torch.zeros((4, 9)))
frequency.count(penalizer, requests, resumed=True)
sums = lambda: [{at: value for at, value in enumerate(row) if value} for row in penalizer.cumulated_frequency_penalties.tolist()]
assert sums() == [{}, {}, {3: 0.5}, {3: 1.0, 5: 0.5}], sums()
for request in requests:
    request.output_ids = [*request.output_ids, 3]
for _ in range(2):  # once each, however often a step is prepared
    frequency.count(penalizer, requests, resumed=False)
assert sums() == [{3: 0.5}, {}, {3: 1.0}, {3: 1.5, 5: 0.5}], sums()
"""

PARTS = {
    "penalties": HEAD + PENALTIES,
    "terms": HEAD + TERMS,
    "metrics": HEAD + METRICS,
    "attention": HEAD + ATTENTION,
    "outputs": HEAD + OUTPUTS,
    "c8_liveness": HEAD + LIVENESS,
    "b11_failing": HEAD + FAILING,
    "c11_warm": HEAD + WARM,
}


@pytest.fixture(scope="module")
def written(run_parts: RunParts) -> dict[str, str]:
    return run_parts(PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_the_hosts_own_parts(part: str, written: dict[str, str]) -> None:
    assert written[part].endswith("done\n"), written[part]
