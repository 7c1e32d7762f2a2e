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
LEAST_IS_OFF = f"""
{{%- set effort = reasoning_effort | default('high') %}}{TURNS}
{{%- if effort in ['low', 'minimal'] %}}<|begin|>assistant<|think|><|end|>{{% endif %}}{ANSWER}"""
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

# The ways of rendering roles, texts in parts, and names.
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
STRICT = """
{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
    {{- '<' + m.role + '>' + m.content }}
{%- endfor %}"""
OVERWRITING = """
{%- set ns = namespace(system='') %}
{%- for m in messages if m.role == 'system' %}{% set ns.system = m.content %}{% endfor %}{{ ns.system }}
{%- for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"""
GATHERING = """
{%- for m in messages if m.role == 'system' %}{{ m.content }};{% endfor %}
{%- for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"""
LEADING = """
{%- if messages[0].role in ('system', 'developer') %}# {{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endfor %}"""
ALTERNATING = """
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {{- '<' + m.role + '>' + m.content }}
{%- endfor %}"""
THOUGHTLESS = """
{%- for m in messages %}
    {{- '<' + m.role + '>' + (m.content.split('</think>')[-1].strip() if m.role == 'assistant' else m.content) }}
{%- endfor %}"""
LISTS = """
{%- for m in messages %}<{{ m.role }}>
    {%- if m.content is string %}{{ m.content }}{% else %}{{ m.content | map(attribute='text') | join('\n') }}{% endif %}
{%- endfor %}"""
ONLY_LISTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }} {% endfor %}{% endfor %}"
NAMES = "{% for m in messages %}<{{ m.name or m.role }}>{{ m.content }}{% endfor %}"
# As that of Hermes 2, it fails without tools, even without an empty list of them.
FOR_TOOLS = """
{{- '<|im_start|>system\n<tools> ' }}{% for tool in tools %}{{ tool.function | tojson }} {% endfor %}</tools><|im_end|>
{% for m in messages %}<|im_start|>{{ m.role }}
    {%- if m.tool_calls is defined %}
        {%- for call in m.tool_calls %}{{ '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endfor %}
    {%- elif m.role == 'tool' %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- else %}{{ '\n' + m.content }}{% endif %}{{ '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# As that of Mistral Nemo, whose authors' own tokenizer puts them there whatever follows.
WITH_LAST_QUESTION = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{%- for m in messages %}
    {%- if m.tool_calls is defined %}[CALLS]{{ m.tool_calls | map(attribute='function') | list | tojson }}
    {%- elif m.role == 'user' and loop.last and system is defined %}[INST]{{ system + '\n\n' + m.content }}[/INST]
    {%- elif m.role == 'user' %}[INST]{{ m.content }}[/INST]
    {%- elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]
    {%- else %}{{ m.content }}</s>{% endif %}
    {%- if loop.last and tools %}{{ tools | tojson }}{% endif %}
{%- endfor %}"""
SEARCHING = (
    "{% if not messages|selectattr('role', 'equalto', 'user')|list %}{{ raise_exception('No user') }}{% endif %}"
    + CHATML
)


def real_templates() -> list[Path]:
    """Return the files of real templates, none where the folder is not set."""
    folder = os.environ.get("ESPALIER_TEMPLATES")
    return sorted(Path(folder).glob("*.jinja")) if folder else []
