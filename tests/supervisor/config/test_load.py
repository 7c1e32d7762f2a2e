"""`cluster.toml` is read strictly, and all mistakes are reported at once with their lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from cProfile import Profile
from pathlib import Path

import pytest

from protocol.errors import StartFailed
from supervisor.engines.kinds import KINDS, read_cluster
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import MODEL, engine

ROOT = Path(__file__).parents[3]
TINY = ROOT / "examples" / "tiny"
Written = Callable[[str], Path]  # the fixture `written`
GOOD = f"""
[model.tiny]
path = "{TINY}"

[engine.tiny-0]
model = "tiny"
device = "cpu"
kv_tokens_max = 4096
"""


def mistakes(path: Path) -> list[tuple[int, str]]:
    """Return the line and the message of each mistake in a file."""
    with pytest.raises(StartFailed) as caught:
        read_cluster(path)
    first, *lines = str(caught.value).splitlines()
    assert first == f"{path} has {len(lines)} mistake{'s'[: len(lines) > 1]}:"
    assert all(line.startswith("  line ") for line in lines)
    numbered = [line.removeprefix("  line ").partition(": ") for line in lines]
    return [(int(number), message) for number, _, message in numbered]


def test_a_file_with_one_model_and_one_engine_is_a_cluster(written: Written) -> None:
    cluster = read_cluster(written(GOOD))
    assert cluster.model_path("tiny") == TINY
    assert list(cluster.engines_on("main")) == ["tiny-0"]
    assert (cluster.gateway.port, cluster.gateway.host, cluster.node["main"].drain_s) == (8000, "127.0.0.1", 30.0)


def test_all_mistakes_are_reported_at_once_with_their_lines(written: Written) -> None:
    found = mistakes(
        written(
            f"""# port = "not here"
[gateway]
port = "8000"
tls = "false"

[gateway.limits]
idle_s = -1
conections_max = 5   # one n too few
body_bytes_max = 1.5

[model."qwen-2.5"]
path = "{TINY}"
queue_max = true

[engine.a]
model = "qwen-2.5"
device = "tpu"
slots = 0
memory_fraction = 2
deadlines.gap_s = "20"

