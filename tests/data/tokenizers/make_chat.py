"""Makes `chat.json`: well-known chat templates with what transformers renders from them.

    python make_chat.py

Needs transformers 5.24 and gguf. A case whose `text` is null is refused by the template.
"""

import json
from pathlib import Path

import gguf
import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).parent

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}"
    "{% endif %}{% endfor %}"
)
CHATML = """\
{% for message in messages %}
    {%- if tools is not none %}
        {{- raise_exception('no tools') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role }}
    {% generation %}
    {{- message.content | trim }}
    {% endgeneration %}
    {{- '<|im_end|>\\n' }}
    {% if loop.last and add_generation_prompt %}
        {{- '<|im_start|>assistant\\n' }}
    {% endif %}
{% endfor %}
"""
BLOCKS = """\
{%- set ns = namespace(system='', first=true) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = message.content %}
        {%- continue %}
    {%- endif %}
    {%- if ns.first and ns.system %}{{ ns.system | tojson }}{% endif %}
    {%- set ns.first = false %}
  {{ message | tojson(indent=2) }}
    {% if loop.last %}
end {{ dict(n=messages | length) | tojson }}
    {% endif %}
{%- endfor %}
"""
SYSTEM = {"role": "system", "content": "Be <brief> & 'kind'. "}
USER = {"role": "user", "content": " Hi ✨\n"}
ASSISTANT = {"role": "assistant", "content": "Hello."}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [USER, ASSISTANT, USER],
    [SYSTEM, USER, ASSISTANT, USER],
    [USER, USER],
]


def render(template: str, messages: list, add_generation_prompt: bool) -> str | None:
    try:
        texts, _ = render_jinja_template(
            conversations=[messages],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            bos_token="<s>",
            eos_token="</s>",
        )
    except jinja2.TemplateError:
        return None
    return texts[0]


def main() -> None:
    fields = gguf.GGUFReader(HERE / "smollm2_1k.gguf").fields
    smollm2 = fields["tokenizer.chat_template"].contents()
    templates = {
        "smollm2": smollm2,
        "llama3": LLAMA3,
        "mistral": MISTRAL,
        "chatml": CHATML,
        "blocks": BLOCKS,
    }
    cases = [
        {"template": name, "messages": messages, "open": flag, "text": render(t, messages, flag)}
        for name, t in templates.items()
        for messages in CONVERSATIONS
        for flag in (True, False)
    ]
    text = json.dumps({"templates": templates, "cases": cases}, indent=1)
    (HERE / "chat.json").write_text(text + "\n", "utf-8")


main()
