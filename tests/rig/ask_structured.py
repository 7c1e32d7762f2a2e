"""Ask a server for structured output with pydantic-ai and langchain-openai; runs in the environment of these.

`python ask_structured.py URL MODEL` prints a JSON object for each client and type of `typed_outputs`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from pydantic import BaseModel

TRIES, TOKENS_MAX = 6, 600
PROMPT = "Tell me about the oak."


def by_pydantic_ai(url: str, model: str, kind: type[BaseModel], temperature: float) -> object:
    """Return the answer of an agent with native output."""
    ai, openai = import_module("pydantic_ai"), import_module("pydantic_ai.models.openai")
    provider = import_module("pydantic_ai.providers.openai").OpenAIProvider(base_url=url, api_key="none")
    agent = ai.Agent(
        openai.OpenAIChatModel(model, provider=provider),
        output_type=ai.NativeOutput(kind),
        retries=0,
        model_settings={"temperature": temperature, "max_tokens": TOKENS_MAX},
    )
    return agent.run_sync(PROMPT).output


def by_langchain(url: str, model: str, kind: type[BaseModel], temperature: float) -> object:
    """Return the answer of a chat model with structured output."""
    chat = import_module("langchain_openai").ChatOpenAI(
        model=model, base_url=url, api_key="none", temperature=temperature, max_tokens=TOKENS_MAX, max_retries=0
    )
    return chat.with_structured_output(kind, method="json_schema").invoke(PROMPT)


CLIENTS: dict[str, Callable[[str, str, type[BaseModel], float], object]] = {
    "pydantic-ai": by_pydantic_ai,
    "langchain-openai": by_langchain,
}


def outcome(ask: Callable[[float], object], kind: type[BaseModel], temperature: float) -> tuple[str, str]:
    """Return how an answer ended: `parsed`, `refused`, `length`, `invalid`, or `unread` by the client."""
    try:
        answer = ask(temperature)
    except Exception as error:  # noqa: BLE001  # each client has classes of its own
        text = f"{type(error).__name__}: {error}"
        if "answer_invalid" in text or "does not keep to" in text:
            return "invalid", text
        if "invalid_request" in text or "Error code: 400" in text or "status_code: 400" in text:
            return "refused", text
        return ("length" if "length limit" in text or "token limit" in text else "unread"), text
    return ("parsed" if isinstance(answer, kind) else "unread"), repr(answer)


def main(url: str, model: str) -> None:
    """Ask with each client for each type, a few times while answers are cut, and print how the last one ended."""
    types: tuple[type[BaseModel], ...] = import_module("typed_outputs").TYPES
    for client, ask in CLIENTS.items():
        for kind in types:
            found, detail, seen = "", "", list[str]()
            for number in range(TRIES):
                found, detail = outcome(partial(ask, url, model, kind), kind, min(number, 1))
                seen.append(found)
                if found in {"parsed", "refused", "unread"}:
                    break
            line: dict[str, Any] = {"client": client, "type": kind.__name__, "outcomes": seen, "detail": detail[:500]}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
