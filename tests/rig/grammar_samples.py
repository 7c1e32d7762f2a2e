"""Costly grammars, from the literature on regular expressions, parsing and schemas and from a generator; and common ones.

Each has its kind, its text, and a letter that a costly one repeats in its worst case.
"""

from __future__ import annotations

import json
import random
from typing import Any

from attrs import frozen

REGEX, EBNF, JSON_SCHEMA, STRUCTURAL_TAG = "regex", "ebnf", "json_schema", "structural_tag"


@frozen
class Sample:
    name: str
    kind: str
    text: str
    letter: str = "a"


def schema(value: object) -> str:
    return json.dumps(value)


def properties(count: int, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": schema for i in range(count)}}


def tag(content: dict[str, Any]) -> str:
    return json.dumps(
        {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}
    )


def _regexes() -> list[Sample]:
    """The shapes of "catastrophic backtracking" (OWASP's ReDoS list, Davis et al. 2018, RXXR), each repeated many times."""
    shapes = {
        "star of star": "(a*)*",
        "plus of star": "(a*)+",
        "alternation of the same": "(a|a)*",
        "overlapping alternation": "(a|aa)*",
        "optional star": "(a?)*",
        "star": "a*",
        "optional": "a?",
        "nullable alternation": "(a|b|)*",
        "words": "(\\w*\\s*)*",
        "any": "(.*)*",
        "class twice": "([a-z]*[a-z0-9]*)*",
        "counted star": "(a*){0,9}",
    }
    out = [
        Sample(f"{name}, {times} times", REGEX, shape * times) for name, shape in shapes.items() for times in (250, 800)
    ]
    return [
        *out,
        Sample("star of star, 3,000 times", REGEX, "(a*)*" * 3000),
        Sample("star of star, 300 times and an end", REGEX, "(a*)*" * 300 + "b"),
        Sample("behind a long beginning", REGEX, "x" * 400 + "(a*)*" * 400, "x"),
        Sample("behind a choice", REGEX, "[xy]{300}" + "(a*)*" * 400, "x"),
        Sample("counts of counts", REGEX, "((((a{1,30}){1,30}){1,30}){1,30}){1,30}"),
        Sample("counts of counts of stars", REGEX, "(((a*){1,40}){1,40}){1,40}"),
        Sample("stars in stars", REGEX, "(" * 90 + "a*" + ")*" * 90),
        Sample("the n-th from the end", REGEX, "(a|b)*a" + "(a|b)" * 600),
        Sample("suffixes", REGEX, "|".join(".*" + "ab"[i % 2] * (i % 40 + 1) for i in range(700))),
        Sample("many overlapping counts", REGEX, "".join(f"(a{{0,{i}}})*" for i in range(2, 400))),
        Sample("deep groups", REGEX, "(" * 5000 + "a" + ")" * 5000),
    ]


def _ebnfs() -> list[Sample]:
    """Ambiguity (Earley's worst cases), nullable cycles, doubling rules."""
    doubling = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40 ::= "a" | ""'
    catalan = 'root ::= s "b"\ns ::= s s | "a"'
    chain = (
        "root ::= r0\n" + "".join(f'r{i} ::= r{i + 1} | r{i + 1} r{i + 1} | ""\n' for i in range(300)) + 'r300 ::= "a"'
    )
    mutual = "root ::= a0\n" + "".join(f'a{i} ::= a{(i + 1) % 60} a{(i + 7) % 60} | "a" | ""\n' for i in range(60))
    return [
        Sample("nullable and doubled", EBNF, 'root ::= s "b"\ns ::= s s | "a" | ""'),
        Sample("Catalan", EBNF, catalan),
        Sample("four times itself", EBNF, 'root ::= s\ns ::= s s s s | "a"'),
        Sample("doubling rules", EBNF, doubling),
        Sample("a chain of nullables", EBNF, chain),
        Sample("rules of each other", EBNF, mutual),
        Sample("stars", EBNF, "root ::= " + '("a"* "a"*)* ' * 300),
        Sample("optionals", EBNF, "root ::= " + '("a"? "a"*)? ' * 600),
        Sample(
            "many starts", EBNF, "root ::= " + " | ".join(f'"{"a" * (i % 60 + 1)}" root' for i in range(900)) + ' | "b"'
        ),
        Sample("deep parentheses", EBNF, "root ::= " + "(" * 4000 + '"a"' + ")" * 4000),
        Sample("sums without rank", EBNF, 'root ::= e\ne ::= e "+" e | e "*" e | e e | "(" e ")" | "a" | ""'),
    ]


def _schemas() -> list[Sample]:
    bad = {"type": "string", "pattern": "^" + "(a*)*" * 300 + "$"}
    own = {"$ref": "#/$defs/n"}
    recursive = {
        "$defs": {"n": {"anyOf": [{"type": "array", "items": own}] * 60 + [{"type": "string"}]}},
        "$ref": "#/$defs/n",
    }
    either = {"anyOf": [{"type": "string", "pattern": f"^a{{0,{i}}}b?"} for i in range(1, 400)]}
    enum = {"enum": ["a" * i + "b" for i in range(1, 700)]}
    doubled = {
        "$defs": {
            f"d{i}": {
                "type": "object",
                "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}, "b": {"$ref": f"#/$defs/d{i + 1}"}},
            }
            for i in range(30)
        }
        | {"d30": {"type": "string"}},
        "$ref": "#/$defs/d0",
    }
    # The pattern of each differs, so that no compiler can take one for the other.
    differ = {
        "type": "object",
        "properties": {
            f"p{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i % 40 + 1}}}(-[a-z0-9]{{1,20}}){{0,{i % 7}}}x{i}$"}
            for i in range(1500)
        },
    }
    return [
        Sample("1,500 properties with patterns", JSON_SCHEMA, schema(differ), "{"),
        Sample(
            "a bad pattern", JSON_SCHEMA, schema({"type": "object", "properties": {"a": bad}, "required": ["a"]}), "{"
        ),
        Sample("bad patterns", JSON_SCHEMA, schema(properties(60, bad)), "{"),
        Sample("recursion by sixty ways", JSON_SCHEMA, schema(recursive), "["),
        Sample("overlapping choices", JSON_SCHEMA, schema(either), '"'),
        Sample("a long enum of beginnings", JSON_SCHEMA, schema(enum), '"'),
        Sample("doubling definitions", JSON_SCHEMA, schema(doubled), "{"),
    ]


