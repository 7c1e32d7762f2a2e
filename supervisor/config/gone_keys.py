"""Former keys of `cluster.toml`, each with a sentence about its successor, in place of "unknown key".

Their values are constants beside the code that uses them, since no deployment had a reason to set them. A row leaves
this table once no file with its key can be around any more.
"""

from __future__ import annotations

import re

from attrs import evolve

from protocol.strict.mistakes import Mistake

ENTRY = re.compile(r'^(node|model|engine|pool)(?:\.[\w-]+|\["(?:[^"\\]|\\.)*"\])')

_SENTENCES = {
    "node.NAME.turn_max_s": "turns longer than 0.02 s are counted and logged",
    "node.NAME.shared_lease_s": "an engine has 30 s to come for the tensors of a request",
    "node.NAME.log_queue_lines_max": "10,000 lines of the log may wait to be written",
    "node.NAME.log_queue_bytes_max": "4 MiB of the log may wait to be written",
    "node.NAME.output_log_bytes_max": "the output of an engine is rotated at 4 MiB",
    "cluster.attached_bytes_max": "512 MiB of tensors may be on their way to a node over one link",
    "cluster.handshake_s": "a connection has 5 s to prove who it is",
    "cluster.handshakes_max": "32 connections at a time may not have proved who they are",
    "cluster.tell_s": "loads are announced every 0.1 s, or less often in a large cluster",
    "cluster.announcements_max": "a node that routes gets 500 announcements of load a second at most",
    "cluster.retry_min_s": "a node is dialed again after 0.1 s, then twice as long each time, 5 s at most",
    "cluster.retry_max_s": "a node is dialed again after 0.1 s, then twice as long each time, 5 s at most",
    "gateway.text": "long texts are tokenised in 2 threads, for which 512 may wait, 128 of them of one key",
    "gateway.limits.head_bytes_max": "the head of a request may have 32 KiB",
    "gateway.limits.head_s": "the head of a request may take 10 s",
    "gateway.limits.stall_s": "a client with a backlog may read nothing for 30 s",
    "gateway.limits.close_s": "a connection has 2 s to be closed",
    "gateway.limits.key_share_max": "one key may use three quarters of bodies_bytes_max and of answers_bytes_max",
    "gateway.limits.websocket_queue_max": "16 responses of one WebSocket may wait to run",
    "gateway.limits.websocket_lanes_max": "one WebSocket may have 32 lanes",
    "gateway.limits.websocket_running_max": "16 responses of one WebSocket may run at once",
    "gateway.limits.websocket_idle_s": "a WebSocket may be idle for 900 s",
    "gateway.limits.websocket_s_max": "a WebSocket may be open for an hour",
    "gateway.media.aspect_max": "the longer side of an image may be 200 times the shorter one",
    "gateway.media.frames_max": "a video may have 10,000 frames; seconds_max limits how long it lasts",
    "gateway.media.redirects_max": "3 redirects are followed",
    "gateway.media.decode_s": "decoding a content may take 10 s of processor time",
    "gateway.media.fetches_max": "16 contents are fetched at a time",
    "gateway.media.decoder_memory_bytes_max": "a decoder may use 1 GiB",
    "gateway.media.waiting_max": "256 requests may wait for their media",
    "model.NAME.drains_max": "a request survives 64 drains of its workers; resumes_max limits other losses",
    "model.NAME.crashes_max": "a request may crash one engine and is tried on one more",
    "model.NAME.resume_tokens_max": "a request with more than 65,536 tokens sent is not resumed",
    "model.NAME.move_after_s": "a request that waits 2 s at a busy worker may move to another, twice at most",
    "model.NAME.moves_max": "a request that waits 2 s at a busy worker may move to another, twice at most",
    "model.NAME.preemptions_max": "a request may be preempted by a full engine once",
    "model.NAME.ejection": "a worker is ejected after 5 failures in a row, or half of 20 answers, for 10 s to 5 min",
    "engine.NAME.deadlines.release_s": "a slot has 5 s to be free again",
    "engine.NAME.deadlines.leak_s": "an engine is restarted once a slot has been stuck for 300 s",
    "engine.NAME.deadlines.stuck_max": "an engine is restarted once 4 of its slots are stuck, or all",
    "engine.NAME.encoder.batch_wait_s": "the first item of a batch waits 5 ms for others",
    "engine.NAME.encoder.waiting_s": "an item may wait 30 s for its batch",
    "engine.NAME.encoder.batch_s": "a batch may take 60 s",
    "engine.NAME.encoder.release_s": "an encoder has 5 s to be free of a batch that has failed",
    "engine.NAME.events.listen": "only engines of SGLang have sockets for subscribers",
    "engine.NAME.events.replay": "only engines of SGLang have sockets for subscribers",
    "engine.NAME.ladder": "an engine's process has 5 s to end once asked, 2 s after SIGTERM and 2 s after SIGKILL",
    "engine.NAME.grammars": "a grammar may take 2 s of processor time to compile and 256 MiB, and 10 ms a token",
}


def explained(mistake: Mistake) -> Mistake:
    """Return a mistake about an unknown key, with its own sentence if it is a former key."""
    sentence = _SENTENCES.get(ENTRY.sub(r"\1.NAME", mistake.path))
    return mistake if sentence is None else evolve(mistake, message=f"is no longer a key: {sentence}")
