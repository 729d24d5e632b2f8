"""Chat templates: what models bring, what they may not do."""

from __future__ import annotations

from datetime import datetime

import pytest

from stepwell.base.errors import ConfigError
from stepwell.engine.loading.chat import ChatTemplate

HELLO = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)


def test_a_template_as_models_bring_it() -> None:
    prompt = ChatTemplate(CHATML).render(HELLO)
    assert prompt == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert not ChatTemplate(CHATML).render(HELLO, add_generation_prompt=False).endswith("assistant\n")


def test_without_a_template_there_is_a_plain_one() -> None:
    assert ChatTemplate().render(HELLO) == "system: Be kind.\nuser: Hi\nassistant:"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ChatTemplate().render(parts) == "user: ab\nassistant:"
    assert ChatTemplate().render([{"role": "assistant", "content": None}], add_generation_prompt=False) == "assistant: \n"
    assert ChatTemplate().is_plain and not ChatTemplate(CHATML).is_plain


def test_tools_options_tokens_and_helpers_reach_the_template() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ tools | tojson }}{{ thinking }}{{ strftime_now('%Y') }}"
        "{% generation %}x{% endgeneration %}{{ eos_token }}",
        bos_token="<s>", eos_token="</s>", now=lambda: datetime(2031, 1, 2),
    )  # fmt: skip
    tools = [{"name": "a<b>'é"}]
    assert template.render(HELLO, tools=tools, options={"thinking": True}) == '<s>[{"name": "a<b>\'é"}]True2031x</s>'


def test_loops_can_be_left_and_json_indented() -> None:
    assert (
        ChatTemplate("{% for m in messages %}{% break %}{% endfor %}{{ {'a': 1} | tojson(indent=2) }}").render(HELLO)
        == '{\n  "a": 1\n}'
    )


def test_options_cannot_replace_the_messages() -> None:
    assert ChatTemplate("{{ messages[0].content }}").render(HELLO, options={"messages": [], "bos_token": "x"}) == "Be kind."


def test_a_template_refuses_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match="roles must alternate"):
        template.render(HELLO)


@pytest.mark.parametrize(
    "source", ["{{ ", "{% if %}", "{% for a in b %}", "{{ x | unknown_filter }}", "(" * 3 + "{{" + "(" * 50_000]
)
def test_what_does_not_compile_is_a_config_error(source: str) -> None:
    with pytest.raises(ConfigError, match="cannot be compiled"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content + 'x' }}",
        "{{ 1 / 0 }}",
        "{{ messages.x.y }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ strftime_now.__globals__['sys'] }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__.x }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ ''|attr('__class__')|attr('__mro__') + 1 }}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for a in range(10000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)  # fmt: skip
def test_what_a_template_may_not_do_is_a_config_error(source: str) -> None:
    with pytest.raises(ConfigError, match="does not take these messages"):
        ChatTemplate(source).render(HELLO)
    assert HELLO[0] == {"role": "system", "content": "Be kind."}


def test_text_of_a_message_is_never_a_template() -> None:
    assert "{{ 1 + 1 }}" in ChatTemplate().render([{"role": "user", "content": "{{ 1 + 1 }}"}])


def test_only_plain_data_goes_in() -> None:
    with pytest.raises(ConfigError, match="plain JSON"):
        ChatTemplate().render([{"role": "user", "content": object()}])