def _tags() -> list[Sample]:
    many = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<"],
            "tags": [
                {
                    "type": "tag",
                    "begin": f"<f{i}>",
                    "content": {"type": "regex", "pattern": "(a*)*" * 60},
                    "end": "</f>",
                }
                for i in range(60)
            ],
        },
    }
    return [
        Sample(
            "a bad regular expression in a tag", STRUCTURAL_TAG, tag({"type": "regex", "pattern": "(a*)*" * 400}), "<"
        ),
        Sample(
            "a bad grammar in a tag",
            STRUCTURAL_TAG,
            tag({"type": "grammar", "grammar": 'root ::= s "b"\ns ::= s s | "a" | ""'}),
            "<",
        ),
        Sample(
            "a bad schema in a tag",
            STRUCTURAL_TAG,
            tag({"type": "json_schema", "json_schema": {"type": "string", "pattern": "(a*)*" * 300}}),
            "<",
        ),
        Sample("many bad tags", STRUCTURAL_TAG, json.dumps(many), "<"),
    ]


def _generated(count: int = 20) -> list[Sample]:
    """Random regular expressions and grammars whose parts may all be empty or repeated."""
    chance = random.Random(12)

    def piece(depth: int) -> str:
        if not depth:
            return chance.choice(("a", "a", "b", "[ab]"))
        inner = piece(depth - 1) + (piece(depth - 1) if chance.random() < 0.5 else "")
        return (
            f"({inner}|{piece(0)}){chance.choice('**+?')}"
            if chance.random() < 0.5
            else f"({inner}){chance.choice('***?')}"
        )

    out = []
    for number in range(count):
        if number % 2:
            rules = "".join(
                f'r{i} ::= {" | ".join(" ".join(f"r{chance.randrange(8)}" for _ in range(chance.randint(1, 3))) for _ in range(3))} | "a" | ""\n'
                for i in range(8)
            )
            out.append(Sample(f"generated grammar {number}", EBNF, f"root ::= r0\n{rules}"))
        else:
            out.append(Sample(f"generated expression {number}", REGEX, "".join(piece(3) for _ in range(300))))
    return out


