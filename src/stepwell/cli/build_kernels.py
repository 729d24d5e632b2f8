"""`stepwell build-kernels`: compiles FlashInfer's kernels, for images and before the first start on a GPU."""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from concurrent.futures import ThreadPoolExecutor, as_completed

from stepwell.cli.command import Command


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "modules",
        nargs="*",
        metavar="NAME",
        help="module names as in the server's log (default: those of most models, some minutes)",
    )
    parser.add_argument("--nice", type=int, default=0, metavar="N", help="niceness of the compilers, up to 19 (default: 0)")


def run(args: Namespace) -> int:
    from stepwell.engine.ops.on_flashinfer.modules import JOBS_OF_ONE, USUAL, build, is_compiled

    wanted = [name for name in args.modules or USUAL if not is_compiled(name)]
    if args.nice:
        os.nice(args.nice)
    cores = os.cpu_count() or 1
    os.environ.setdefault("MAX_JOBS", str(min(JOBS_OF_ONE, cores)))
    began_s, failed = time.monotonic(), 0
    with ThreadPoolExecutor(max(cores // JOBS_OF_ONE, 1) + 1) as pool:  # the threads only wait
        made = {pool.submit(build, name): name for name in wanted}
        for count, done in enumerate(as_completed(made), start=1):
            reason = done.exception()
            failed += reason is not None
            how = "built" if reason is None else f"FAILED: {reason}"
            print(f"{time.monotonic() - began_s:5.0f} s  {count}/{len(made)}  {made[done]}: {how}", flush=True)
    if not wanted:
        print("all of them are already compiled")
    return 1 if failed else 0


COMMAND = Command(
    name="build-kernels",
    summary="Compile FlashInfer's kernels, for images and before a first start.",
    configure=configure,
    run=run,
    extra="cuda",
)
