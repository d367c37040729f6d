"""Tries, on the loaded model, whether a row's logits are the same bits whatever is beside it.

Of the compiled kernels it is true by construction; oneDNN and torch do not promise it. So every
process looks at its own processor, library and model: the first layers and the head, on a prompt
that crosses an attention tile, computed whole, in chunks, and beside others.
"""

from __future__ import annotations

import torch

from tasuki.kv.cache import KVCache
from tasuki.kv.layout import KVLayout
from tasuki.model.batch import Batch, BatchEntry
from tasuki.model.transformer import CausalLM

WORDS = {
    True: "bit-exact",
    False: "tokens compared within tolerance",
    None: "not tried",
}
DEPTH = 2
LENGTH = 75
CHUNKS = ((LENGTH,), (1, 40, 34), (64, 11), (70, 1, 1, 1, 1, 1))
OTHERS = (1, 30, 2, 1)  # lengths of strangers' prompts


def holds(model: CausalLM, layout: KVLayout) -> bool:
    """Takes some tenths of a second at most. Tries with as many threads as are set."""
    length = min(LENGTH, model.config.max_position - 1)
    blocks = layout.blocks_for(length)
    cache = KVCache(layout, (1 + len(OTHERS)) * blocks, str(model.device))
    generator = torch.Generator().manual_seed(7)
    prompts = [
        torch.randint(0, model.config.vocab_size, (count,), generator=generator).tolist()
        for count in (length, *OTHERS)
    ]

    def entry(number: int, start: int, count: int, *, logits: int) -> BatchEntry:
        table = range(number * blocks, (number + 1) * blocks)
        return BatchEntry(prompts[number][start : start + count], start, table, logits)

    def last_logits(chunks: tuple[int, ...], others: int) -> torch.Tensor:
        start = 0
        for size in chunks:
            count = min(size, length - start)
            if count < 1:
                break
            mine = entry(0, start, count, logits=1)
            beside = [entry(n + 1, 0, OTHERS[n], logits=1) for n in range(others)]
            logits = model.forward(Batch.build([*beside, mine], layout), cache, DEPTH)
            start += count
        return logits[-1]

    whole = last_logits(CHUNKS[0], 0)
    return all(
        torch.equal(last_logits(chunks, others), whole)
        for chunks in CHUNKS
        for others in (0, len(OTHERS))
    )
