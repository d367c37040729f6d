"""What is announced is complete, and what is polled has ended: both by events, never by luck."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tasuki.convert.random_llama import RandomLlama, make_random_llama
from tasuki.kv.cache import KVCache
from tasuki.kv.layout import KVLayout
from tasuki.model.batch import Batch, BatchEntry
from tasuki.model.transformer import CausalLM
from tasuki.transfer.connectors.nccl_pair import EventFlight, make_stream

pytestmark = pytest.mark.gpu

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16)
CYCLES = 500_000_000  # some tenths of a second


def busy(cycles: int = CYCLES) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call] # a kernel that only takes time


def test_a_step_without_samples_has_written_its_kv_when_it_returns(
    gpu: torch.device, tmp_path: Path
) -> None:
    make_random_llama(tmp_path, RandomLlama(), seed=1)
    model = CausalLM.load(tmp_path, device=gpu)
    layout = model.layout(16)
    cache = KVCache(layout, 8, str(gpu))
    batch = Batch.build([BatchEntry([*range(2, 34)], 0, [3, 5], 0)], layout)
    model.forward(batch, cache)  # everything is loaded
    cache.clear()
    busy()
    model.forward(batch, cache)
    at_once = torch.empty(2 * layout.block_bytes, dtype=torch.uint8, pin_memory=True)
    cache.read_blocks([3, 5], at_once)  # on another stream, which nothing orders behind the step
    torch.cuda.synchronize(gpu)
    assert at_once.any()
    later = torch.empty_like(at_once)
    cache.read_blocks([3, 5], later)
    assert torch.equal(at_once, later)


def test_copies_of_transfers_do_not_wait_for_a_step(gpu: torch.device) -> None:
    cache = KVCache(LAYOUT, 8, str(gpu))
    cache.tensor.fill_(1.0)
    torch.cuda.synchronize(gpu)
    into = torch.empty(2 * LAYOUT.block_bytes, dtype=torch.uint8, pin_memory=True)
    step = torch.cuda.Event()  # type: ignore[no-untyped-call]
    busy()
    step.record()
    cache.read_blocks([1, 6], into)
    cache.write_blocks([2, 3], into)
    cache.zero_tail(2, 5)
    ended = step.query()  # type: ignore[no-untyped-call]
    assert not ended, "the copies took longer than the step, or waited for it"
    assert (into.view(torch.float32) == 1.0).all()
    torch.cuda.synchronize(gpu)
    assert not cache.tensor[2][..., 5:, :].any()
    assert torch.equal(cache.tensor[3], cache.tensor[1])


def test_a_flight_has_ended_when_its_kernel_has(gpu: torch.device) -> None:
    stream = make_stream(gpu)
    with torch.cuda.stream(stream):
        busy()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
    flight = EventFlight(event, None)
    begin = time.perf_counter()
    assert not flight.has_ended()
    assert time.perf_counter() - begin < 0.05, "asking waited"
    deadline = time.monotonic() + 20
    while not flight.has_ended():
        assert time.monotonic() < deadline
        time.sleep(0.001)
