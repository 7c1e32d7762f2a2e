"""Random texts in each format: whole calls, reasoning, parts of both, and what resembles them."""

from __future__ import annotations

import random

from attrs import frozen

from actors.text.formats.table import AnswerFormat

COMMON = (
    "An oak",
    " ",
    "\n",
    "\n\n",
    "日本🙂",
    '"',
    "{",
    "}",
    "[",
    "]",
    "\\",
    "<",
    "|",
    ">",
    "a",
    "f",
    ": 1",
    ",",
    "'",
)
DSML = "\uff5cDSML\uff5c"
M3 = "]<]minimax[>["
THINK = ("<think>", "</think>", "<think>\nHm.\n</think>\n\n", "<thin", "</think")


@frozen
class Mixture:
    """A format, and the fragments of its texts."""

    answers: AnswerFormat
    own: tuple[str, ...]

    def text(self, rng: random.Random) -> str:
        """Return a random text."""
        fragments = (rng.choice(self.own if rng.random() < 0.6 else COMMON) for _ in range(rng.randint(1, 5)))
        return "".join(self._damaged(fragment, rng) for fragment in fragments)

    def _damaged(self, fragment: str, rng: random.Random) -> str:
        """Return a fragment, now and then without its end, or without a character."""
        chance = rng.random()
        if chance < 0.1:
            return fragment[: rng.randint(0, len(fragment))]
        if chance < 0.15:
            place = rng.randrange(len(fragment))
            return fragment[:place] + fragment[place + 1 :]
        return fragment


def invoked(begin: str, end: str, open_: str, close: str) -> tuple[str, ...]:
    """Return fragments of calls as elements, with these markers."""
    return (
        f'{begin}\n{open_}invoke name="f">\n{open_}parameter name="a" string="true"> x {close}parameter>\n',
        f'{open_}parameter name="n">3{close}parameter>\n{close}invoke>\n{end}',
        f'{begin}{open_}invoke name="g"/>{end}',
        f'{open_}parameter name="b" string="false">[1, "{close}parameter>"]{close}parameter>',
        f'{open_}invoke name="h">',
        f'{open_}invoke name="g">',
        f"{close}parameter>",
        f"{close}invoke>",
        begin,
        end,
    )


