"""Answers follow their grammars: alone, in batches, with drafts, after preemption; what cannot be followed is refused."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

import pytest

pytest.importorskip("llguidance")

from server.serving import PAGE, tiny_checkpoint, tiny_draft
from stepwell.base.errors import ConfigError
from stepwell.engine import Delta, Engine, EngineConfig, Finish, GenerateRequest, Limits, Sampling, build_engine
from stepwell.engine.requests.guided import Grammar, Guide, Kind, Thoughts
from waiting import run_to_the_end

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"type": "integer", "minimum": 0, "maximum": 99},
                   "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3}},
    "required": ["name", "size", "tags"], "additionalProperties": False,
}  # fmt: skip
LARK = 'start: "the " SIZE " " ("cat" | "dog")+ "."\nSIZE: /[0-9]{1,3}/'
GRAMMARS = [
    Grammar(kind=Kind.JSON_SCHEMA, source=json.dumps(SCHEMA)), Grammar(kind=Kind.REGEX, source=r"[a-f]{3}-\d{2,4}(x|yz)"),
    Grammar(kind=Kind.GRAMMAR, source=LARK), Grammar(kind=Kind.CHOICE, source='["yes", "no \\"really\\"", "perhaps\\n"]'),
]  # fmt: skip


def guided_engine(*, draft: bool = False, **settings: Any) -> Engine:
    given: dict[str, Any] = {"device": "cpu", "device_memory": "8MiB", "host_memory": "8MiB", "page_tokens": PAGE}
    return build_engine(tiny_checkpoint(), EngineConfig(**(given | settings)), draft=tiny_draft() if draft else None)


def asks(engine: Engine, **more: Any) -> list[GenerateRequest]:
    assert engine.guides is not None
    made = []
    for at in range(8):
        grammar = (GRAMMARS * 2)[at] if at != 7 else None
        sampling = Sampling(max_tokens=200, seed=at, temperature=0.0 if at < 4 else 1.3, presence_penalty=0.2 * (at % 2), **more)
        guide = None if grammar is None else engine.guides.compile(grammar)
        made.append(GenerateRequest(tokens=[*b"Answer me, number ", 48 + at], sampling=sampling, guide=guide))
    return made


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def run(engine: Engine, made: list[GenerateRequest]) -> list[list[Delta]]:
    numbers = [engine.submit(ask) for ask in made]
    deltas = run_to_the_end(engine)
    engine.cache.audit()
    return [[delta for delta in deltas if delta.request == number] for number in numbers]


def check(text: str, grammar: Grammar) -> None:
    if grammar.kind is Kind.JSON_SCHEMA:
        found = json.loads(text)
        assert list(found) == ["name", "size", "tags"] and len(found["name"]) <= 6 and 0 <= found["size"] <= 99
        assert len(found["tags"]) <= 3 and set(found["tags"]) <= {"red", "green"}
    elif grammar.kind is Kind.REGEX:
        assert re.fullmatch(grammar.source, text), text
    elif grammar.kind is Kind.GRAMMAR:
        assert re.fullmatch(r"the \d{1,3} (cat|dog)+\.", text), text
    else:
        assert text in json.loads(grammar.source)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Every answer of a request that is alone, nothing cached."""
    with guided_engine() as engine:
        return [text_of(run(engine, [ask])[0]) for ask in asks(engine)]


def test_answers_follow_their_grammars_and_end(expected: list[str]) -> None:
    with guided_engine() as engine:
        found = run(engine, asks(engine))
        assert [text_of(deltas) for deltas in found] == expected
        for deltas, grammar in zip(found, (GRAMMARS * 2)[:7], strict=False):
            if deltas[-1].finish is Finish.STOP:
                check(text_of(deltas), grammar)
        assert sum(deltas[-1].finish is Finish.STOP for deltas in found[:7]) >= 5


def test_engines_that_read_later_and_engines_with_drafts_answer_alike(expected: list[str]) -> None:
    with guided_engine() as engine:
        engine.passing.reads_later = True
        assert [text_of(deltas) for deltas in run(engine, asks(engine))] == expected
    with guided_engine(draft=True) as engine:
        found = run(engine, asks(engine))
        assert [text_of(deltas) for deltas in found] == expected
        accepted = [deltas[-1].usage.accepted_tokens for deltas in found if deltas[-1].usage is not None]
        assert sum(accepted[:7]) > 0, "guesses that the grammar allows are taken"


