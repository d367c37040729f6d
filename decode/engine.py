"""`python -m decode.engine`: the engine process of a decode worker, started by its server
process.
"""

from __future__ import annotations

from decode.core import DecodeCore
from tasuki.engine.start import main

if __name__ == "__main__":
    main(DecodeCore, allocate_whole_prompt=False, prog="decode.engine")