MIXTURES: dict[str, Mixture] = {
    "deepseek-v3": Mixture(
        AnswerFormat("deepseek-v3", "think"),
        (
            "<think>",
            "</think>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "<｜tool▁call▁end｜>"}\n```<｜tool▁call▁end｜>',
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>\n",
            'function<｜tool▁sep｜>f\n{"n": 1}',
            "```",
        ),
    ),
    "deepseek-v3.1": Mixture(
        AnswerFormat("deepseek-v3.1", "think"),
        (
            "<think>",
            "</think>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "\\""}<｜tool▁call▁end｜>',
            "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            '<｜tool▁call▁begin｜>h<｜tool▁sep｜>{"a": [1, {}]}',
        ),
    ),
    "gemma4": Mixture(
        AnswerFormat("gemma4", "gemma"),
        (
            "<|channel>thought\n",
            "\n<channel|>",
            "<|tool_call>",
            "<tool_call|>",
            '<|"|>',
            '<|tool_call>call:f{a:<|"|>} <tool_call|>\n<|"|>,n:3}<tool_call|>',
            "<|tool_call>call:g{}<tool_call|>",
            '<|tool_call>call:f{a b: [1, {c:true}, [null,"x"]], <|"|>d<|"|>:-1.5e-05 }',
            "call:f{",
            "a:",
        ),
    ),
    "gpt-oss": Mixture(
        AnswerFormat("gpt-oss"),
        (
            "<|start|>assistant",
            "<|channel|>analysis<|message|>",
            "<|channel|>final<|message|>",
            "<|channel|>commentary",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
            " to=functions.f",
            " to=python",
            " <|constrain|>json",
            "<|channel|>commentary to=functions.g<|message|>{}<|call|>",
            '<|start|>assistant to=functions.f<|channel|>analysis json<|message|>{"a": "<|end|>"}',
        ),
    ),
    "granite": Mixture(
        AnswerFormat("hermes", "granite"),
        (
            "Here is my thought process:",
            "Here is my response:",
            "Here's my response:",
            "Here's my",
            "Here",
            '<tool_call>{"name": "g"}',
        ),
    ),
    "hermes": Mixture(
        AnswerFormat("hermes", "think"),
        (
            *THINK,
            "<tool_call>",
            "</tool_call>",
            '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>", "n": 3}}\n</tool_call>',
            '<tool_call>{"arguments": {}, "name": "g"}</tool_call>\n',
            '{"name": "f", "arguments": {"a": "\\u00e9\\n", "n": -1.5e3}}',
            '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
            '{"name": "f", "arguments": [1, {"b": [true, null]}]}',
        ),
    ),
    "glm": Mixture(
        AnswerFormat("glm", "think"),
        (
            *THINK,
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value> x </arg_value>\n</tool_call>",
            "<tool_call>f<arg_key>n</arg_key><arg_value>3</arg_value></tool_call>",
            "<tool_call>g<arg_key>a</arg_key><arg_value>[1, {</arg_value>\n",
            "<tool_call>g</tool_call>",
            "<tool_call>f",
            "<tool_call>h</tool_call>",
            "<arg_key>n</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "</tool_call>",
            '"</arg_value>"',
        ),
    ),
    "qwen3-coder": Mixture(
        AnswerFormat("qwen3-coder", "qwen3"),
        (
            *THINK,
            "<tool_call>\n<function=f>\n<parameter=a>\n x \n</parameter>\n</function>\n</tool_call>",
            "<function=f><parameter=n>3</parameter></function></tool_call>",
            "<tool_call>\n<function=g>\n</function>\n",
            "<tool_call>\n<function=f>\n<parameter=a>\n",
            "<tool_call>",
            "<function=h>",
            "\n<parameter=n>",
            "</parameter>",
            "</function>",
            "</tool_call>",
            '["</parameter>"]',
        ),
    ),
    "kimi-k2": Mixture(
        AnswerFormat("kimi-k2", "kimi"),
        (
            "◁think▷",
            "◁/think▷",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "<|tool_call_end|>"}<|tool_call_end|>',
            "<|tool_calls_section_begin|> x <|tool_call_begin|>g:12 <|tool_call_argument_begin|>{} <|tool_call_end|>",
            "<|tool_call_begin|>functions.h:0<|tool_call_argument_begin|>{}",
        ),
    ),
    "llama3": Mixture(
        AnswerFormat("llama3", "think"),
        (
            "<|python_tag|>",
            ";",
            "; ",
            "<think>",
            "</think>",
            '{"name": "f", "parameters": {"a": "<|python_tag|>"}}',
            '{"name": "g", "arguments": {}}',
            '{"name": "g"}',
            '{"a": 1}',
        ),
    ),
    "mistral": Mixture(
        AnswerFormat("mistral", "mistral"),
        (
            "[THINK]",
            "[/THINK]",
            "[TOOL_CALLS]",
            "[CALL_ID]a1",
            "[ARGS]",
            '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}',
            "[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}",
            '[TOOL_CALLS] [{"name": "f", "arguments": {"n": 1}}, {"name": "g", "arguments": {}}]',
            '{"name": "g"}',
        ),
    ),
    **{
        name: Mixture(AnswerFormat(name, "think"), (*THINK, *invoked(begin, end, open_, close)))
        for name, begin, end, open_, close in (
            ("deepseek-v3.2", f"<{DSML}function_calls>", f"</{DSML}function_calls>", f"<{DSML}", f"</{DSML}"),
            ("deepseek-v4", f"<{DSML}tool_calls>", f"</{DSML}tool_calls>", f"<{DSML}", f"</{DSML}"),
            ("deepseek-v4.1", f"<{DSML} calls>", f"</{DSML} calls>", f"<{DSML} ", f"</{DSML} "),
            ("minimax-m2", "<minimax:tool_call>", "</minimax:tool_call>", "<", "</"),
        )
    },
    "kimi-k3": Mixture(
        AnswerFormat("kimi-k3"),
        (
            "<|close|>think<|sep|>",
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|open|>tools<|sep|>",
            '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>x',
            '<|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|>',
            '<|close|>argument<|sep|><|open|>argument key="n" type="number"<|sep|>3<|close|>argument<|sep|>',
            "<|close|>argument<|sep|>",
            "<|close|>call<|sep|>",
            "<|close|>tools<|sep|>",
            "<|close|>message<|sep|>",
            "<|open|>think<|sep|>",
            '<|open|>argument key="&quot;" type="object"<|sep|>',
        ),
    ),
    "minimax-m3": Mixture(
        AnswerFormat("minimax-m3", "minimax-m3"),
        (
            "<mm:think>",
            "</mm:think>",
            f'{M3}<tool_call>\n{M3}<invoke name="f">{M3}<a> x {M3}</a>{M3}<n>3{M3}</n>{M3}</invoke>\n',
            f"{M3}</tool_call>",
            f'{M3}<tool_call>\n{M3}<invoke name="g">{M3}<b>{M3}<item>1{M3}</item>{M3}<item>{M3}<c>',
            f"{M3}</c>{M3}</item>{M3}</b>{M3}</invoke>",
            f'{M3}<tool_call>\n{M3}<invoke name="g">{M3}<b>{{"c": "{M3}</b>{M3}<d>"}}{M3}</b>{M3}</invoke>',
            f'{M3}<tool_call>\n{M3}<invoke name="g"> {{"c": "{M3}</invoke>"}}',
            f'{M3}<b>["',
            f'{M3}<invoke name="f">',
            f"{M3}<a>",
            f"{M3}</a>",
            M3,
        ),
    ),
    "pythonic": Mixture(
        AnswerFormat("pythonic"),
        (
            "[f(a='x', n=3), g()]",
            "[g(a={'b': [1, -2.5e3, (None, True)]}, c=\"\\u00e9\\n\" 'd')]",
            "<|python_start|>",
            "<|python_end|>",
            "[f(a='''x'''y''', n=",
            "[f(",
            "h()]",
            "g(), ",
            "'''",
            ")]",
            "=3",
        ),
    ),
    "think": Mixture(AnswerFormat(None, "think"), THINK),
}
