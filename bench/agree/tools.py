"""Load tools that others have written: the same load on each one's command line, and its figures in our words.

Their words differ more than their figures: `inter-token latency` is the gap between two events in one tool, and in the
others one mean for each request. A figure that a tool lacks is missing here, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from bench.peers import cpu_sglang
from bench.peers.install import is_installed
from bench.peers.peer import ENVIRONMENTS

Figures = dict[str, float]

FIGURES = {
    "requests/s": "requests that completed, over the run without its warm-up",
    "output tokens/s": "tokens of these, by the server's usage",
    "first token p50 ms": "from sending the request to the first event with content",
    "first token p99 ms": "of some hundred requests: the worst few",
    "gap p50 ms": "between two events with content that follow each other",
    "token p50 ms": "one value a request: its time from the first token to the end, over its tokens after the first",
    "request p50 ms": "from sending the request to the end of its answer",
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
WORDS_SHARE = 0.5  # our prompts are of words, most of which are two of this vocabulary's tokens
IDS_SHARE = 1 / 3  # the texts of random ids become three times as many tokens again


@frozen(kw_only=True)
class Load:
    """Streaming chat completions in closed loop, answered with exactly so many tokens."""

    url: str
    model: str
    tokenizer: Path  # the folder of the model that is served
    clients: int
    requests: int
    prompt_tokens: int = 128  # without the chat template's
    output_tokens: int = 64

    @property
    def warmup(self) -> int:
        """The number of requests before the others: one of each client, which opens its connection."""
        return self.clients


@frozen(kw_only=True)
class Tool:
    """A load tool; `words` runs it so that it leaves its results in a folder, from which `read` takes the figures."""

    name: str
    title: str
    words: Callable[[Load, Path, str], list[str]]  # the load, the folder, the tool's interpreter
    read: Callable[[Path], Figures]
    environment: str | None = None  # by the name of its list in `bench/peers/`; None: this one's
    variables: Mapping[str, str] = field(factory=dict)

    def python(self, environments: Path = ENVIRONMENTS) -> str:
        """Return the interpreter of its environment."""
        return sys.executable if self.environment is None else str(environments / self.environment / "bin" / "python")

    def is_installed(self, environments: Path) -> bool:
        """Return whether its environment was installed to the end, from its list as it is now."""
        return self.environment is None or is_installed(self.environment, environments)


def _options(**values: object) -> list[str]:
    """Return `--name value` for each, with hyphens."""
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _module(python: str, name: str, *words: str) -> list[str]:
    """Return the command that runs a module by an interpreter."""
    return [python, "-m", name, *words]


def _program(python: str, name: str, *words: str) -> list[str]:
    """Return the command that runs a program of an interpreter's environment."""
    return [str(Path(python).with_name(name)), *words]


def _document(path: Path) -> Any:  # a tool's own form
    return json.loads(path.read_bytes())  # one of them writes Infinity, which is no JSON


# Ours -------------------------------------------------------------------------------------


def _ours_words(load: Load, folder: Path, python: str) -> list[str]:
    values = _options(
        url=load.url,
        model=load.model,
        clients=load.clients,
        requests=load.requests,
        warmup=load.warmup,
        prompt_tokens=round(load.prompt_tokens * WORDS_SHARE),
        output_tokens=load.output_tokens,
        json=folder / "load.json",
    )
    return _module(python, "bench", "load", *values, "--ignore-eos", "--quiet")


def _ours_read(folder: Path) -> Figures:
    document = _document(folder / "load.json")
    rates, times = document["rates"], document["latencies"]
    return {
        "requests/s": rates["requests_per_s"],
        "output tokens/s": rates["output_tokens_per_s"],
        "first token p50 ms": times["ttft"]["p50"],
        "first token p99 ms": times["ttft"]["p99"],
        "gap p50 ms": times["itl"]["p50"],
        "token p50 ms": times["tpot"]["p50"],
        "request p50 ms": times["e2e"]["p50"],
    }


# aiperf -----------------------------------------------------------------------------------


