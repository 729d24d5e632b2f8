"""`python -m stepwell` is the `stepwell` command."""

from __future__ import annotations

import sys

from stepwell.cli.main import main

sys.exit(main())
