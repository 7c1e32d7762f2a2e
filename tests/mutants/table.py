"""Which bugs are planted, and which suites of tests may notice them."""

from __future__ import annotations

from importlib import import_module

from tests.mutants.bug import Bug

PARTS = {  # the modules of bugs, and the suites by which each is likeliest to be noticed
    "links": ("streams", "contract", "examples"),
    "answers": ("text",),
    "text": ("sizes", "text"),
    "gateway": ("gateway",),
    "admission": ("fair", "delivery", "unauthenticated", "budgets", "gateway"),
    "cluster": ("streams", "directory", "attached", "examples", "links"),
    "config": ("config",),
    "announcements": ("telling", "router"),
    "routing": ("directory", "router"),
    "small_pieces": ("pieces", "gateway"),
    "event_loop": ("loop", "examples"),
    "outliers": ("router", "examples"),
    "engines": ("engines",),
    "simulator": ("alone", "cluster"),
    "supervision": ("tree",),
    "stalls": ("stall", "examples"),
    "grammars": ("grammars",),
    "permissions": ("names",),
    "queues": ("pending", "fair"),
    "fast_path": ("fast_path", "ways"),
}


def planted(part: str) -> list[tuple[str, Bug, str]]:
    """Return the bugs of one part, each with its file."""
    return [(path, bug, part) for path, bugs in import_module(f"tests.mutants.{part}").BUGS.items() for bug in bugs]


