"""Replays of several tiers: every row of `benchmarks/results/replays-tiers.json` again, with its earlier result.

    python benchmarks/replay_tiers.py --traces FOLDER                     all rows, one after the other (an hour and more)
    python benchmarks/replay_tiers.py --traces FOLDER --jobs 8 --only exclusive

FOLDER holds the traces that rows name, as `stepwell replay` reads them. The tables of docs/policies.md are of these rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "replays-tiers.json"
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", type=Path, required=True, help="the folder with the traces")
    parser.add_argument("--rows", type=Path, default=RESULTS, help="which replays, and what they gave (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=[], help="rows with one of these words, such as exclusive")
    parser.add_argument("--jobs", type=int, default=1, help="replays at a time (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where all rows go, replayed or not (default: %(default)s)")
    args = parser.parse_args()
    recorded = json.loads(args.rows.read_text())
    wanted = [row for row in recorded["rows"] if not args.only or set(args.only) & set(row["replay"].split())]
    wanted.sort(key=lambda row: -row["wall_s"])  # the longest first, so that none is left alone at the end
    began = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        found: dict[str, Row] = {}
        for count, row in enumerate(pool.map(lambda row: replay(args.traces, row["replay"]), wanted), start=1):
            before = next(each for each in wanted if each["replay"] == row["replay"])
            found[row["replay"]] = row
            change = f"{before['hit_rate']:6.2f} -> {row['hit_rate']:6.2f}"
            print(f"{time.monotonic() - began:5.0f} s  {count}/{len(wanted)}  {change}  {row['replay']}", flush=True)
            rows = [found.get(each["replay"], each) for each in recorded["rows"]]
            lines = ", \n".join(json.dumps(each) for each in rows)
            args.output.write_text(f'{{"about": {json.dumps(recorded["about"])}, "rows": [\n{lines}\n]}}\n')
    return 0


def replay(traces: Path, what: str) -> Row:
    """Runs one, as its row says. Raises RuntimeError if it fails."""
    name, *options = what.split()
    (trace,) = traces.glob(f"{name}.jsonl*")
    command = [sys.executable, "-m", "stepwell", "replay", str(trace), *options, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{what}: {done.stderr[-500:]}")
    found = json.loads(done.stdout)
    computed = max(found["computed_tokens"], 1)
    return {
        "replay": what,
        "requests": found["requests"],
        "hit_rate": round(100 * found["hit_rate"], 2),
        "store_gb_per_million_computed": round(found.get("store_written_bytes", 0) / computed / 1e3, 2),
        "host_written_gb": round(found.get("host_written_bytes", 0) / 1e9),
        "too_large": found["too_large"],
        "wall_s": round(found["wall_s"]),
    }


if __name__ == "__main__":
    sys.exit(main())
