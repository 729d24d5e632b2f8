"""`python -m demo_cluster`, with `examples` on PYTHONPATH."""

import sys

from demo_cluster.play import main

sys.exit(main())
