"""A worker of SMG that computes nothing: SGLang's gRPC service, by which SMG sends token ids, and gets some and events.

    python bench/turns/smg_worker.py PORT MODEL_FOLDER MODEL

It runs in the environment `smg-worker`. SMG encodes and decodes texts itself where its workers speak gRPC; before HTTP
workers it only forwards them.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2

SERVICE = "sglang.grpc.scheduler.SglangScheduler"
THREADS = 64
PAGE_SIZE = 16
TOKENS = range(1000, 2000)  # words, in the vocabularies of these benches
MESSAGE_BYTES_MAX = 64 * 1024 * 1024


class Cache:
    """The blocks of all prompts so far, which are never dropped, and the events of their storing."""

    def __init__(self) -> None:
        self._held = dict[int, None]()
        self._batches = list[Any]()
        self._grown = threading.Condition()

    def store(self, ids: Sequence[int]) -> int:
        """Store the full blocks of a prompt; return how many tokens at its beginning were stored before."""
        hashes, last = list[int](), 0
        for start in range(0, len(ids) - PAGE_SIZE + 1, PAGE_SIZE):
            last = hash((last, *ids[start : start + PAGE_SIZE]))
            hashes.append(last)
        with self._grown:
            found = next((place for place, each in enumerate(hashes) if each not in self._held), len(hashes))
            if found < len(hashes):
                self._held.update(dict.fromkeys(hashes[found:]))
                self._batches.append(_stored(len(self._batches) + 1, ids, hashes, found))
                self._grown.notify_all()
        return found * PAGE_SIZE

    def follow(self, *_: object) -> Iterator[Any]:
        """Yield every event, and the next ones as they come."""
        place = 0
        while True:
            with self._grown:
                while place == len(self._batches):
                    self._grown.wait()
            yield self._batches[place]
            place += 1


def _stored(number: int, ids: Sequence[int], hashes: Sequence[int], found: int) -> Any:
    blocks = [
        common_pb2.KvBlock(
            block_hash=hashes[place],
            token_ids=ids[place * PAGE_SIZE : (place + 1) * PAGE_SIZE],
            block_size=PAGE_SIZE,
        )
        for place in range(found, len(hashes))
    ]
    stored = common_pb2.KvBlocksStored(blocks=blocks, parent_block_hash=hashes[found - 1] if found else None)
    event = common_pb2.KvCacheEvent(event_id=number, stored=stored)
    return common_pb2.KvEventBatch(sequence_number=number, timestamp=time.time(), events=[event])


def generate(cache: Cache, request: Any, _: object) -> Iterator[Any]:
    """Answer with as many tokens as are asked for."""
    prompt, wanted = list(request.tokenized.input_ids), request.sampling_params.max_new_tokens
    ids = [TOKENS[(len(prompt) + number) % len(TOKENS)] for number in range(wanted)]
    counts = {"prompt_tokens": len(prompt), "cached_tokens": cache.store(prompt)}
    for number, token in enumerate(ids if request.stream else (), start=1):
        chunk = {"token_ids": [token], "completion_tokens": number, **counts}
        yield sglang_scheduler_pb2.GenerateResponse(request_id=request.request_id, chunk=chunk)
    whole = {"output_ids": ids, "finish_reason": "length", "completion_tokens": wanted, **counts}
    yield sglang_scheduler_pb2.GenerateResponse(request_id=request.request_id, complete=whole)


def methods(folder: Path, model: str) -> dict[str, Callable[[Any, object], Any]]:
    """Return the unary methods by their names."""
    config = json.loads((folder / "config.json").read_text())
    context = config["max_position_embeddings"]
    about = sglang_scheduler_pb2.GetModelInfoResponse(
        model_path=str(folder),
        tokenizer_path=str(folder),
        is_generation=True,
        served_model_name=model,
        max_context_length=context,
        max_req_input_len=context,
        vocab_size=config["vocab_size"],
        eos_token_ids=[config["eos_token_id"]],
        bos_token_id=config["bos_token_id"],
    )
    server = sglang_scheduler_pb2.GetServerInfoResponse(server_type="grpc", max_total_num_tokens=context)
    return {
        "HealthCheck": lambda *_: sglang_scheduler_pb2.HealthCheckResponse(healthy=True),
        "GetModelInfo": lambda *_: about,
        "GetServerInfo": lambda *_: server,
        "GetLoads": lambda *_: sglang_scheduler_pb2.GetLoadsResponse(),
        "Abort": lambda *_: sglang_scheduler_pb2.AbortResponse(success=True),
        "FlushCache": lambda *_: common_pb2.FlushCacheResponse(),
    }


def main(port: str, folder: str, model: str) -> None:
    """Serve until the process is ended."""
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            method,
            request_deserializer=getattr(_module(name), f"{name}Request").FromString,
            response_serializer=getattr(_module(name), f"{name}Response").SerializeToString,
        )
        for name, method in methods(Path(folder), model).items()
    }
    cache = Cache()
    handlers["Generate"] = grpc.unary_stream_rpc_method_handler(
        partial(generate, cache),
        request_deserializer=sglang_scheduler_pb2.GenerateRequest.FromString,
        response_serializer=sglang_scheduler_pb2.GenerateResponse.SerializeToString,
    )
    handlers["SubscribeKvEvents"] = grpc.unary_stream_rpc_method_handler(
        cache.follow,
        request_deserializer=common_pb2.SubscribeKvEventsRequest.FromString,
        response_serializer=common_pb2.KvEventBatch.SerializeToString,
    )
    options = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)]
    server = grpc.server(ThreadPoolExecutor(THREADS), options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def _module(name: str) -> Any:
    return common_pb2 if hasattr(common_pb2, f"{name}Request") else sglang_scheduler_pb2


if __name__ == "__main__":
    main(*sys.argv[1:])
