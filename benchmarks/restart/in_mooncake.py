"""Both lives over a Mooncake cluster whose memory another process lends, inside a private network. Run by `bench_restart.py`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1]
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent / "tests" / "mooncake")]

from mooncake_cluster import Cluster  # noqa: E402

from restart.lives import live  # noqa: E402


def main() -> None:
    order = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as directory, Cluster(Path(directory), ["--default_kv_lease_ttl=60000"]) as cluster:
        cluster.lend("1GiB")
        for _ in range(2):
            options = cluster.options(staging_bytes=str(64 << 20))
            print(json.dumps(live(order | {"store": "mooncake:", "options": options})), flush=True)


if __name__ == "__main__":
    main()