[engine.a.canary]
afters_s = 1
"""
        )
    )
    assert set(found) == {
        (13, 'model["qwen-2.5"].queue_max: expected an integer, got true'),
        (17, 'engine.a.device: expected "cpu" or "cuda", got "tpu"'),
        (18, "engine.a.slots: must be at least 1 and at most 1000000000, got 0"),
        (15, "engine.a.kv_tokens_max: is missing"),
        (19, "engine.a.memory_fraction: must be above 0 and at most 1, got 2"),
        (20, 'engine.a.deadlines.gap_s: expected a number, got "20"'),
        (23, "engine.a.canary.afters_s: is not a key here; did you mean after_s?"),
        (3, 'gateway.port: expected an integer, got "8000"'),
        (7, "gateway.limits.idle_s: must be above 0 and at most 1000000, got -1"),
        (9, "gateway.limits.body_bytes_max: expected an integer, got 1.5"),
        (8, "gateway.limits.conections_max: is not a key here; did you mean connections_max?"),
        (4, "gateway.tls: is not a key here"),
    }
    assert len(found) == 12


REPLACED = [  # a text of the good file, and what stands in its place
    ('device = "cpu"', 'device = "cpu"\ntensor_parallel = 2', "engine.tiny-0.tensor_parallel", "one rank"),
    ("4096", "47", "engine.tiny-0.kv_tokens_max", "less than three pages of 16"),
    ("4096", "7\npage_size = 1", "engine.tiny-0.kv_tokens_max", "less than 8 pages of 1 token"),
    ("4096", '559\nleg = "decode"', "engine.tiny-0.kv_tokens_max", "less than 35 pages of 16"),
    (
        "4096",
        '4096\nleg = "decode"\nsettings.num_reserved_decode_tokens = 4080',
        "engine.tiny-0.kv_tokens_max",
        "less than 258 pages of 16",
    ),
    ("4096", "4096\ncontext_max = 1", "engine.tiny-0.context_max", "no room"),
    (
        "4096",
        "4096\nsettings.enable_memory_saver = true",
        "engine.tiny-0.settings.enable_memory_saver",
        'needs device = "cuda"',
    ),
    (
        "4096",
        "4096\ndeadlines.gap_s = -3",
        "engine.tiny-0.deadlines.gap_s",
        "must be above 0 and finite, got -3",
    ),
    ("4096", "4096\nprefill_chunk = inf", "engine.tiny-0.prefill_chunk", "expected"),
    ('model = "tiny"', 'model = "other"', "engine.tiny-0.model", "there is no model other; there is tiny"),
    ('model = "tiny"', 'model = "tiny"\nnode = "b"', "engine.tiny-0.node", "there is no node b; there is main"),
    (str(TINY), "nowhere", "model.tiny.path", "there is no folder"),
    (str(TINY), "Qwen/Qwen3-8B", "model.tiny.path", "nothing is downloaded: `hf download Qwen/Qwen3-8B --local-dir /"),
    (str(TINY), str(TINY / "config.json"), "model.tiny.path", "is a file: name the folder with config.json, tokeni"),
    (f'"{TINY}"', f'"{TINY}"\ntemplate = "no.jinja"', "model.tiny.template", "there is no file"),
    ("tiny-0]", "router-tiny]", "engine.router-tiny", "is the name of another part of the tree"),
    ("tiny-0]", '"a/b"]', "engine", "must be letters, digits"),
]
ADDED = [  # a section, and a line in it
    ("gateway", 'host = "0.0.0.0"', "gateway.allowed_hosts", "is every address"),
    ("gateway", 'keys = "none.toml"', "gateway.keys", "there is no file"),
    ("gateway", 'tls_key = "k.pem"', "gateway.tls_key", "there is no file"),
    ("gateway", f'keys = "{"k" * 300}"', "gateway.keys", "is no file: File name too long"),
    ("node.main", f'logs = "/{"l" * 300}"', "node.main.logs", "is no folder: File name too long"),
    ("gateway", 'tls_key = "cluster.toml"', "gateway.tls_key", "means nothing without tls_certificate"),
    ("gateway", 'tls_certificate = "cluster.toml"', "gateway.tls_certificate", "means nothing without tls_key"),
    ("gateway", 'allowed_origins = ["*", "https://a.b/path"]', "gateway.allowed_origins[1]", "without a path"),
    ("gateway", 'node = "b"', "gateway.node", "there is no node b"),
    ("cluster", "stalled_s = 2", "cluster.stalled_s", "at least silent_s (3)"),
    ("cluster", "heartbeat_s = 1e-6", "cluster.heartbeat_s", "at least 0.01"),
]


@pytest.mark.parametrize(
    ("old", "new", "path", "message"),
    [*REPLACED, *((GOOD, f"{GOOD}[{section}]\n{line}\n", path, message) for section, line, path, message in ADDED)],
    ids=[path for *_, path, _ in (*REPLACED, *ADDED)],
)
def test_a_contradiction_between_keys_is_a_mistake_at_the_line_of_its_key(
    written: Written, old: str, new: str, path: str, message: str
) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new)
    lines = [line for line, mistake in mistakes(written(text)) if mistake.startswith(path) and message in mistake]
    key = path.rpartition(".")[2].partition("[")[0]
    written_line = text.splitlines()[lines[0] - 1]
    assert key.rpartition("-")[0] in written_line or key in written_line or "[gateway]" in written_line


def test_no_engine_may_have_the_name_of_another_child(written: Written) -> None:
    text = f'{GOOD}[node.main]\nlisten = "127.0.0.1:7401"\nmetrics = "127.0.0.1:7402"\n'
    assembly, _ = built_assembly(read_cluster(written(text)), "main")
    names = {child.name for child in assembly.tree.children}
    assert names >= {"gateway", "links", "metrics", "zygote", "tiny-0"}

    def accepted(name: str) -> bool:
        try:
            read_cluster(written(text.replace("[engine.tiny-0]", f"[engine.{name}]")))
        except StartFailed as error:
            return f"engine.{name}: is the name of another part of the tree" not in str(error)
        return True

    free = [name for name in names if name != "tiny-0" and accepted(name)]
    assert not free, (
        f"add {free} to TREE_NAMES of supervisor/config/checks/cross_checks.py: an engine could take the name"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "model: is missing"),
        (GOOD + '[node."B"]\n', "lower-case"),
        (GOOD + "[node.main]\ndrain_s = nan\n", "finite"),
        (GOOD + "[nodes.main]\n", "did you mean node?"),
        ("[model]\n[engine]\n", "must not be empty"),
        (GOOD + '[node.main]\nlisten = "127.0.0.1:65536"\n', "must be like 127.0.0.1:7401"),
        (GOOD + '[cluster]\njoin = [":7400"]\n', "names no host that could be dialed"),
        (GOOD + f'[model."a/b"]\npath = "{TINY}"\n[model."a:b"]\npath = "{TINY}"\n', "by nothing but / and :"),
    ],
)
def test_a_table_or_value_that_is_invalid_by_itself_is_a_mistake(written: Written, text: str, message: str) -> None:
    assert any(message in mistake for _, mistake in mistakes(written(text)))


SECOND_MODEL = f'[model.b]\npath = "{TINY}"\n'
TWO_LEGS = f"""{GOOD}leg = "prefil"
bootstrap_port = 8500

