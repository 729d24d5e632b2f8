"""Small models of random weights that speak as the served families do: with their tokens, turns, and calls as they write them.

Templates are the tests' own, and shorter than those of the models, but refuse what those refuse.
"""

# ruff: noqa: E501 -- templates

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as Inner

from server.serving import CONFIG, VOCAB, tensors, tiny_checkpoint
from stepwell.engine.loading.chat import ChatTemplate
from stepwell.engine.loading.checkpoint import Checkpoint
from stepwell.engine.loading.random_hybrid import byte_tokenizer
from stepwell.engine.loading.tokenizer import Tokenizer
from stepwell.engine.loading.weights import HeldTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    tokens: tuple[str, ...]  # in addition to bytes; all that models have as one token
    end: str  # of answers
    turn: str  # a message, without its calls
    call: str = ""
    calls: tuple[str, str, str] = ("", "", "")  # before, between and behind them
    opening: str = ""  # of an answer
    plain: tuple[str, ...] = ()  # of the tokens: those that are not special
    names: tuple[str | None, str | None] = (None, None)  # what it is known as

    @property
    def template(self) -> str:
        before, between, behind = self.calls
        calls = (
            f"{{% if message.tool_calls %}}{before}{{% for call in message.tool_calls %}}{{% if not loop.first %}}{between}{{% endif %}}"
            f"{self.call}{{% endfor %}}{behind}{{% endif %}}"
        )
        tools = "{% if tools %}{{ tools | tojson }}\n{% endif %}"
        turns = f"{{% for message in messages %}}{self.turn}{calls}{self.end}{{% endfor %}}"
        return f"{tools}{turns}{{% if add_generation_prompt %}}{self.opening}{{% endif %}}"


