"""Tests mirror the rooms, so that the path of a product file gives the path of its tests.

`tests/<folder>/test_<file>.py` has the tests of `<folder>/<file>.py`, and `test_<file>_<topic>.py` beside it has more of
them. A file whose promises are tested elsewhere has a row in `TESTED_BY`; a bench that is only ever run by hand has one in
`RUN_BY_HAND`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("protocol", "actors", "supervisor", "bench")
PATCHES = {"cpu", "plugin"}  # of SGLang itself: what they do is tested on the real engine
OF_A_ROOM = {"tests/protocol/test_pins.py"}  # about a room as a whole

TESTED_BY: dict[str, tuple[str, ...]] = {  # below `tests/`: the files that have their tests there
    "actors/engines/sglang/host/test_liveness.py": (
        "actors/engines/sglang/host/failures.py",
        "actors/engines/sglang/host/outputs.py",
        "actors/engines/sglang/host/prefix_cache.py",
        "actors/engines/sglang/host/requests.py",
        "actors/engines/sglang/host/served_link.py",
    ),
    "actors/test_publisher.py": ("actors/engines/following.py",),
    "system/sglang/test_kv_events.py": (
        "actors/engines/sglang/host/kv_events.py",
        "actors/engines/sglang/host/watchers.py",
    ),
    "actors/engines/sglang/test_boot_message.py": (
        "actors/engines/sglang/setting_rules.py",
        "actors/engines/sglang/spec.py",
    ),
    "actors/engines/simulated/test_batch.py": ("actors/engines/simulated/costs.py",),
    "actors/engines/simulated/test_engine.py": ("actors/engines/request_check.py", "actors/engines/simulated/spec.py"),
    "actors/engines/simulated/test_output.py": ("actors/engines/simulated/sentences.py",),
    "actors/test_encoder.py": ("actors/engines/encoder_limits.py", "actors/engines/encodings.py"),
    "actors/kit/test_fair_queue.py": ("supervisor/engines/work.py",),
    "actors/kit/test_pending_prefill.py": ("supervisor/cluster/ranked_workers.py",),
    "actors/routing/test_outliers.py": ("actors/routing/reservations.py", "supervisor/node/router_child.py"),
    "actors/test_canary.py": ("actors/engines/probe.py",),
    "actors/test_decode.py": ("actors/engines/outcomes.py", "actors/engines/slots.py"),
    "actors/test_grammars.py": ("supervisor/engines/grammar_checks.py",),
    "actors/test_processor.py": ("actors/text/chat_template.py", "actors/text/model.py", "actors/text/prompts.py"),
    "actors/routing/test_least_loaded.py": ("actors/routing/load.py",),
    "actors/test_router.py": ("actors/routing/ports.py", "actors/routing/route.py", "actors/routing/routing.py"),
    "actors/text/test_candidates.py": ("actors/text/pieces.py", "protocol/dialects/answer_builder.py"),
    "actors/text/test_detokenizer.py": ("actors/text/stop_strings.py",),
    "actors/text/test_encoding.py": ("actors/kit/offload.py", "actors/text/token_bounds.py"),
    "bench/attacks/test_scenario.py": ("bench/attacks/__main__.py",),
    "bench/cost/test_accounts.py": ("bench/rig/processes.py",),
    "bench/cost/test_command.py": ("bench/cost/options.py", "bench/cost/sample.py"),
    "bench/figures/test_pages.py": ("bench/figures/command.py", "bench/figures/kept.py"),
    "bench/figures/test_routing_tables.py": ("bench/figures/routing_data.py",),
    "bench/load/test_answers.py": ("bench/load/faults.py",),
    "bench/load/test_client.py": ("bench/load/wire.py",),
    "bench/load/test_command.py": (
        "bench/__main__.py",
        "bench/load/messages.py",
        "bench/load/options.py",
        "bench/load/process.py",
        "bench/load/progress.py",
        "bench/load/report.py",
        "bench/load/values.py",
    ),
    "bench/load/test_http.py": ("bench/load/requests.py", "bench/load/sse.py", "bench/load/websocket.py"),
    "bench/pictures/test_memory.py": ("bench/pictures/caching.py", "bench/pictures/senders.py"),
    "bench/peers/test_install.py": ("bench/peers/command.py",),
    "bench/peers/test_running.py": ("bench/peers/peer.py",),
    "bench/peers/test_table.py": (
        "bench/peers/cpu_sglang.py",
        "bench/peers/dynamo.py",
        "bench/peers/dynamo_mocker.py",
        "bench/peers/espalier.py",
        "bench/peers/mock_model.py",
        "bench/peers/sglang_server.py",
        "bench/peers/smg.py",
    ),
    "bench/report/test_page.py": ("bench/report/charts.py",),
    "bench/rig/test_checked_clients.py": (
        "bench/rig/cluster.py",
        "bench/rig/prompts.py",
        "bench/rig/proxy.py",
    ),
    "bench/rig/test_media_load.py": ("bench/media_abort_times.py", "bench/media_stages.py"),
    "bench/rig/test_polling.py": ("bench/pair_abort_times.py", "bench/pair_stages.py"),
    "bench/rig/test_vision_model.py": ("bench/pictures/setup.py", "bench/rig/vision_cluster.py"),
    "bench/stages/test_command.py": (
        "bench/stages/model.py",
        "bench/stages/request_stages.py",
        "bench/stages/task_stages.py",
        "bench/stages/token_stages.py",
    ),
    "bench/test_fit.py": ("bench/step_costs.py",),
    "bench/test_siege.py": ("bench/soak.py",),
    "bench/zombies/test_command.py": ("bench/zombies/scenes.py",),
    "contracts/encoder.py": ("actors/engines/encoder_port.py",),
    "contracts/engine.py": ("actors/engines/port.py",),
    "protocol/dialects/test_chat.py": ("protocol/dialects/http.py",),
    "protocol/dialects/test_chat_chunks.py": ("protocol/dialects/choices.py", "protocol/dialects/logprobs.py"),
    "protocol/dialects/test_completions.py": ("protocol/dialects/prompt.py",),
    "protocol/dialects/test_options.py": ("protocol/strict/checks.py",),
    "protocol/dialects/responses/test_events.py": (
        "protocol/dialects/responses/body.py",
        "protocol/dialects/responses/objects.py",
    ),
    "protocol/openapi/test_document.py": (
        "protocol/openapi/answer_schemas.py",
        "protocol/openapi/request_schemas.py",
        "supervisor/gateway/http/routes/openapi.py",
    ),
    "protocol/strict/test_structure.py": (
        "protocol/strict/expected.py",
        "protocol/strict/hooks.py",
        "protocol/strict/mistakes.py",
        "protocol/strict/objects.py",
    ),
    "protocol/test_frames.py": (
        "protocol/codec.py",
        "protocol/errors.py",
        "protocol/kind.py",
        "protocol/messages.py",
        "protocol/operations.py",
        "protocol/tensors.py",
    ),
    "protocol/test_model_folder.py": ("actors/engines/sglang/model_files.py",),
    "protocol/test_streams.py": ("protocol/peer.py",),
    "repository/test_rules.py": ("supervisor/version.py",),
    "supervisor/cli/test_commands.py": (
        "supervisor/__main__.py",
        "supervisor/command_line.py",
        "supervisor/cli/client.py",
        "supervisor/cli/drain.py",
        "supervisor/cli/output.py",
    ),
    "supervisor/cluster/test_announcements.py": (
        "protocol/cluster.py",
        "supervisor/engines/sglang/grammar_checkers.py",
    ),
    "supervisor/cluster/test_directory.py": ("supervisor/cluster/pool.py",),
    "supervisor/cluster/test_workers_encoders.py": ("supervisor/cluster/engine_checks.py",),
    "supervisor/cluster/test_engine_control.py": ("supervisor/cluster/models.py",),
    "supervisor/cluster/test_mesh.py": ("supervisor/links/websocket.py",),
    "supervisor/cluster/test_readiness.py": ("supervisor/supervision/registration.py",),
    "supervisor/config/test_load.py": (
        "supervisor/config/cross_checks.py",
        "supervisor/config/engine_sections.py",
        "supervisor/config/limits.py",
        "supervisor/config/listener_checks.py",
        "supervisor/config/partial.py",
        "supervisor/config/schema.py",
        "supervisor/config/time_checks.py",
        "supervisor/engines/simulated/section.py",
    ),
    "supervisor/control/test_control.py": ("supervisor/deadlines.py",),
    "supervisor/engines/sglang/test_ranks_configuration.py": ("supervisor/engines/sglang/children.py",),
    "supervisor/engines/test_kinds.py": ("supervisor/engines/kind.py",),
    "supervisor/gateway/http/routes/test_route.py": (
        "supervisor/gateway/http/routes/admin.py",
        "supervisor/gateway/http/routes/answering.py",
        "supervisor/gateway/http/routes/completions.py",
        "supervisor/gateway/http/routes/health.py",
        "supervisor/gateway/http/routes/models.py",
        "supervisor/gateway/http/routes/responses.py",
        "supervisor/gateway/http/routes/tokens.py",
    ),
    "supervisor/gateway/http/test_connection.py": (
        "supervisor/gateway/http/request_reader.py",
        "supervisor/gateway/http/upgrade.py",
    ),
    "supervisor/gateway/test_server.py": ("supervisor/gateway/connections.py",),
    "supervisor/gateway/websocket/test_session.py": (
        "supervisor/gateway/websocket/frames.py",
        "supervisor/gateway/websocket/replayed_stream.py",
    ),
    "supervisor/launcher/test_launcher.py": ("supervisor/processes/signals.py",),
    "supervisor/links/test_encoding.py": ("supervisor/links/endpoint.py",),
    "supervisor/links/test_link.py": (
        "supervisor/links/carried_request.py",
        "supervisor/links/tensor_road.py",
        "supervisor/links/waiting.py",
        "supervisor/printable.py",
    ),
    "supervisor/links/test_tls.py": ("supervisor/cluster/link_credentials.py",),
    "supervisor/media/test_decoding.py": (
        "actors/media_decoder/__main__.py",
        "actors/media_decoder/job.py",
        "actors/media_decoder/refusal.py",
        "actors/media_decoder/trial.py",
        "actors/vision/jobs.py",
        "supervisor/media/contents.py",
    ),
    "supervisor/media/test_fetching.py": ("supervisor/media/http.py",),
    "supervisor/node/test_file_checks.py": (
        "supervisor/files/permissions.py",
        "supervisor/files/reading.py",
        "supervisor/node/credentials.py",
    ),
    "supervisor/node/test_gauges.py": ("supervisor/links/traffic.py",),
    "supervisor/node/test_reload.py": ("supervisor/node/file_changes.py", "supervisor/node/text_models.py"),
    "supervisor/node/test_reload_slow_files.py": ("supervisor/threads/file_threads.py",),
    "supervisor/processes/test_output_log.py": ("supervisor/threads/queued_writer.py",),
    "supervisor/processes/test_reaper.py": ("supervisor/processes/process.py",),
    "supervisor/processes/test_run_folder.py": ("actors/engines/sglang/shared_memory.py",),
    "supervisor/supervision/test_status.py": ("supervisor/supervision/events.py",),
    "supervisor/supervision/test_supervise.py": ("supervisor/supervision/life.py",),
    "supervisor/telemetry/test_metrics.py": (
        "supervisor/node/assembly.py",
        "supervisor/node/gateway_children.py",
        "supervisor/node/link_children.py",
        "supervisor/observers.py",
        "supervisor/runtime.py",
        "supervisor/telemetry/registry.py",
    ),
    "system/processes/test_clusters.py": ("bench/chaos.py", "bench/rolling.py"),
    "system/processes/test_endings.py": (
        "actors/engines/sglang/host/zygote.py",
        "bench/endings/__main__.py",
        "bench/endings/node_ends.py",
        "bench/endings/process_deaths.py",
        "bench/endings/streams.py",
        "bench/rig/node.py",
        "bench/rig/processes.py",
    ),
    "system/processes/test_pictures.py": ("bench/pictures/__main__.py", "bench/pictures/streams.py"),
    "system/sglang": ("actors/engines/sglang/host/__main__.py",),
    "system/sglang/test_contract.py": ("actors/engines/sglang/host/server.py",),
    "system/sglang/test_grammars.py": (
        "actors/engines/sglang/host/grammar_checker.py",
        "actors/engines/sglang/host/grammar_walk.py",
    ),
    "system/sglang/test_lives.py": (
        "actors/engines/sglang/host/scheduler.py",
        "actors/engines/sglang/host/warm_up.py",
        "supervisor/engines/sglang/engine.py",
    ),
    "system/sglang/test_options.py": ("actors/engines/sglang/host/translation.py",),
    "system/sglang/test_pair_losses.py": ("actors/engines/sglang/host/transfer_delay.py",),
    "system/sglang/test_penalties.py": ("actors/engines/sglang/host/penalties.py",),
    "system/sglang/test_ranks.py": ("actors/engines/sglang/host/follower_rank.py",),
    "system/sglang/test_vision_demo.py": ("bench/vision_demo.py",),
    "actors/test_processor_media.py": ("actors/vision/preparation.py",),
    "system/test_hostile_media.py": ("supervisor/media/network.py",),
    "actors/engines/sglang/host/test_encoder.py": ("actors/engines/sglang/host/vision_tower.py",),
    "actors/engines/sglang/host/test_media_input.py": (
        "actors/engines/sglang/host/pixels.py",
        "actors/engines/sglang/host/scheduler_tensors.py",
        "actors/engines/sglang/host/towers.py",
    ),
    "system/sglang/test_vision.py": ("supervisor/node/vision.py",),
}

RUN_BY_HAND = (  # they check their own results
    "bench/abort_times.py",
    "bench/attacks/cluster_attacks.py",
    "bench/attacks/connection_attacks.py",
    "bench/attacks/engine_attacks.py",
    "bench/attacks/honest_client.py",
    "bench/attacks/node_attacks.py",
    "bench/crowd.py",
    "bench/kv_routers.py",
    "bench/link_price.py",
    "bench/policies.py",
    "bench/rig/client_keys.py",
    "bench/rig/load_run.py",
)


def files(room: str) -> list[Path]:
    paths = (path.relative_to(ROOT) for path in (ROOT / room).rglob("*.py"))
    return [path for path in paths if not PATCHES & {*path.parts}]


PRODUCT = {path for room in ROOMS for path in files(room) if path.name != "__init__.py"}
TESTS = [path for room in ROOMS for path in files(f"tests/{room}") if path.name.startswith("test_")]


def product_file_of(test: Path) -> Path | None:
    """Return the product file whose name a test file begins with, the longest if there are several."""
    folder, name = Path(*test.parts[1:-1]), test.stem.removeprefix("test_")
    named = [path for path in PRODUCT if path.parent == folder and f"{name}_".startswith(f"{path.stem}_")]
    return max(named, key=lambda path: len(path.stem), default=None)


def own_tests(product_file: Path) -> list[str]:
    """Return the files that have a product file's own tests, and folders of tests, which mirror it or have a row."""
    mirrored = [str(test) for test in TESTS if product_file_of(test) == product_file]
    return mirrored or [f"tests/{name}" for name, paths in TESTED_BY.items() if str(product_file) in paths]


@pytest.mark.parametrize("test", TESTS, ids=str)
def test_a_test_file_begins_with_the_name_of_a_product_file_in_the_mirrored_folder(test: Path) -> None:
    known = str(test) in OF_A_ROOM or product_file_of(test) is not None
    folder = Path(*test.parts[1:-1])
    assert known, f"name {test} after the file of {folder}/ that it tests: test_FILE.py or test_FILE_TOPIC.py"


def test_every_product_file_has_its_tests_in_the_mirrored_folder_or_a_row_that_says_where() -> None:
    mirrored = {product_file_of(test) for test in TESTS}
    elsewhere = {Path(path) for paths in (*TESTED_BY.values(), RUN_BY_HAND) for path in paths}
    untested = sorted(map(str, PRODUCT - mirrored - elsewhere))
    assert not untested, f"{untested}: write tests/FOLDER/test_FILE.py, or add a row to TESTED_BY of this file"
    assert elsewhere - PRODUCT == set(), "rows of files that are no more"
    assert elsewhere & mirrored == set(), "rows of files that have tests of their own now"


def test_every_row_names_tests_that_exist() -> None:
    assert [name for name in TESTED_BY if not (ROOT / "tests" / name).exists()] == []