ATTACKS = [*_regexes(), *_ebnfs(), *_schemas(), *_tags(), *_generated()]


def _benign_regexes() -> list[Sample]:
    texts = {
        "date": r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
        "time with offset": r"([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d{1,6})?)?(Z|[+-][01]\d:[0-5]\d)?",
        "e-mail": r"[a-zA-Z0-9._%+-]+@([a-zA-Z0-9-]+\.)+[a-zA-Z]{2,}",
        "IPv4": r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
        "UUID": r"[0-9a-f]{8}-[0-9a-f]{4}-[1-5][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
        "URL": r"https?://([\w-]+\.)+[\w-]+(:\d+)?(/[\w./?%&=#~+-]*)?",
        "float": r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?",
        "a sentence": r"([A-Z][a-z]+(,? [a-z]+){3,20}\. ?){1,5}",
        "answer with reasons": r"Reason: .{1,500}\nAnswer: (A|B|C|D)",
        "free text": r"[^\x00-\x08]{0,4000}",
        "star of words": r"(\s*\w+\s*)*",
        "a bad star, once": r"(a*)*b",
        "Markdown table": r"\|([^|\n]+\|)+\n\|(-+\|)+\n(\|([^|\n]+\|)+\n)*",
        "SQL": r"SELECT [\w*, ]+ FROM \w+( WHERE \w+ ?(=|<|>) ?('[^']*'|\d+)( (AND|OR) \w+ ?(=|<|>) ?('[^']*'|\d+))*)?;",
    }
    return [Sample(name, REGEX, text) for name, text in texts.items()]


def _benign_ebnfs() -> list[Sample]:
    arithmetic = 'root ::= expr\nexpr ::= term (("+" | "-") term)*\nterm ::= factor (("*" | "/") factor)*\nfactor ::= [0-9]+ | "(" expr ")"'
    language = """root ::= (ws statement)* ws
statement ::= name ws "=" ws expr ";" | "if" ws "(" expr ")" ws block ("else" ws block)? | "while" ws "(" expr ")" ws block | "return" ws expr ";"
block ::= "{" (ws statement)* ws "}"
expr ::= term (ws ("+" | "-" | "*" | "/" | "==" | "<") ws term)*
term ::= name | number | name "(" (expr ("," ws expr)*)? ")" | "(" expr ")"
name ::= [a-zA-Z_] [a-zA-Z0-9_]*
number ::= [0-9]+ ("." [0-9]+)?
ws ::= [ \\t\\n]*"""
    json_grammar = r"""root ::= value
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (string ws ":" ws value (ws "," ws string ws ":" ws value)*)? ws "}"
array ::= "[" ws (value (ws "," ws value)*)? ws "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\/bfnrt])* "\""
number ::= "-"? ([0-9] | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
ws ::= [ \n\t]*"""
    return [
        Sample("arithmetic", EBNF, arithmetic, "1"),
        Sample("a small language", EBNF, language),
        Sample("JSON", EBNF, json_grammar, "["),
        Sample("left recursion", EBNF, 'root ::= list\nlist ::= list "," item | item\nitem ::= [a-z]+'),
        Sample("sums by their own", EBNF, 'root ::= e\ne ::= e "+" e | e "*" e | "(" e ")" | [0-9]+', "1"),
        Sample("a choice", EBNF, 'root ::= "Paris" | "London" | "Berlin"', "P"),
        Sample(
            "XML",
            EBNF,
            'root ::= element\nelement ::= "<" name ">" (text | element)* "</" name ">"\nname ::= [a-z]+\ntext ::= [^<>]+',
            "<",
        ),
        Sample(
            "function call",
            EBNF,
            'root ::= name "(" (arg (", " arg)*)? ")"\nname ::= [a-z_]+\narg ::= name "=" ("\\"" [^"]* "\\"" | [0-9]+)',
        ),
    ]