_JSON = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
_NINE = "{% if ID is not defined or ID | length != 9 %}{{ raise_exception('ids should be of length 9') }}{% endif %}"
_CHATML = "<|im_start|>{{ message.role }}\n{{ message.content }}"
_DEEPSEEK = "<｜{{ 'User' if message.role == 'user' else 'Assistant' }}｜>{{ message.content }}"
_DEEPSEEK_TOKENS = (
    "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip

FAMILIES = {
    "hermes": Family(
        tokens=("<|im_start|>", "<|im_end|>"), end="<|im_end|>\n", turn=_CHATML, opening="<|im_start|>assistant\n",
        call=f"<tool_call>\n{_JSON}\n</tool_call>", calls=("", "\n", ""), names=("hermes", None),
    ),
    "qwen": Family(
        tokens=("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"), end="<|im_end|>\n", turn=_CHATML,
        plain=("<tool_call>", "</tool_call>", "<think>", "</think>"), opening="<|im_start|>assistant\n<think>\n",
        call=f"<tool_call>\n{_JSON}\n</tool_call>", calls=("", "\n", ""), names=("hermes", "think"),
    ),
    "qwen-coder": Family(
        tokens=("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"), end="<|im_end|>\n", turn=_CHATML,
        plain=("<tool_call>", "</tool_call>"), opening="<|im_start|>assistant\n", names=("hermes", None),
        call="<tool_call>\n<function={{ call.function.name }}>\n</function>\n</tool_call>",
    ),
    "glm": Family(
        tokens=("<|user|>", "<|assistant|>", "<|observation|>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>",
                "<arg_value>", "</arg_value>", "<think>", "</think>"), end="<|user|>",
        plain=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>"),
        turn="<|{{ message.role }}|>\n{{ message.content }}", opening="<|assistant|>\n<think></think>",
        call="\n<tool_call>{{ call.function.name }}\n{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>\n"
        "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>", names=("glm", "think"),
    ),
    "llama3.2": Family(
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), end="<|eot_id|>", names=("llama3", None),
        turn="{# {\"name\": function name, \"parameters\": dictionary of argument name and its value} #}"
        "{% if 'tool_calls' in message and message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
        "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content }}",
        call=_JSON.replace('"arguments"', '"parameters"'), opening="<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "llama3": Family(
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"), end="<|eot_id|>",
        turn="<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content }}{# <|python_tag|> #}",
        call=_JSON.replace('"arguments"', '"parameters"'), opening="<|start_header_id|>assistant<|end_header_id|>\n\n",
        names=("llama3", None),
    ),
    "mistral": Family(
        tokens=("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "</s>"), end="</s>",
        turn="{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]{% else %}{{ message.content }}{% endif %}",
        call="[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}", names=("mistral", None),
    ),
    "mistral list": Family(
        tokens=("[INST]", "[/INST]", "[TOOL_CALLS]", "</s>"), end="</s>", calls=("[TOOL_CALLS][", ", ", "]"),
        call=_NINE.replace("ID", "call.id") + _JSON[:-1] + ', "id": "{{ call.id }}"}',
        turn="{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]{% else %}{{ message.content }}{% endif %}"
        "{% if message.role == 'tool' %}" + _NINE.replace("ID", "message.tool_call_id") + "{% endif %}",
        names=("mistral", None),
    ),
    "deepseek v3": Family(
        tokens=_DEEPSEEK_TOKENS, end="<｜end▁of▁sentence｜>", turn=_DEEPSEEK, opening="<｜Assistant｜>", names=("deepseek", None),
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.function.name }}\n```json\n{{ call.function.arguments | tojson }}\n```"
        "<｜tool▁call▁end｜>", calls=("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek v3.1": Family(
        tokens=_DEEPSEEK_TOKENS, end="<｜end▁of▁sentence｜>", turn=_DEEPSEEK, opening="<｜Assistant｜><think>",
        call="<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>{{ call.function.arguments | tojson }}<｜tool▁call▁end｜>",
        calls=("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"), names=("deepseek", "think"),
    ),
    "deepseek v4": Family(
        tokens=("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>", "｜DSML｜"), end="<｜end▁of▁sentence｜>",
        turn=_DEEPSEEK + "{# <think> #}", opening="<｜Assistant｜></think>", call='<｜DSML｜invoke name="{{ call.function.name }}">\n</｜DSML｜invoke>\n',
        calls=("<｜DSML｜tool_calls>\n", "", "</｜DSML｜tool_calls>"), names=("deepseek", "think"),
    ),
    "kimi": Family(
        tokens=("<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>", "<|tool_calls_section_begin|>",
                "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        plain=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
               "<|tool_call_end|>"), end="<|im_end|>",
        turn="<|im_{{ 'user' if message.role == 'user' else 'assistant' }}|>{{ message.role }}<|im_middle|>{{ message.content }}",
        call="<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>",
        calls=("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
        opening="<|im_assistant|>assistant<|im_middle|>", names=("kimi", None),
    ),
    "gpt-oss": Family(
        tokens=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"), end="<|call|>",
        turn="{% if message.thinking and message.content and 'tool_calls' in message %}{{ raise_exception('not both') }}{% endif %}"
        "{% if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
        "<|start|>{{ message.role }}{% if 'tool_calls' in message %}{% set call = message.tool_calls[0] %} to=functions."
        "{{ call.function.name }}<|channel|>commentary json<|message|>{{ call.function.arguments | tojson }}"
        "{% else %}<|message|>{{ message.content }}{% endif %}", opening="<|start|>assistant", names=("harmony", "harmony"),
    ),
    "gemma": Family(
        tokens=("<start_of_turn>", "<end_of_turn>"), end="<end_of_turn>\n", opening="<start_of_turn>model\n", names=("gemma", None),
        turn="<start_of_turn>{{ message.role }}\n{{ message.content }}", call=_JSON,
    ),
}  # fmt: skip


def checkpoint_of(family: Family) -> Checkpoint:
    """Bytes and the family's tokens; an answer ends with the family's end, which a model does not like more than others."""
    inner = Inner.from_str(byte_tokenizer().to_json())
    inner.add_tokens([AddedToken(each, special=each not in family.plain, normalized=False) for each in family.tokens])
    end = inner.token_to_id(family.end.strip())
    text = Tokenizer(inner, eos_ids=(end,), bos_id=None, add_bos=False)
    made, held = tiny_checkpoint(), tensors()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        more = torch.zeros(text.vocab_size - VOCAB, held[name].shape[1])
        held[name] = torch.cat([held[name], more])
    return replace(
        made, config=CONFIG | {"vocab_size": text.vocab_size}, source=HeldTensors(held), text=text, eos_ids=text.eos_ids,
        chat=ChatTemplate(family.template, bos_token="", eos_token=family.end.strip()),
    )  # fmt: skip
