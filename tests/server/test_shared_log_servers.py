"""`stepwell serve --store shared-log:DIR`: servers in processes of their own resume what another one computed."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from stepwell.cli.demo.server import Server, serving

QUESTION = [{"role": "user", "content": "Which of the two servers was reported this first, and which one knows it now? " * 4}]


def test_two_servers_share_one_directory_and_the_second_outlives_the_first(tmp_path: Path) -> None:
    arguments = ["--model", "random-hybrid", "--served-model-name", "demo", "--device-memory", "64MiB", "--host-memory", "64MiB"]
    arguments += ["--store", f"shared-log:{tmp_path / 'store'}", "--store-budget", "256MiB"]
    arguments += ["--prefetch-policy", "wait_complete"]  # however busy the machine is

    def start(stack: ExitStack, name: str) -> Server:
        return stack.enter_context(serving(arguments, tmp_path / f"{name}.log"))

    with ExitStack() as second_life, ExitStack() as first_life:
        first, second = start(first_life, "first"), start(second_life, "second")
        reported = first.ask(QUESTION, max_tokens=8)
        assert reported.computed == reported.prompt_tokens
        first.wait_until_stored()
        known = second.ask(QUESTION, max_tokens=8)
        assert known.text == reported.text and known.store > known.prompt_tokens // 2
        other = [{"role": "user", "content": "Something that only the second one hears. " * 6}]
        heard = second.ask(other, max_tokens=8)
        second.wait_until_stored()
        first_life.close()  # kill -9 of the owner
        third = start(second_life, "third")
        for question, said in ((QUESTION, reported), (other, heard)):
            again = third.ask(question, max_tokens=8)
            assert again.text == said.text and again.store > again.prompt_tokens // 2
        assert second.ask(other, max_tokens=8).text == heard.text and second.state()["store"]["state"] == "attached"
