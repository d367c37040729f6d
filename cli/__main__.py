"""`python -m cli`: the same as `tasuki`, for a checkout that is not installed."""

from __future__ import annotations

import sys

from cli.main import main

if __name__ == "__main__":
    sys.exit(main())
