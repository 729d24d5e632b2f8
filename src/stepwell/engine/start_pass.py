"""Measures how fast an engine computes prompts, before its first request, so that it fetches only what is slower to compute.

Prompts of growing length run twice: the first run may build kernels, the second is measured. The last prompt takes several
passes, which shows how attention slows later ones. Each round takes at most `MOST_S` and one pass.
"""

from __future__ import annotations

from stepwell.engine.engine import Engine
from stepwell.engine.requests.request import GenerateRequest, Sampling

LENGTHS = (64, 256, 1024)  # then a full pass, then
PASSES = 4  # passes of the longest prompt
MOST_S = 1.0
GROWTH = 4  # expected ratio of a prompt's time to that of the one before


def measure_speed(engine: Engine) -> None:
    """Records in the cache how long prompts take to compute. Leaves nothing cached."""
    chunk = engine.limits.chunk_tokens
    lengths = [*(each for each in LENGTHS if each < chunk), chunk, PASSES * chunk]
    lengths = [min(each, engine.max_alone - 1) for each in lengths]
    for rounds in (lengths[:-1], lengths):
        engine.cache.forget_speeds()
        took_s, end_s = 0.0, engine.clock.now() + MOST_S
        for tokens in dict.fromkeys(rounds):
            if tokens < 1 or engine.clock.now() + GROWTH * took_s > end_s:
                break
            began_s = engine.clock.now()
            _compute(engine, tokens, end_s)
            took_s = engine.clock.now() - began_s


def _compute(engine: Engine, tokens: int, end_s: float) -> None:
    """Computes a prompt of different tokens, since equal ones may be faster for experts and processor caches."""
    prompt = [(7919 * at + 13) % engine.vocab_size for at in range(tokens)]
    number = engine.submit(GenerateRequest(tokens=prompt, sampling=Sampling(max_tokens=1, ignore_eos=True), use_cache=False))
    while engine.num_open:
        engine.step()
        if engine.clock.now() > end_s:
            engine.abort(number)
    engine.step()