[engine.decode]
model = "tiny"
leg = "decode"
device = "cpu"
kv_tokens_max = 4096
"""
ALL_KINDS = " or ".join(f'"{kind}"' for kind in KINDS)
ONE_CAUSE = [
    (
        GOOD.replace('device = "cpu"', 'kind = "simulatd"\nsimulated.length_min = 3'),
        (7, f'engine.tiny-0.kind: expected {ALL_KINDS}, got "simulatd"'),
    ),
    (f"{GOOD}kind = 3\n", (9, f"engine.tiny-0.kind: expected {ALL_KINDS}, got 3")),
    (
        GOOD.replace('model = "tiny"', 'model = "tinny"'),
        (6, "engine.tiny-0.model: there is no model tinny; there is tiny"),
    ),
    (SECOND_MODEL + GOOD.replace('model = "tiny"\n', ""), (7, "engine.tiny-0.model: is missing")),
    (f"{GOOD}[node.Main]\n", (9, 'node.Main: must be lower-case letters, digits and dashes, got "Main"')),
    (
        GOOD.replace("engine.tiny-0", 'engine."tiny 0"'),
        (5, 'engine["tiny 0"]: must be letters, digits, dashes, dots and _, got "tiny 0"'),
    ),
    (
        GOOD + "ranks_on = 3\ndist_port = 7400\n",
        (9, "engine.tiny-0.ranks_on: expected a list, got 3"),
    ),
    (GOOD.replace("path", "patx"), (3, "model.tiny.patx: is not a key here; did you mean path?")),
    (GOOD.replace("[model", "[modell"), (2, "modell: is not a key here; did you mean model?")),
    (f"node = {{}}\n{GOOD}", (1, "node: must not be empty")),
    (f'node = 5\n{GOOD}node = "b"\n', (1, "node: expected an object, got 5")),
    (f'{GOOD}node = "b"\n[nodes.b]\n', (10, "nodes: is not a key here; did you mean node?")),
    (TWO_LEGS, (9, 'engine.tiny-0.leg: expected "both", "prefill", "decode" or "encode", got "prefil"')),
]


@pytest.mark.parametrize(("text", "mistake"), ONE_CAUSE, ids=[mistake for _, (_, mistake) in ONE_CAUSE])
def test_what_follows_from_a_mistake_is_not_reported_as_another(
    written: Written, text: str, mistake: tuple[int, str]
) -> None:
    assert mistakes(written(text)) == [mistake]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (
            GOOD.replace('model = "tiny"', 'model = "tiny"\nnode = "other"') + "[node.main]\n[node.Front]\n",
            [(7, "engine.tiny-0.node: there is no node other"), (11, "node.Front: must be lower-case letters")],
        ),
        (
            GOOD.replace("engine.tiny-0", 'engine."tiny 0"') + "foo = 1\n",
            [(5, 'engine["tiny 0"]: must be letters'), (9, 'engine["tiny 0"].foo: is not a key here')],
        ),
        (
            GOOD.replace('model = "tiny"', 'model = "tiny"\nnode = "other"') + "[node.main]\nmodel = 3\n",
            [(7, "engine.tiny-0.node: there is no node other"), (11, "node.main.model: is not a key here")],
        ),
        (SECOND_MODEL + TWO_LEGS, [(1, "model.b: no engine serves it"), (11, "engine.tiny-0.leg: expected")]),
    ],
    ids=["a node", "a name", "a key", "a leg"],
)
def test_a_mistake_hides_none_that_does_not_follow_from_it(
    written: Written, text: str, rows: list[tuple[int, str]]
) -> None:
    reported = mistakes(written(text))
    assert len(reported) == len(rows)
    for (line, sentence), (expected_line, beginning) in zip(reported, rows, strict=True):
        assert (line, sentence[: len(beginning)]) == (expected_line, beginning)


@pytest.mark.parametrize(
    ("keys", "section", "rows"),
    [
        ("", "a = 1\n", 1),
        ("", "".join(f"k{number} = 1\n" for number in range(1_000)), 17),
        ("[gateway]\n", "".join(f'"k {number}" = 1\n' for number in range(1_000)), 17),
    ],
    ids=["a word", "many", "many in a table"],
)
def test_unknown_keys_hide_no_other_mistake(written: Written, keys: str, section: str, rows: int) -> None:
    end = '[cluster]\nstalled_s = 2\n[node.main]\nhost = ""\n'
    reported = [mistake for _, mistake in mistakes(written(f"{keys}{section}{GOOD}{end}"))]
    assert reported[-2:] == [
        "cluster.stalled_s: must be at least silent_s (3)",
        'node.main.host: must be a host or an address, got ""',
    ]
    assert len(reported) == rows + 2


def test_the_work_of_a_check_grows_with_the_file_and_not_with_its_square(written: Written) -> None:
    def calls(nodes: int) -> Counter[str]:
        """Return how often each function is called for a file in which each node has an address and two mistakes."""
        numbers = range(nodes)
        sections = (
            f'[model."m/{number}"]\npath = "{TINY}"\n'
            f'[node.n{number}]\nhost = "h{number}"\nlisten = "h{number}:7401"\n'
            f'[engine.e{number}]\nmodel = "m/{number}"\nnode = "n{number}"\ndevice = "cuda"\nleg = "decode"\n'
            "kv_tokens_max = 4096\ncontext_max = 1\n"
            for number in numbers
        )
        path = written('[gateway]\nnode = "n0"\n' + "".join(sections))
        profile = Profile()
        with profile:
            reported = mistakes(path)
        assert len(reported) == 2 * nodes
        return Counter({str(entry.code): entry.callcount for entry in profile.getstats()})

    few, many = calls(20), calls(80)
    assert not {function: count for function, count in many.items() if count > 5 * few[function] + 100}


def test_a_model_that_no_engine_serves_is_a_mistake(written: Written) -> None:
    assert mistakes(written(SECOND_MODEL + GOOD)) == [(1, "model.b: no engine serves it")]


def test_allowed_hosts_and_origins_replace_the_defaults_and_ignore_case(written: Written) -> None:
    names = 'allowed_hosts = ["Llm.Example"]\nallowed_origins = ["https://App.example"]'
    cluster = read_cluster(written(f'{GOOD}[gateway]\nhost = "::"\n{names}\n'))
    assert cluster.gateway.allowed_hosts == ("llm.example",)
    assert cluster.gateway.allowed_origins == ("https://app.example",)
    assert cluster.model_path("tiny") == TINY


def test_the_file_of_a_node_that_joins_need_not_describe_the_rest_of_the_cluster(written: Written) -> None:
    path = written(
        GOOD.replace('model = "tiny"', 'model = "tiny"\nnode = "extra"') + '\n[node.extra]\nlisten = "[::1]:7413"\n'
    )
    assert mistakes(path) == [(1, "gateway.node: there is no node main; there is extra")]
    cluster = read_cluster(path, ["10.0.0.1:7411"])
    assert [str(endpoint) for endpoint in cluster.cluster.join] == ["10.0.0.1:7411"]
    path.write_text(path.read_text() + '[cluster]\njoin = ["b:1"]\n')
    joins = read_cluster(path, ["10.0.0.1:7411"]).cluster.join
    assert [str(endpoint) for endpoint in joins] == ["b:1", "10.0.0.1:7411"]
    with pytest.raises(StartFailed, match=r"cluster\.join\[1\]: must be like"):
        read_cluster(path, ["nowhere"])


@pytest.mark.parametrize(
    ("lines", "message"), [("cluster = 5\n", "cluster: "), ("[cluster]\njoin = 5\n", r"cluster\.join: ")]
)
def test_an_invalid_join_is_a_mistake_although_the_command_line_has_a_valid_one(
    lines: str, message: str, written: Written
) -> None:
    with pytest.raises(StartFailed, match=message):
        read_cluster(written(lines + GOOD), ["10.0.0.1:7411"])


@pytest.mark.parametrize("origin", ["http://a.example/path", "a.example", "http://a b", "http://u@a.example"])
def test_an_allowed_origin_that_is_invalid_is_a_mistake(written: Written, origin: str) -> None:
    assert mistakes(written(GOOD + f'[gateway]\nallowed_origins = ["{origin}"]\n'))[0][1].startswith(
        "gateway.allowed_origins[0]: must be like"
    )


# Encoders -----------------------------------------------------------------------------------------

ENCODER = f"""[model.tiny]
path = "{TINY}"
[engine.one]
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
simulated.media = {{ image_token = 5 }}
[engine.eyes]
model = "tiny"
kind = "simulated"
leg = "encode"
simulated.media = {{ image_token = 5 }}
"""


def test_an_encoder_has_limits_of_its_own_and_no_tokens(written: Written) -> None:
    cluster = read_cluster(written(ENCODER + "encoder.batch_max = 4\n"))
    eyes, one = cluster.engine["eyes"], cluster.engine["one"]
    assert (eyes.encoder.batch_max, eyes.encoder.batch_tokens_max) == (4, 16_384)
    assert (eyes.kv_tokens_max, eyes.pending_prefill_max) == (0, 0)
    assert one.pending_prefill_max == 4096
    assert cluster.encodes("tiny")
    assert not cluster.encodes("other")
    assert not read_cluster(written(GOOD)).encodes("tiny")


@pytest.mark.parametrize(
    ("line", "path", "reason"),
    [
        ("kv_tokens_max = 4096", "kv_tokens_max", "is for engines that compute tokens, and engine.eyes.leg is encode"),
        ("deadlines.gap_s = 3.0", "deadlines", "is for engines that compute tokens"),
        ("slots = 7", "encoder.batch_max", "must be at most slots (7)"),
    ],
)
def test_what_means_nothing_for_an_encoder_is_a_mistake(written: Written, line: str, path: str, reason: str) -> None:
    ((_, mistake),) = mistakes(written(ENCODER + line + "\n"))
    assert mistake.startswith(f"engine.eyes.{path}: ")
    assert reason in mistake


def test_limits_of_an_encoder_mean_nothing_for_other_engines(written: Written) -> None:
    path = written(GOOD + "encoder.batch_max = 4\n")
    assert mistakes(path) == [(9, "engine.tiny-0.encoder: is for an encoder, and engine.tiny-0.leg is both")]


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        (
            ENCODER[: ENCODER.index("[engine.one]")] + ENCODER[ENCODER.index("[engine.eyes]") :],
            (6, "engine.eyes.leg: means nothing: there is no engine of the same model whose leg is both or prefill"),
        ),
        (
            ENCODER.replace("image_token = 5 }\n[", "image_token = 6 }\n["),
            (7, "engine.one.simulated.media: differs from that of engine eyes, which has the same model"),
        ),
        (
            ENCODER.replace("simulated.media = { image_token = 5 }\n[", "["),
            (11, "engine.eyes.simulated.media: differs from that of engine one, which has the same model"),
        ),
        (
            ENCODER.replace("image_token", "width"),
            (12, "engine.eyes.simulated.media: has neither image_token nor video_token"),
        ),
        (ENCODER.replace("kv_tokens_max = 4096\n", ""), (3, "engine.one.kv_tokens_max: is missing")),
        (ENCODER.replace('"encode"', '"encoder"'), (11, 'engine.eyes.leg: expected "both", "prefill", "decode" or')),
    ],
    ids=["alone", "another token", "nothing", "no token", "no memory", "a leg"],
)
def test_what_keeps_an_encoder_from_working_is_a_mistake(written: Written, text: str, mistake: tuple[int, str]) -> None:
    found = mistakes(written(text))
    assert any(line == mistake[0] and sentence.startswith(mistake[1]) for line, sentence in found), found
    assert len(found) <= 2


def test_an_encoder_may_join_a_cluster_whose_engines_stand_in_other_files(written: Written) -> None:
    alone = ENCODER[: ENCODER.index("[engine.one]")] + ENCODER[ENCODER.index("[engine.eyes]") :]
    cluster = read_cluster(written(alone), ["10.0.0.1:7411"])
    assert cluster.encodes("tiny")


ONE = f"""[gateway]
port = 8000
[model.tiny]
path = "{TINY}"
[engine.one]
model = "tiny"
kv_tokens_max = 4096
"""


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ('kind = "simulated"\nevents.listen = "127.0.0.1:5557"', "events.listen: is no longer a key: only engines of"),
        ('device = "cpu"\nevents.replay = "127.0.0.1:5558"', "events.replay: means nothing without listen"),
        (
            'device = "cpu"\nleg = "decode"\nevents.listen = "127.0.0.1:5557"',
            "events.listen: is for engines with a prefix cache",
        ),
        (
            'device = "cpu"\nevents.listen = "127.0.0.1:5557"\nevents.publish = false',
            "events.publish: is false, and events.listen publishes them",
        ),
        (
            'device = "cpu"\nevents.listen = "[::1]:5557"',
            "events.listen: is [::1]:5557, and SGLang publishes at IPv4 addresses only",
        ),
    ],
)
def test_events_are_for_engines_that_have_some(written: Written, lines: str, sentence: str) -> None:
    found = mistakes(written(f"{ONE}{lines}\n"))
    assert any(sentence in mistake for _, mistake in found), found


@pytest.mark.parametrize(
    ("lines", "line", "sentence"),
    [
        (
            'device = "cuda"\nranks_on = ["b"]\ndist_port = 7500',
            8,
            "is for an engine on one node, without ranks_on",
        ),
        ('kind = "simulated"\nleg = "encode"', 8, "is for engines that compute tokens"),
        (
            'device = "cpu"\nevents.listen = "127.0.0.1:65535"',
            10,
            "leaves no port for each rank: the last would be 65536",
        ),
        (
            'device = "cpu"\nevents.listen = "127.0.0.1:5557"\nevents.replay = "127.0.0.1:5558"',
            11,
            "events.replay: is where engine one publishes its events",
        ),
        (
            'device = "cpu"\nevents.listen = "0.0.0.0:5557"\nevents.replay = "127.0.0.1:5556"',
            11,
            "events.replay: is where engine one publishes its events",
        ),
    ],
)
def test_ranks_where_they_do_not_work_are_a_mistake(written: Written, lines: str, line: int, sentence: str) -> None:
    found = mistakes(written(f"{ONE}data_parallel = 2\n{lines}\n"))
    assert any(number == line and sentence in mistake for number, mistake in found), found


@pytest.mark.parametrize(
    ("lines", "by_memory"),
    [
        ("", False),
        ("data_parallel = 2", True),
        ('data_parallel = 2\nadmission = "slots"', False),
        ('admission = "memory"', True),
    ],
)
def test_requests_wait_for_memory_by_default_where_there_are_several_ranks(
    written: Written, lines: str, by_memory: bool
) -> None:
    cluster = read_cluster(written(f'{ONE}device = "cpu"\n{lines}\n'))
    assert cluster.engine["one"].admits_by_memory is by_memory


def test_a_prefill_never_waits_for_memory_that_a_decode_frees(written: Written) -> None:
    pair = f'{MODEL}{engine("d")}leg = "decode"\n{engine("p")}leg = "prefill"\n'
    assert not read_cluster(written(f"{pair}data_parallel = 2\n")).engine["p"].admits_by_memory
    found = mistakes(written(f'{pair}admission = "memory"\n'))
    assert any("must not be memory for a prefill" in mistake for _, mistake in found)


def test_a_node_has_no_more_ranks_than_other_nodes_take_from_it(written: Written) -> None:
    engines = [engine(f"e{number}") + "data_parallel = 128\n" for number in range(9)]
    assert len(read_cluster(written(MODEL + "".join(engines[:8]))).engine) == 8
    ((_, mistake),) = mistakes(written(MODEL + "".join(engines)))
    assert mistake == "node.main: its engines have 1152 data-parallel ranks in all, and a node may have 1024"


def test_an_engine_publishes_its_blocks_if_its_policy_uses_them_or_its_section_says_so(written: Written) -> None:
    def publishes(policy: str, lines: str) -> bool:
        text = ONE.replace("[engine", f'policy = "{policy}"\n[engine')
        cluster = read_cluster(written(f'{text}device = "cpu"\n{lines}\n'))
        return cluster.engine["one"].publishes(cluster)

    assert publishes("kv", "")
    assert not publishes("least_loaded", "")
    assert publishes("least_loaded", "events.publish = true")
    assert not publishes("kv", "events.publish = false")
    assert publishes("least_loaded", 'events.listen = "127.0.0.1:5557"')


RANKED = engine("one").replace('kind = "simulated"', 'device = "cpu"\ndata_parallel = 4')
REAL = {name: engine(name).replace('kind = "simulated"', 'device = "cpu"') for name in ("one", "two")}
EVENTS = 'events = { listen = "127.0.0.1:5557", replay = "127.0.0.1:5558" }\n'


def test_engines_publish_their_events_each_at_addresses_of_its_own(written: Written) -> None:
    one, two = REAL["one"] + EVENTS, REAL["two"] + EVENTS.replace("555", "655")
    cluster = read_cluster(written(f"[gateway]\nport = 8000\n{MODEL}{one}{two}"))
    assert all(section.publishes(cluster) for section in cluster.engine.values())
    assert list(cluster.engine["one"].ports) == ["events.listen", "events.replay"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            REAL["one"] + EVENTS + REAL["two"] + EVENTS,
            [
                "engine.two.events.listen: is where engine one publishes its events",
                "engine.two.events.replay: is where engine one publishes its events",
            ],
        ),
        (
            REAL["one"] + EVENTS.replace("5557", "8000"),
            ["engine.one.events.listen: is where the gateway is"],
        ),
        (
            REAL["one"] + EVENTS.replace("5558", "5557"),
            ["engine.one.events.replay: is where engine one publishes its events"],
        ),
        (
            RANKED + EVENTS.replace("5557", "7998").replace("5558", "7000"),
            ["engine.one.events.listen: is where the gateway is"],
        ),
        (
            RANKED
            + EVENTS.replace("5558", "7100")
            + REAL["two"]
            + EVENTS.replace("5557", "5560").replace("5558", "5561"),
            ["engine.two.events.listen: is where engine one publishes its events"],
        ),
    ],
)
def test_no_two_listen_where_an_engine_publishes_its_events(written: Written, text: str, found: list[str]) -> None:
    file = written(f"[gateway]\nport = 8000\n{MODEL}{text}")
    assert [sentence for _, sentence in mistakes(file)] == found
