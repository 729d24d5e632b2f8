"""The wire format of chats: content, reasoning and tool calls, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepwell.engine.requests.guided import Guide
from stepwell.engine.requests.request import Delta, Finish, GenerateRequest
from stepwell.engine.requests.text import Text
from stepwell.server.api.bodies import ChatBody
from stepwell.server.api.frames import is_framed
from stepwell.server.api.grammars import Choosing, ToolChoice, tool_choice_of
from stepwell.server.api.parsing.blocks import BlockParser, NamedParser, Plain
from stepwell.server.api.parsing.counting import ThoughtCounter
from stepwell.server.api.parsing.formats import (
    HARMONY,
    NO_TEXTS,
    REASONING,
    REQUIRED,
    markers_of,
    parser_for,
    prompt_end,
    thoughts_for,
)  # fmt: skip
from stepwell.server.api.parsing.pieces import Call, Parser, Piece, id_of, joined
from stepwell.server.api.parsing.thoughts import ThoughtParser
from stepwell.server.api.replies import Word, chat_logprobs, prompt_logprobs, words
from stepwell.server.served import Served


def shows_special(served: Served, body: ChatBody) -> bool:
    """Whether an answer's text must include special tokens, because the markers of its format are special tokens.

    Otherwise text leaves out special tokens that a model writes by chance.
    """
    choice = tool_choice_of(body)
    follows = choice.is_forced or body.is_guided
    if served.text is None or (served.reasoning_parser == HARMONY and follows and not is_framed(served, body, choice)):
        return False
    return any(_is_special(served.text, marker) for marker in markers_of(*_formats(served, body, choice)))


def _is_special(text: Text, marker: str) -> bool:
    return marker not in text.decode(text.encode(marker, special=False))


def chat_form(served: Served, body: ChatBody, requests: Sequence[GenerateRequest]) -> ChatForm:
    choice = tool_choice_of(body)
    return ChatForm(
        words(served.text, as_ids=body.return_tokens_as_token_ids),
        _parser(served, body, choice, requests[0]),
        _counter(served, body, choice, requests[0]),
        prompt_logprobs_wanted=body.prompt_logprobs is not None,
        several=body.parallel_tool_calls is not False,
        named=choice.how is Choosing.NAMED,
        prompt=requests[0].tokens if body.return_token_ids else None,
    )


def _formats(served: Served, body: ChatBody, choice: ToolChoice) -> tuple[str | None, str | None]:
    is_free = choice.how is Choosing.AUTO and not body.is_guided
    in_form = choice.is_forced and is_framed(served, body, choice)
    return served.tool_parser if is_free or in_form else None, served.reasoning_parser


def _parser(served: Served, body: ChatBody, choice: ToolChoice, request: GenerateRequest) -> Callable[[], Parser]:
    """A factory of parsers. An answer that follows a grammar is not parsed, except for the reasoning before it."""
    tools, reasoning = _formats(served, body, choice)
    guide = _grammar(served, body, choice, request)
    if guide is not None:
        thoughts, text = guide.thoughts, served.text
        in_form = is_framed(served, body, choice)
        answer: Callable[[], Parser] = (lambda: parser_for(tools, None)) if in_form else _guided(choice)
        if thoughts is None or text is None:
            return answer
        around = REASONING[reasoning or ""]
        return lambda: ThoughtParser(thoughts, around, answer(), text)
    if served.text is None:
        return Plain
    end = prompt_end(served.text, request.tokens)
    return lambda: parser_for(tools, reasoning, prompt_end=end, texts=choice.texts)


def _grammar(served: Served, body: ChatBody, choice: ToolChoice, request: GenerateRequest) -> Guide | None:
    """The grammar of an answer after its reasoning; None without a grammar, or if the grammar includes the reasoning."""
    has_thoughts = served.reasoning_parser == HARMONY and is_framed(served, body, choice)
    return None if has_thoughts else request.guide


def _counter(served: Served, body: ChatBody, choice: ToolChoice, request: GenerateRequest) -> Callable[[], ThoughtCounter] | None:
    """A factory of counters of reasoning tokens; None without reasoning, or if the parser counts them."""
    text = served.text
    if text is None or _grammar(served, body, choice, request) is not None:
        return None
    make = thoughts_for(*_formats(served, body, choice), prompt_end=prompt_end(text, request.tokens))
    special = request.sampling.show_special
    return None if make is None else lambda: ThoughtCounter(make(), text.stream(request.tokens, special=special))


def _guided(choice: ToolChoice) -> Callable[[], Parser]:
    if choice.name is not None:
        name = choice.name
        return lambda: NamedParser(name)
    return (lambda: BlockParser(REQUIRED, NO_TEXTS)) if choice.how is Choosing.REQUIRED else Plain


class ChatForm:
    prefix = "chatcmpl"
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, word: Word, parser: Callable[[], Parser], counter: Callable[[], ThoughtCounter] | None, *,
        prompt_logprobs_wanted: bool = False, several: bool = True, named: bool = False, prompt: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """`several` allows more than one call. `prompt` holds the prompt's tokens if token ids are wanted."""
        self._word = word
        self._prompt = prompt
        self._parser = parser
        self._counter = counter
        self._with_prompt_logprobs = prompt_logprobs_wanted
        self._several = several
        self._named = named
        self._parsers: dict[int, Parser] = {}  # by choice
        self._counters: dict[int, ThoughtCounter | ThoughtParser] = {}  # of choices that may reason
        self._calls: dict[int, int] = {}  # calls sent so far, by choice

    def first_choice(self, index: int) -> dict[str, Any] | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def first_fields(self) -> dict[str, Any]:
        return {} if self._prompt is None else {"prompt_token_ids": list(self._prompt)}

    def piece(self, index: int, delta: Delta) -> dict[str, Any] | None:
        begun = self._calls.get(index, 0)
        piece = self.parse(index, delta)
        if not piece and not delta.logprobs and delta.finish is None and self._prompt is None:
            return None
        fields: dict[str, Any] = {"content": piece.content} if piece.content else {}
        if piece.reasoning:
            fields["reasoning_content"] = piece.reasoning
        if piece.calls:
            first = begun if piece.calls[0].name is not None else begun - 1  # which may continue
            fields["tool_calls"] = [{"index": at, **_call(call)} for at, call in enumerate(piece.calls, start=first)]
        return {"index": index, "delta": fields, **self._rest(index, delta)}

    def whole(self, index: int, delta: Delta) -> dict[str, Any]:
        piece = self.parse(index, delta)
        content = None if piece.calls and not piece.content else piece.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.calls:
            message["tool_calls"] = [_call(call) for call in piece.calls]
        return {"index": index, "message": message, **self._rest(index, delta)}

    def in_call(self, index: int) -> bool:
        """Whether an answer ends within a call that was sent, so that its arguments are incomplete."""
        is_shown = self._several or self._calls.get(index, 0) < 2
        return index in self._parsers and self._parsers[index].in_call and is_shown

    def extra_fields(self, answers: Mapping[int, Delta]) -> dict[str, Any]:
        """All choices share one prompt."""
        extra = {"prompt_logprobs": prompt_logprobs(self._word, answers[0].prompt_logprobs)} if self._with_prompt_logprobs else {}
        return {**extra, **self.first_fields()}

    def usage(self) -> dict[str, int]:
        """The number of reasoning tokens so far, over all choices."""
        return {"reasoning_tokens": sum(each.thoughts for each in self._counters.values())}

    def parse(self, index: int, delta: Delta) -> Piece:
        """Parses a delta into what it adds to the answer. Pass each delta once."""
        if index not in self._parsers:
            self._begin(index)
        parser = self._parsers[index]
        if index in self._counters:
            self._counters[index].read(delta.tokens)
        piece = parser.push(delta.text)
        if delta.finish is not None:
            piece = joined([piece, parser.finish(cut=delta.finish is Finish.LENGTH)])
        begun, calls = self._calls.get(index, 0), []
        for call in piece.calls:
            begun += call.name is not None
            if begun == 1 or self._several:
                calls.append(call)
        self._calls[index] = begun
        return replace(piece, calls=tuple(calls))

    def _begin(self, index: int) -> None:
        self._parsers[index] = parser = self._parser()
        if isinstance(parser, ThoughtParser):
            self._counters[index] = parser
        elif self._counter is not None:
            self._counters[index] = self._counter()

    def _rest(self, index: int, delta: Delta) -> dict[str, Any]:
        logprobs = chat_logprobs(self._word, delta.logprobs) if delta.logprobs else None
        ids = {} if self._prompt is None else {"token_ids": list(delta.tokens)}
        finish = delta.finish.value if delta.finish is not None else None
        calls = self._calls.get(index) and not self._named and not self.in_call(index)
        if delta.finish is Finish.STOP and calls:  # as OpenAI does
            finish = "tool_calls"
        return {"logprobs": logprobs, "finish_reason": finish, "stop_reason": delta.stop_reason, **ids}


def _call(call: Call) -> dict[str, Any]:
    """A call, or more arguments of the last one."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": id_of(call), "type": "function", "function": function}
