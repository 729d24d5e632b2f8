"""Options of `stepwell serve` for names, template, lengths and times. Nothing is loaded."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pytest

from stepwell import __version__
from stepwell.base.errors import ConfigError
from stepwell.cli import answer_options, serve
from stepwell.cli.answer_options import AnswerOptions
from stepwell.cli.main import main


def given(*arguments: str) -> AnswerOptions:
    parser = ArgumentParser()
    serve.configure(parser)
    return answer_options.read(parser.parse_args(["--model", "m", *arguments]))


def test_without_options_the_model_has_its_own_name_and_template() -> None:
    assert given() == AnswerOptions() and given().summary() == []


def test_names_may_be_given_at_once_or_one_by_one_and_count_once() -> None:
    assert given("--served-model-name", "a", "b", "--served-model-name", "c", "a").names == ("a", "b", "c")


def test_limits_of_answers_are_said_at_the_start() -> None:
    made = given("--default-max-tokens", "1024", "--request-timeout", "2.5")
    assert (made.default_max_tokens, made.request_timeout_s) == (1024, 2.5)
    assert made.summary() == [("answers", "1,024 tokens by default, 2.5 s a request")]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--served-model-name", ""), "--served-model-name"),
        (("--default-max-tokens", "0"), "--default-max-tokens"),
        (("--request-timeout", "0"), "--request-timeout"),
        (("--request-timeout", "nan"), "--request-timeout"),
        (("--request-timeout", "inf"), "--request-timeout"),
        (("--chat-template", "/nowhere/x.jinja"), "--chat-template cannot be read"),
        (("--chat-template", "/"), "--chat-template cannot be read"),
    ],
)
def test_what_cannot_work_is_refused(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        given(*arguments)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"{% if %}", "cannot be compiled"), (b"\xff\xfe", "UTF-8"), (b"x" * (1 << 20) + b"y", "is it a template")],
)
def test_a_template_that_is_none_is_refused_before_weights_are_read(tmp_path: Path, content: bytes, says: str) -> None:
    pytest.importorskip("jinja2")
    file = tmp_path / "chat.jinja"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        given("--chat-template", str(file))


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"stepwell {__version__}\n"
