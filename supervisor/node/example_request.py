"""An example of a request for the first model of a cluster, which a node announces with its address."""

from __future__ import annotations

import json

from supervisor.config.schema import Cluster

EXAMPLES: dict[str, tuple[str, dict[str, object]]] = {
    "generate": (
        "/v1/chat/completions",
        {"stream": True, "messages": [{"role": "user", "content": "Tell me about the oak"}]},
    ),
    "embed": ("/v1/embeddings", {"input": ["The oak", "The elm"]}),
    "score": ("/v1/rerank", {"query": "Which is old?", "documents": ["The oak", "The elm"]}),
}
"""The path and the body, without the model, of a request for a model of each task."""


def example_request(cluster: Cluster) -> tuple[str, str]:
    """Return the path and the body of a request that the first model of a cluster answers."""
    model = next(iter(cluster.model))
    path, body = EXAMPLES[cluster.task(model)]
    return path, json.dumps({"model": model, **body})