def _aiperf_words(load: Load, folder: Path, python: str) -> list[str]:
    values = _options(
        model=load.model,
        url=load.url,
        endpoint_type="chat",
        tokenizer=load.tokenizer,
        concurrency=load.clients,
        request_count=load.requests,
        warmup_request_count=load.warmup,
        isl=load.prompt_tokens,
        osl=load.output_tokens,
        extra_inputs="ignore_eos:true",
        artifact_dir=folder,
        ui="none",
    )
    switches = ("--streaming", "--use-server-token-count", "--no-server-metrics", "--no-gpu-telemetry")
    return _program(python, "aiperf", "profile", *values, *switches)


def _aiperf_read(folder: Path) -> Figures:
    document = _document(folder / "profile_export_aiperf.json")
    return {
        "requests/s": document["request_throughput"]["avg"],
        "output tokens/s": document["output_token_throughput"]["avg"],
        "first token p50 ms": document["time_to_first_token"]["p50"],
        "first token p99 ms": document["time_to_first_token"]["p99"],
        "gap p50 ms": document["inter_chunk_latency"]["p50"],
        "token p50 ms": document["inter_token_latency"]["p50"],
        "request p50 ms": document["request_latency"]["p50"],
    }


# guidellm ---------------------------------------------------------------------------------


def _guidellm_words(load: Load, folder: Path, python: str) -> list[str]:
    values = _options(
        backend=f"kind=openai_http,target={load.url},model={load.model},request_format=/v1/chat/completions",
        profile=f"kind=concurrent,streams={load.clients},warmup={load.warmup}",
        constraint=f"kind=max_requests,count={load.requests + load.warmup}",
        tokenizer=f"kind=hf_auto,model={load.tokenizer}",
        data=f"kind=synthetic_text,prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}",
        output=f"kind=json,path={folder / 'guidellm.json'}",
    )
    return _program(python, "guidellm", "run", *values, "--disable-console-interactive")


def _guidellm_read(folder: Path) -> Figures:
    metrics = _document(folder / "guidellm.json")["benchmarks"][0]["metrics"]
    first = metrics["time_to_first_token_ms"]["successful"]["percentiles"]
    return {
        "requests/s": metrics["requests_per_second"]["successful"]["mean"],
        "output tokens/s": metrics["output_tokens_per_second"]["successful"]["mean"],
        "first token p50 ms": first["p50"],
        "first token p99 ms": first["p99"],
        "token p50 ms": metrics["inter_token_latency_ms"]["successful"]["percentiles"]["p50"],
        "request p50 ms": 1e3 * metrics["request_latency"]["successful"]["percentiles"]["p50"],
    }


# sglang.bench_serving ---------------------------------------------------------------------


def _serving_words(load: Load, folder: Path, python: str) -> list[str]:
    values = _options(
        backend="sglang-oai-chat",
        base_url=load.url,
        model=load.model,
        tokenizer=load.tokenizer,
        dataset_name="random-ids",
        random_input_len=round(load.prompt_tokens * IDS_SHARE),
        random_output_len=load.output_tokens,
        random_range_ratio=1.0,
        num_prompts=load.requests,
        warmup_requests=load.warmup,
        max_concurrency=load.clients,
        output_file=folder / "serving.jsonl",
    )
    return _module(python, "sglang.bench_serving", *values, "--disable-tqdm")


def _serving_read(folder: Path) -> Figures:
    document = _document(folder / "serving.jsonl")
    return {
        "requests/s": document["request_throughput"],
        "output tokens/s": document["output_throughput"],
        "first token p50 ms": document["median_ttft_ms"],
        "first token p99 ms": document["p99_ttft_ms"],
        "gap p50 ms": document["median_itl_ms"],
        "token p50 ms": document["median_tpot_ms"],
        "request p50 ms": document["median_e2e_latency_ms"],
    }


OURS = Tool(name="load", title="python -m bench load", words=_ours_words, read=_ours_read)
OTHERS = {
    tool.name: tool
    for tool in (
        Tool(  # offline it would only look into a cache of the hub
            name="aiperf", title="aiperf 0.13.0", words=_aiperf_words, read=_aiperf_read, environment="aiperf"
        ),
        Tool(
            name="guidellm",
            title="guidellm 0.8.1",
            words=_guidellm_words,
            read=_guidellm_read,
            environment="guidellm",
            variables=OFFLINE,
        ),
        Tool(
            name="bench-serving",
            title="sglang.bench_serving 0.5.23",
            words=_serving_words,
            read=_serving_read,
            environment="bench-serving",
            variables={**OFFLINE, **cpu_sglang.VARIABLES},
        ),
    )
}