def test_preemption_changes_no_answer(expected: list[str]) -> None:
    with guided_engine(limits=Limits(max_running=8)) as engine:
        numbers = [engine.submit(ask) for ask in asks(engine)]
        deltas, steps = [], 0
        while engine.num_open:
            deltas += engine.step()
            steps += 1
            if steps % 7 == 0 and engine.scheduler.active:
                engine.scheduler.put_back(next(iter(engine.scheduler.active.values())))
        assert [text_of([each for each in deltas if each.request == number]) for number in numbers] == expected


def test_a_least_length_yields_to_a_grammar_that_has_ended() -> None:
    with guided_engine() as engine:
        (short,) = run(engine, [asks(engine, min_tokens=100)[3]])
        assert text_of(short) in json.loads(GRAMMARS[3].source) and short[-1].finish is Finish.STOP
        assert engine.guides is not None
        guide = engine.guides.compile(Grammar(kind=Kind.REGEX, source="[ab]{1,40}"))
        (longer,) = run(engine, [GenerateRequest(tokens=[*b"Go"], sampling=Sampling(max_tokens=60, min_tokens=30), guide=guide)])
        assert len(text_of(longer)) >= 30
        (endless,) = run(
            engine, [GenerateRequest(tokens=[*b"Go"], sampling=Sampling(max_tokens=60, ignore_eos=True), guide=guide)]
        )
        assert endless[-1].finish is Finish.STOP and len(text_of(endless)) <= 40


