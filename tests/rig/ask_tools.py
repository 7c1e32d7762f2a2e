"""Offer a tool to a server by stock clients, run what is called, and print the answer; runs in the clients' environment.

`python ask_tools.py URL MODEL` prints a JSON object for each client, API and way to read, with the calls that were run.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any

from pydantic import BaseModel

WEATHER = {"Paris": "18 degrees and clear", "Tokyo": "22 degrees and rainy"}
QUESTIONS = {"one": "What is the weather in Paris?", "two": "What is the weather in Paris and in Tokyo?"}
RECORD = "Describe Paris as a record."
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Tell the weather in a city.", "parameters": CITY}
ROUNDS_MAX = 4

Run = Callable[..., str]  # a tool, of a city
Ask = Callable[
    [str, str, str, Run, bool], str
]  # of a URL and a model: a question, its tool, and whether it is streamed


class Town(BaseModel):
    """What pydantic-ai asks for by a tool."""

    city: str
    country: str
    people: int


# openai ----------------------------------------------------------------------------------


def openai_client(url: str) -> Any:
    """Return a client that tries once."""
    return import_module("openai").OpenAI(base_url=url, api_key="none", max_retries=0)


def openai_chat(url: str, model: str, question: str, run: Run, streamed: bool) -> str:
    """Ask by chat completions."""
    client, messages = openai_client(url), [{"role": "user", "content": question}]
    asked: dict[str, Any] = {"model": model, "temperature": 0, "tools": [{"type": "function", "function": FUNCTION}]}
    for _ in range(ROUNDS_MAX):
        if streamed:
            with client.chat.completions.stream(messages=messages, **asked) as stream:
                for _event in stream:
                    pass
                [choice] = stream.get_final_completion().choices
        else:
            [choice] = client.chat.completions.create(messages=messages, **asked).choices
        if choice.finish_reason == "stop":
            return str(choice.message.content)
        assert choice.finish_reason == "tool_calls", choice
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            result = run(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError(messages)


def ran(response: Any, run: Run) -> list[Any]:
    """Return the results of the calls in a response."""
    assert response.status == "completed", response
    return [
        {"type": "function_call_output", "call_id": each.call_id, "output": run(**json.loads(each.arguments))}
        for each in response.output
        if each.type == "function_call"
    ]


def openai_responses(url: str, model: str, question: str, run: Run, streamed: bool) -> str:
    """Ask by Responses over HTTP."""
    client, items = openai_client(url), [{"role": "user", "content": question}]
    asked: dict[str, Any] = {"model": model, "temperature": 0, "tools": [{"type": "function", **FUNCTION}]}
    for _ in range(ROUNDS_MAX):
        if streamed:
            with client.responses.stream(input=items, **asked) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(input=items, **asked)
        if not (results := ran(response, run)):
            return str(response.output_text)
        items += [*response.output, *results]
    raise AssertionError(items)


def openai_socket(url: str, model: str, question: str, run: Run, _streamed: bool) -> str:
    """Ask by Responses over a WebSocket, and send the results alone, behind the id of the response."""
    asked: dict[str, Any] = {"model": model, "temperature": 0, "tools": [{"type": "function", **FUNCTION}]}
    items: Any = question
    more: dict[str, Any] = {}
    with openai_client(url).responses.connect() as connection:
        for _ in range(ROUNDS_MAX):
            connection.response.create(input=items, **more, **asked)
            response = next(event.response for event in connection if event.type == "response.completed")
            if not (items := ran(response, run)):
                return str(response.output_text)
            more = {"previous_response_id": response.id}
    raise AssertionError(items)


# openai-agents ---------------------------------------------------------------------------


def by_agents(
    make: Callable[[Any, Any, str], Any], url: str, model: str, question: str, run: Run, streamed: bool
) -> str:
    """Ask by an agent of openai-agents."""
    agents = import_module("agents")
    agents.set_tracing_disabled(disabled=True)

    def get_weather(city: str) -> str:
        """Tell the weather in a city."""
        return run(city)

    async def answered() -> str:
        client = import_module("openai").AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        agent = agents.Agent(
            name="weather",
            tools=[agents.function_tool(get_weather)],
            model=make(agents, client, model),
            model_settings=agents.ModelSettings(temperature=0),
        )
        if not streamed:
            return str((await agents.Runner.run(agent, question)).final_output)
        result = agents.Runner.run_streamed(agent, question)
        async for _event in result.stream_events():
            pass
        return str(result.final_output)

    return asyncio.run(answered())


def agents_chat(agents: Any, client: Any, model: str) -> Any:
    """Return a model by chat completions."""
    return agents.OpenAIChatCompletionsModel(model=model, openai_client=client)


def agents_responses(agents: Any, client: Any, model: str) -> Any:
    """Return a model by Responses over HTTP."""
    return agents.OpenAIResponsesModel(model=model, openai_client=client)


def agents_socket(agents: Any, client: Any, model: str) -> Any:
    """Return a model by Responses over a WebSocket."""
    return agents.OpenAIResponsesWSModel(model=model, openai_client=client)


# langchain-openai ------------------------------------------------------------------------


def by_langchain(uses_responses: bool, url: str, model: str, question: str, run: Run, streamed: bool) -> str:
    """Ask by a chat model with a bound tool."""
    messages: list[Any] = [("human", question)]
    chat = import_module("langchain_openai").ChatOpenAI(
        model=model, base_url=url, api_key="none", temperature=0, max_retries=0, use_responses_api=uses_responses
    )
    bound = chat.bind_tools([{"type": "function", "function": FUNCTION}])
    for _ in range(ROUNDS_MAX):
        if streamed:
            first, *pieces = bound.stream(messages)
            answer = sum(pieces, first)
        else:
            answer = bound.invoke(messages)
        if not answer.tool_calls:
            return str(answer.text)
        assert not answer.invalid_tool_calls
        messages.append(answer)
        message = import_module("langchain_core.messages").ToolMessage
        messages += [message(run(**call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    raise AssertionError(messages)


# pydantic-ai -----------------------------------------------------------------------------


def pydantic_model(name: str, url: str, model: str) -> Any:
    """Return a model of pydantic-ai."""
    provider = import_module("pydantic_ai.providers.openai").OpenAIProvider(base_url=url, api_key="none")
    return getattr(import_module("pydantic_ai.models.openai"), name)(model, provider=provider)


def by_pydantic_ai(name: str, url: str, model: str, question: str, run: Run, streamed: bool) -> str:
    """Ask by an agent with a tool."""
    agent = import_module("pydantic_ai").Agent(
        pydantic_model(name, url, model), retries=0, model_settings={"temperature": 0}
    )

    def get_weather(city: str) -> str:
        """Tell the weather in a city."""
        return run(city)

    agent.tool_plain(get_weather)

    async def read() -> str:
        async with agent.run_stream(question) as result:
            return str(await result.get_output())

    return asyncio.run(read()) if streamed else str(agent.run_sync(question).output)


def pydantic_record(name: str, url: str, model: str) -> str:
    """Ask for a typed answer in the library's default way, a tool that has to be called."""
    agent = import_module("pydantic_ai").Agent(
        pydantic_model(name, url, model), output_type=Town, retries=0, model_settings={"temperature": 0}
    )
    return str(agent.run_sync(RECORD).output.model_dump_json())


