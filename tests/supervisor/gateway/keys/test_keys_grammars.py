"""The kinds of grammars that a request may use, by its key or by the section of the gateway."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from supervisor.engines.kinds import read_cluster
from supervisor.launcher import preflight
from supervisor.node import preview
from tests.rig.gateway import chat, create, gateway_rig, post
from tests.rig.keys import as_
from tests.rig.sockets import last_event, whole
from tests.supervisor.gateway.test_gateway_keys import locked

SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMAS = 'grammars = ["json_schema", "structural_tag"]'


def tag(content: Mapping[Any, Any]) -> dict[Any, Any]:
    return {"type": "structural_tag", "format": content}


async def test_a_key_may_use_only_the_kinds_of_grammars_of_its_section(tmp_path: Path) -> None:
    async with locked(tmp_path, SCHEMAS) as rig:
        client = await rig.client()
        for field, text in (("regex", "a+"), ("ebnf", 'root ::= "a"')):
            refused = await client.ask(post(chat(**{field: text}), **as_("alice")))
            assert (refused.status, refused.error["code"], refused.error["param"]) == (403, "forbidden", field)
            assert (
                f"the key 'alice' may not use grammars of the kind {field}: allowed are json_schema, structural_tag"
                in (refused.error["message"])
            )
        assert not rig.worker.prompts
        for key, fields in (("alice", {"response_format": SCHEMA}), ("bob", {"regex": "a+"})):
            assert (await client.ask(post(chat(**fields, max_tokens=5), **as_(key)))).status == 200


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ({"type": "regex", "pattern": "a+"}, "regex"),
        ({"type": "sequence", "elements": [{"type": "grammar", "grammar": 'root ::= "a"'}]}, "ebnf"),
    ],
)
async def test_a_structural_tag_hides_no_grammar_of_another_kind(
    tmp_path: Path, content: dict[str, Any], kind: str
) -> None:
    async with locked(tmp_path, SCHEMAS) as rig:
        client = await rig.client()
        for form in (tag(content), json.dumps(tag(content)).replace("g", "\\u0067")):
            refused = await client.ask(post(chat(structural_tag=form), **as_("alice")))
            assert (refused.status, refused.error["param"]) == (403, "structural_tag")
            assert f"of the kind {kind} in a structural_tag" in refused.error["message"]
        harmless = tag({"type": "json_schema", "json_schema": {"properties": {"regex": {"pattern": "a+"}}}})
        assert (await client.ask(post(chat(structural_tag=harmless), **as_("alice")))).status == 200


async def test_over_a_websocket_the_refused_request_fails_alone(tmp_path: Path) -> None:
    async with locked(tmp_path, "grammars = []") as rig:
        client = await rig.client()
        await client.upgrade(**as_("alice"))
        failed = await last_event(client, create(text={"format": {"type": "json_object"}}))
        assert "'alice' may not use grammars of the kind json_schema: allowed are none" in json.dumps(failed)
        assert (await whole(client, create("n=3")))["status"] == "completed"


async def test_without_a_setting_of_the_key_the_gateways_section_applies(tmp_path: Path) -> None:
    async with gateway_rig() as rig:
        rig.gateway.grammars = frozenset({"json_schema"})
        client = await rig.client()
        refused = await client.ask(post(chat(regex="a+")))
        assert (refused.status, refused.error["param"]) == (403, "regex")
        assert "requests here may not use grammars of the kind regex" in refused.error["message"]
        assert (await client.ask(post(chat(response_format=SCHEMA, max_tokens=5)))).status == 200
    async with locked(tmp_path, 'grammars = ["regex"]') as rig:
        rig.gateway.grammars = frozenset()
        client = await rig.client()
        assert (await client.ask(post(chat(regex="a+"), **as_("alice")))).status == 200
        assert (await client.ask(post(chat(regex="a+"), **as_("bob")))).status == 403


def test_the_preview_of_a_node_lists_the_allowed_grammars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.supervisor.config.test_load import GOOD

    monkeypatch.setattr(preflight, "check_can_start", lambda *_: None)
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[key.alice]\nsha256 = "{"0" * 64}"\n{SCHEMAS}\n')
    keys.chmod(0o600)
    file = tmp_path / "cluster.toml"
    file.write_text(f'{GOOD}\n[gateway]\nkeys = "keys.toml"\ngrammars = ["json_schema"]\n')
    description = preview.describe_node(read_cluster(file), "main", {})
    assert "grammars: json_schema; of alice: json_schema, structural_tag" in description


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_tools_that_are_held_by_a_grammar_need_the_kind_of_schemas(
    tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    async with locked(tmp_path, 'grammars = ["regex"]') as rig:
        client = await rig.client()
        refused = await client.ask(post(chat(**fields), **as_("alice")))
        assert (refused.status, refused.error["param"]) == (403, param)
        assert "may not use grammars of the kind json_schema: allowed are regex" in refused.error["message"]
        free = await client.ask(post(chat(tools=[TOOL]), **as_("alice")))
        assert free.status != 403
