"""`python -m tasuki.native`: compile the kernels now, and print where they are."""

from __future__ import annotations

import os
import sys

from tasuki.cache_root import cache_root
from tasuki.errors import TasukiError
from tasuki.native.build import ensure_library


def main() -> int:
    try:
        print(ensure_library(cache_root(os.environ)))
    except TasukiError as error:
        print(f"tasuki.native: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