HOSTILE = {
    "nested schema": (Kind.JSON_SCHEMA, '{"type":"array","items":' * 2000 + "{}" + "}" * 2000),
    "many fields": (Kind.JSON_SCHEMA, json.dumps({"type": "object", "properties": {f"p{n}": {} for n in range(3000)}})),
    "product of choices": (Kind.JSON_SCHEMA, json.dumps({"allOf": [
        {"anyOf": [{"type": "object", "properties": {f"a{n}": {"const": m}}} for m in range(8)]} for n in range(12)]})),
    "a schema of itself": (Kind.JSON_SCHEMA, '{"$ref": "#"}'),
    "a schema elsewhere": (Kind.JSON_SCHEMA, '{"$ref": "http://127.0.0.1:9/schema.json"}'),
    "nothing is right": (Kind.JSON_SCHEMA, '{"type": "integer", "minimum": 5, "maximum": 4}'),
    "not a schema": (Kind.JSON_SCHEMA, '{"type": '),
    "nested regex": (Kind.REGEX, "(" * 5000 + "a" + ")" * 5000),
    "lookahead": (Kind.REGEX, "(?=a)b"),
    "nested grammar": (Kind.GRAMMAR, "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "a rule that is missing": (Kind.GRAMMAR, "start: other"),
    "slow to compile": (Kind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 1000003}'),
    "never compiled": (Kind.JSON_SCHEMA, json.dumps(
        {"allOf": [{"type": "string", "pattern": f"^(.*a.{{{n}}})*$"} for n in range(1, 40)]})),
    "too long": (Kind.REGEX, "a" * 100_000),
    "slow in a frame": (Kind.FRAMED, json.dumps({"frame": "start: <[256]> @p", "parts": {
        "p": ["json_schema", '{"type": "integer", "multipleOf": 1000003}']}})),
    "a frame of nothing": (Kind.FRAMED, json.dumps({"frame": "start: @q", "parts": {"p": ["choice", '["a"]']}})),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_grammars_that_cannot_be_followed_are_refused(name: str) -> None:
    kind, source = HOSTILE[name]
    with guided_engine() as engine:
        assert engine.guides is not None
        began = time.monotonic()
        with pytest.raises(ConfigError, match=r"be followed|too complex|characters"):
            engine.guides.compile(Grammar(kind=kind, source=source))
        assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("json_schema", '{"enum": [{"a": 1}]}', '{"a":1}'), ("regex", "[0-9]{3}", "123"), ("choice", '["up", "down"]', "down"),
        ("grammar", 'start: "a" x\nx: "b"~3', "abbb"), ("grammar", 'root ::= "x" [0-9] "y"', "x7y"),
    ],
)  # fmt: skip
def test_a_frame_has_other_grammars_and_tokens_in_it(kind: str, source: str, text: str) -> None:
    frame = json.dumps({"frame": 'start: <[256]> "q" @p "r"', "parts": {"p": [kind, source]}})
    with guided_engine() as engine:
        assert engine.guides is not None
        following = engine.guides.compile(Grammar(kind=Kind.FRAMED, source=frame)).follow()
        answer: list[int] = []
        for token in [256, *f"q{text}r".encode()]:
            words = following.allowed(answer)
            assert words.view("uint32")[token // 32] >> (token % 32) & 1, (answer, token)
            answer.append(token)
        assert following.allowed(answer)[256 // 32] and not following.allowed(answer)[: 256 // 32].any(), "nothing but its end"


def test_a_grammar_that_grows_too_complex_ends_its_own_request_alone() -> None:
    with guided_engine() as engine:
        assert engine.guides is not None
        guide = engine.guides.compile(GRAMMARS[1])
        broken = engine.submit(GenerateRequest(tokens=[*b"One"], sampling=Sampling(max_tokens=20), guide=guide))
        other = engine.submit(GenerateRequest(tokens=[*b"Two"], sampling=Sampling(max_tokens=20), guide=guide))
        while engine._answering.requests[broken].following is None:
            engine.step()
        engine._answering.requests[broken].following._matcher.consume_tokens([0])  # type: ignore[union-attr]
        deltas = run_to_the_end(engine)
        ends = {delta.request: delta for delta in deltas if delta.finish is not None}
        assert ends[broken].finish is Finish.FAILED and "simplify" in (ends[broken].error or "")
        assert ends[other].finish is Finish.STOP


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with guided_engine() as engine:
        assert engine.guides is not None
        with pytest.raises(ConfigError, match=r"pip install 'llguidance>=1\.7'"):
            engine.guides.compile(GRAMMARS[1])


def thinker(engine: Engine, *, begun: bool) -> Guide:
    """Thoughts stand in square brackets."""
    assert engine.guides is not None
    guide = engine.guides.compile(Grammar(kind=Kind.REGEX, source="(ab|cd){2}[]]"))
    return guide.behind(Thoughts(open=ord("["), close=ord("]"), begun=begun))


def thinking_asks(engine: Engine) -> list[GenerateRequest]:
    def ask(at: int, *, begun: bool, **biases: float) -> GenerateRequest:
        sampling = Sampling(max_tokens=120, seed=at, temperature=1.0, logit_bias=tuple((ord(k), v) for k, v in biases.items()))
        return GenerateRequest(tokens=[*b"Think, number ", 48 + at], sampling=sampling, guide=thinker(engine, begun=begun))

    likely = {"]": 4.0}
    begun = [ask(at, begun=True, **likely) for at in range(4)]
    return [*begun, ask(4, begun=False, **{"[": 100.0}), ask(5, begun=False, **{"[": -100.0})]


def test_thoughts_stand_before_a_grammar_alone_in_batches_and_with_drafts() -> None:
    with guided_engine() as engine:
        alone = [text_of(run(engine, [ask])[0]) for ask in thinking_asks(engine)]
        assert [text_of(deltas) for deltas in run(engine, thinking_asks(engine))] == alone
    for text in alone[:4]:
        assert re.fullmatch(r"[^]]*[]](ab|cd){2}[]]", text, re.DOTALL), text
    assert any(len(text) > 8 for text in alone[:4]), "something was thought"
    assert alone[4] == "[" * 120, "the first token opened thoughts, in which anything may come"
    assert re.fullmatch(r"(ab|cd){2}[]]", alone[5]), "the first token opened none"
    with guided_engine(draft=True) as engine:
        assert [text_of(deltas) for deltas in run(engine, thinking_asks(engine))] == alone


def test_an_answer_does_not_end_while_it_thinks() -> None:
    with guided_engine() as engine:
        assert engine.guides is not None
        following = thinker(engine, begun=True).follow()
        ends = sorted(tiny_checkpoint().eos_ids)

        def may_come(answer: bytes, guesses: bytes = b"") -> list[int]:
            words = following.allowed(list(answer), list(guesses))
            return [token for token in range(260) if words[token // 32] >> (token % 32) & 1]

        free = may_come(b"so")
        assert not set(ends) & set(free) and len(free) == 260 - len(ends)
        assert may_come(b"so", b"]") == [ord("a"), ord("c")] == may_come(b"so on]")
        assert may_come(b"so on]a", b"b") == [ord("a"), ord("c")]
        assert set(may_come(b"so on]abab]")) == set(ends)
