"""How fast an engine computes prompts, measured before its first request, so that nothing is fetched that is computed sooner.

Prompts of growing length run twice: kernels may be built the first time, and the second time counts. The last prompt takes
several passes, so that what attention adds to later ones is known too. Each round takes `MOST_S` and one pass at most.
"""

from __future__ import annotations

from stepwell.engine.engine import Engine
from stepwell.engine.requests.request import GenerateRequest, Sampling

LENGTHS = (64, 256, 1024)  # and a whole pass, and
PASSES = 4  # of the longest prompt
MOST_S = 1.0
GROWTH = 4  # times as long, a prompt is expected to take compared with the one before


def measure_speed(engine: Engine) -> None:
    """Leaves nothing cached, and the cache knowing how long prompts take to compute."""
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
    """A prompt of different tokens, since experts and caches of the processor may find equal ones easier."""
    prompt = [(7919 * at + 13) % engine.vocab_size for at in range(tokens)]
    number = engine.submit(GenerateRequest(tokens=prompt, sampling=Sampling(max_tokens=1, ignore_eos=True), use_cache=False))
    while engine.num_open:
        engine.step()
        if engine.clock.now() > end_s:
            engine.abort(number)
    engine.step()