MUTANTS = [mutant for part in PARTS for mutant in planted(part)]
SUITES = {  # the quickest first
    "fast_path": [
        "tests/actors/kit/test_fast_path.py",
        "tests/actors/test_decode_stuck_slots.py",
        "tests/actors/routing/test_routed_request_resumes.py",
    ],
    "ways": [
        "tests/system/test_token_ways.py",
        "tests/system/test_reference_cycles.py",
        "tests/supervisor/node/test_garbage.py",
    ],
    "streams": ["tests/protocol/test_streams.py", "tests/protocol/test_frames.py"],
    "contract": ["tests/contracts/test_fake_engine.py"],
    "directory": [
        "tests/supervisor/cluster/test_directory.py",
        "tests/supervisor/cluster/test_node_records.py",
        "tests/supervisor/cluster/test_workers.py",
        "tests/supervisor/control/test_control.py",
        "tests/supervisor/cluster/test_carried_links.py",
        "tests/supervisor/cluster/test_mesh_dialing.py",
    ],
    "attached": ["tests/protocol/test_attachments.py", "tests/protocol/test_greeting.py"],
    "router": [
        "tests/actors/test_router.py",
        "tests/actors/test_router_engines.py",
        "tests/actors/routing/test_least_loaded.py",
        "tests/actors/routing/test_routed_request_resumes.py",
        "tests/actors/routing/test_failover.py",
        "tests/actors/routing/test_outliers.py",
        "tests/actors/routing/test_rebalancing.py",
    ],
    "examples": [
        "tests/actors/kit/test_calls.py",
        "tests/actors/kit/test_priority_inbox.py",
        "tests/supervisor/links/test_link.py",
        "tests/supervisor/links/test_asking.py",
        "tests/supervisor/links/test_serving.py",
        "tests/supervisor/links/test_frame_writer.py",
        "tests/supervisor/links/test_heartbeat.py",
        "tests/actors/test_decode.py",
        "tests/actors/test_decode_stuck_slots.py",
    ],
    "links": [
        "tests/supervisor/cluster/test_mesh.py",
        "tests/supervisor/cluster/test_mesh_refusals.py",
        "tests/supervisor/cluster/test_mesh_violations.py",
        "tests/supervisor/cluster/test_mesh_unauthenticated.py",
    ],
    "stall": [
        "tests/supervisor/links/test_heartbeat.py",
        "tests/supervisor/links/test_heartbeat_stalls.py",
        "tests/supervisor/links/test_handshake_stream.py",
        "tests/supervisor/cluster/test_carried_links.py",
    ],
    "telling": [
        "tests/supervisor/cluster/test_announcements.py",
        "tests/supervisor/cluster/test_carried_links.py",
        "tests/supervisor/cluster/test_model_identity.py",
        "tests/protocol/test_greeting.py",
    ],
    "engines": [
        "tests/actors/engines/sglang/test_boot_message.py",
        "tests/actors/engines/sglang/test_adapter.py",
        "tests/protocol/test_model_folder.py",
    ],
    "grammars": [
        "tests/actors/test_grammars.py",
        "tests/protocol/test_grammars.py",
        "tests/actors/engines/sglang/host/plugin/test_espalier_sglang.py",
    ],
    "config": [
        "tests/supervisor/config/test_load.py",
        "tests/supervisor/node/test_file_checks.py",
        "tests/supervisor/config/test_toml_lines.py",
        "tests/supervisor/node/test_reload.py",
        "tests/supervisor/node/test_reload_slow_files.py",
        "tests/supervisor/node/test_gauges.py",
        "tests/supervisor/cli/test_commands.py",
        "tests/supervisor/control/test_control.py",
    ],
    "names": [
        "tests/supervisor/gateway/test_keys_grammars.py",
        "tests/supervisor/gateway/test_requests_promises.py",
        "tests/supervisor/sockets/test_unauthenticated.py",
        "tests/supervisor/links/test_tls.py",
        "tests/supervisor/cluster/test_mesh_unauthenticated.py",
    ],
    "loop": [
        "tests/supervisor/telemetry/test_logs.py",
        "tests/supervisor/telemetry/test_bounded_json.py",
        "tests/supervisor/processes/test_output_log.py",
        "tests/supervisor/launcher/test_parent_pipe.py",
        "tests/supervisor/telemetry/test_loop_monitor.py",
        "tests/supervisor/launcher/test_node_process.py",
        "tests/supervisor/launcher/test_launcher.py",
        "tests/supervisor/node/test_node_drains.py",
        "tests/rig/test_turns.py",
    ],
    "tree": [
        "tests/supervisor/supervision/test_supervise_siblings.py",
        "tests/supervisor/supervision/test_supervise.py",
        "tests/supervisor/supervision/test_supervise_failures.py",
        "tests/supervisor/supervision/test_tree.py",
        "tests/supervisor/sockets/test_descriptor_reserve.py",
        "tests/supervisor/processes/test_run_folder.py",
        "tests/supervisor/control/test_unix_socket.py",
        "tests/supervisor/cluster/test_readiness.py",
        "tests/supervisor/supervision/test_supervise_random_trees.py",
    ],
    "text": [
        "tests/actors/text/test_choices.py",
        "tests/actors/text/test_detokenizer.py",
        "tests/actors/text/test_whole_tokens.py",
        "tests/actors/text/test_logprobs.py",
        "tests/actors/test_processor.py",
    ],
    "sizes": [
        "tests/supervisor/threads/test_text_threads.py",
        "tests/actors/text/test_encoding.py",
        "tests/actors/text/test_candidates.py",
    ],
    "fair": [
        "tests/actors/kit/test_fair_queue.py",
        "tests/protocol/test_cost.py",
        "tests/supervisor/gateway/test_admission_generations.py",
        "tests/actors/kit/test_priority_inbox.py",
        "tests/supervisor/gateway/test_admission.py",
    ],
    "delivery": ["tests/supervisor/gateway/test_requests_delivery.py"],
    "pending": [
        "tests/actors/test_prefill.py",
        "tests/actors/kit/test_pending_prefill.py",
        "tests/actors/engines/simulated/test_rendezvous_rooms.py",
        "tests/supervisor/gateway/websocket/test_message_reader.py",
    ],
    "budgets": ["tests/supervisor/gateway/test_memory_budgets.py"],
    "unauthenticated": [
        "tests/supervisor/sockets/test_unauthenticated.py",
        "tests/supervisor/gateway/http/test_head_checks.py",
    ],
    "pieces": ["tests/supervisor/gateway/websocket/test_frame_counter.py"],
    "gateway": [
        "tests/supervisor/node/test_node_shared_port.py",
        "tests/supervisor/gateway/test_admission.py",
        "tests/supervisor/gateway/test_outbox.py",
        "tests/supervisor/gateway/test_server.py",
        "tests/supervisor/gateway/http/test_connection.py",
        "tests/supervisor/gateway/http/test_connection_edges.py",
        "tests/supervisor/gateway/websocket/test_session.py",
        "tests/supervisor/gateway/websocket/test_lanes.py",
        "tests/supervisor/gateway/websocket/test_lanes_ends.py",
        "tests/supervisor/gateway/http/test_exchange_no_memory.py",
        "tests/supervisor/gateway/test_gateway_limits_on_counts.py",
        "tests/supervisor/gateway/test_gateway_limits_on_times.py",
    ],
    "cluster": ["tests/system/simulator/test_seeds.py", "-k", "by_a_cluster"],
    "alone": ["tests/system/simulator/test_single_fault.py"],
    "simulation": ["tests/system/simulator/test_seeds.py", "-k", "allowed_error and not by_a_cluster"],
    "sweep": ["tests/system/test_sweep.py", "tests/system/test_sweep_clients.py"],
    # Minutes, for the few bugs that nothing above has noticed: a test of another file may.
    "rooms": [
        "tests/protocol",
        "tests/actors",
        "tests/contracts",
        "tests/supervisor",
        "-m",
        "not realtime and not engine",
    ],
}
