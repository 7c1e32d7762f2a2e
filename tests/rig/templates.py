"""Chat templates in the ways of well-known families, and the real ones of a folder that `ESPALIER_TEMPLATES` names."""

from __future__ import annotations

import os
from pathlib import Path

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ANSWER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_OFF = "{% if add_generation_prompt %}<think></think>{% endif %}"

OFF = "<think></think>"  # how the prompt ends where thinking is off
PLAIN = TURNS + ANSWER
ON_BY_DEFAULT = f"{TURNS}{ANSWER}{{% if enable_thinking is defined and enable_thinking is false %}}{_OFF}{{% endif %}}"
OFF_BY_DEFAULT = f"""
{{%- if not thinking is defined %}}{{% set thinking = enable_thinking | default(false) %}}{{% endif %}}
{{%- set note = 'x' %}}{TURNS}{ANSWER}{{% if not thinking %}}{_OFF}{{% endif %}}"""
WRITTEN = f"""
{{%- if reasoning_effort is not defined %}}{{% set reasoning_effort = 'medium' %}}{{% endif -%}}
Reasoning: {{{{ reasoning_effort }}}}\n{TURNS}{ANSWER}{{# '<think>' #}}{{{{ '' if messages[-1].thinking else '' }}}}"""
STRICT_LEVELS = f"""
{{%- set effort = reasoning_effort | default('no_think') %}}
{{%- if effort not in ['no_think', 'low', 'high'] %}}{{{{ raise_exception('no such effort') }}}}{{% endif %}}
{{{{- '<effort:' + effort + '>' }}}}{TURNS}{ANSWER}"""
SWITCH_AND_LEVEL = f"""
{{%- set on = thinking | default(true) %}}
{{%- if on and reasoning_effort == 'max' %}}Think hard.{{% endif %}}{TURNS}{ANSWER}{{% if not on %}}{_OFF}{{% endif %}}"""
ALWAYS = f"{TURNS}{ANSWER}{{% if add_generation_prompt %}}<think>{{% endif %}}"
DOCUMENTS = f"{{% for d in documents %}}[{{{{ d.title }}}}: {{{{ d['text'] }}}}]{{% endfor %}}{TURNS}{ANSWER}"
REASONING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def real_templates() -> list[Path]:
    """Return the files of real templates, none where the folder is not set."""
    folder = os.environ.get("ESPALIER_TEMPLATES")
    return sorted(Path(folder).glob("*.jinja")) if folder else []