def _benign_schemas() -> list[Sample]:
    text, number = {"type": "string"}, {"type": "number"}
    weather = {
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "A city"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["location"],
        "additionalProperties": False,
    }
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 200},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"type": "string", "format": "email"},
            "born": {"type": "string", "format": "date"},
            "id": {"type": "string", "format": "uuid"},
        },
        "required": ["name", "age"],
    }
    address = {
        "type": "object",
        "properties": {
            "street": text,
            "zip": {"type": "string", "pattern": r"^\d{5}(-\d{4})?$"},
            "country": {"type": "string", "pattern": "^[A-Z]{2}$"},
        },
        "required": ["street", "zip"],
    }
    order = {
        "$defs": {
            "address": address,
            "item": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string", "pattern": "^[A-Z0-9]{3,12}(-[A-Z0-9]{1,8}){0,3}$"},
                    "count": {"type": "integer", "minimum": 1},
                    "price": number,
                },
                "required": ["sku", "count"],
            },
        },
        "type": "object",
        "properties": {
            "customer": person,
            "ship_to": {"$ref": "#/$defs/address"},
            "bill_to": {"anyOf": [{"$ref": "#/$defs/address"}, {"type": "null"}]},
            "items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1, "maxItems": 100},
        },
        "required": ["customer", "items"],
    }
    tree = {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"value": text, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                "required": ["value"],
            }
        },
        "$ref": "#/$defs/node",
    }
    union = {
        "anyOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": f"kind_{i}"}, "value": text, "weight": number},
                "required": ["kind", "value"],
            }
            for i in range(30)
        ]
    }
    codes = {
        "type": "object",
        "properties": {"country": {"enum": [f"{a}{b}" for a in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" for b in "ABCDEFGH"]}},
        "required": ["country"],
    }
    return [
        Sample("a tool's parameters", JSON_SCHEMA, schema(weather), "{"),
        Sample("an order", JSON_SCHEMA, schema(order), "{"),
        Sample("a tree", JSON_SCHEMA, schema(tree), "{"),
        Sample("thirty kinds", JSON_SCHEMA, schema(union), "{"),
        Sample("208 codes", JSON_SCHEMA, schema(codes), "{"),
        Sample("a hundred fields", JSON_SCHEMA, schema(properties(100, text)), "{"),
        Sample(
            "a hundred patterns",
            JSON_SCHEMA,
            schema(properties(100, {"type": "string", "pattern": "^[a-z0-9-]{1,64}$"})),
            "{",
        ),
    ]


def _benign_tags() -> list[Sample]:
    call = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<function="],
            "tags": [
                {
                    "type": "tag",
                    "begin": f"<function={name}>",
                    "content": {
                        "type": "json_schema",
                        "json_schema": {
                            "type": "object",
                            "properties": {"query": {"type": "string"}},
                            "required": ["query"],
                        },
                    },
                    "end": "</function>",
                }
                for name in ("search", "open", "click")
            ],
        },
    }
    return [
        Sample("calls of functions", STRUCTURAL_TAG, json.dumps(call), "<"),
        Sample("a thought and a number", STRUCTURAL_TAG, tag({"type": "regex", "pattern": r"\d{1,5}"}), "<"),
    ]


BENIGN = [*_benign_regexes(), *_benign_ebnfs(), *_benign_schemas(), *_benign_tags()]
