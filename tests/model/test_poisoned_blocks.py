"""The equality tests can fail: a lost or zeroed KV block shows."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch

from tasuki.model.transformer import CausalLM
from tests.model.paged import Paged, Run

PROMPT = 100


@pytest.fixture(scope="module")
def paged(tiny_directory: Path) -> Paged:
    return Paged(CausalLM.load(tiny_directory), 12)


@pytest.fixture(scope="module")
def computed(paged: Paged) -> tuple[Run, torch.Tensor]:
    """A request whose prompt is computed, up to its last token, and the cache it left."""
    generator = torch.Generator().manual_seed(8)
    run = paged.start(torch.randint(0, 256, (PROMPT,), generator=generator).tolist(), 64)
    last = run.tokens.pop()
    paged.prefill(run, itertools.repeat(64))
    run.tokens.append(last)
    run.logits.clear()
    return run, paged.cache.tensor.clone()


def go_on(paged: Paged, computed: tuple[Run, torch.Tensor], count: int) -> Run:
    run = copy.deepcopy(computed[0])
    paged.generate([run], count)
    return run


def test_zeroing_any_block_changes_the_ids(
    paged: Paged, computed: tuple[Run, torch.Tensor]
) -> None:
    run, clean = computed
    paged.cache.tensor.copy_(clean)
    undisturbed = go_on(paged, computed, 64)
    assert len(set(undisturbed.output)) >= 30
    for block_id in run.block_ids[: paged.layout.blocks_for(PROMPT)]:
        paged.cache.tensor.copy_(clean)
        paged.cache.tensor[block_id] = 0
        assert go_on(paged, computed, 64).output != undisturbed.output


def test_zeroing_one_layer_of_any_block_changes_the_logits(
    paged: Paged, computed: tuple[Run, torch.Tensor]
) -> None:
    run, clean = computed
    paged.cache.tensor.copy_(clean)
    undisturbed = go_on(paged, computed, 1)
    for block_id in run.block_ids[: paged.layout.blocks_for(PROMPT)]:
        for layer in range(paged.layout.num_layers):
            paged.cache.tensor.copy_(clean)
            paged.cache.tensor[block_id, layer] = 0
            assert not torch.equal(go_on(paged, computed, 1).logits[0], undisturbed.logits[0])