CLIENTS: dict[str, Callable[..., str]] = {
    "openai chat": openai_chat,
    "openai responses": openai_responses,
    "openai socket": openai_socket,
    "openai-agents chat": partial(by_agents, agents_chat),
    "openai-agents responses": partial(by_agents, agents_responses),
    "openai-agents socket": partial(by_agents, agents_socket),
    "langchain-openai chat": partial(by_langchain, False),
    "langchain-openai responses": partial(by_langchain, True),
    "pydantic-ai chat": partial(by_pydantic_ai, "OpenAIChatModel"),
    "pydantic-ai responses": partial(by_pydantic_ai, "OpenAIResponsesModel"),
}
RECORDS = {"pydantic-ai chat": "OpenAIChatModel", "pydantic-ai responses": "OpenAIResponsesModel"}


def outcomes(url: str, model: str) -> Iterable[dict[str, Any]]:
    """Yield what each client did."""
    for client, ask in CLIENTS.items():
        for name, question in QUESTIONS.items():
            for streamed in (False, True):
                cities: list[str] = []

                def run(city: str, cities: list[str] = cities) -> str:
                    cities.append(city)
                    return WEATHER.get(city, "unknown")

                answer = attempt(partial(ask, url, model, question, run, streamed))
                yield {"client": client, "asked": name, "streamed": streamed, "cities": cities, "answer": answer}
    for client, kind in RECORDS.items():
        answer = attempt(partial(pydantic_record, kind, url, model))
        yield {"client": client, "asked": "record", "streamed": False, "cities": [], "answer": answer}


def attempt(ask: Callable[[], str]) -> str:
    """Return an answer, or the error that came in its place."""
    try:
        return ask()
    except Exception as error:  # noqa: BLE001  # each client has classes of its own
        return f"{type(error).__name__}: {error}"


def main(url: str, model: str) -> None:
    """Ask with each client, and print what it did."""
    for each in outcomes(url, model):
        sys.stdout.write(json.dumps(each, ensure_ascii=False) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
