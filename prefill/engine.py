"""`python -m prefill.engine`: the engine process of a prefill worker, started by its server
process.
"""

from __future__ import annotations

from prefill.core import PrefillCore
from tasuki.engine.start import main

if __name__ == "__main__":
    # a whole prompt is allocated at admission, so nothing that is being sent is ever preempted
    main(PrefillCore, allocate_whole_prompt=True, prog="prefill.engine")
