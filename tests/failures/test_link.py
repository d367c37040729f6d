"""A link that is cut, slow, damaged, or between two that do not fit."""

from __future__ import annotations

import signal

import grpc
import pytest

from tasuki.messages import PrefillRequest, PrefillTarget, SamplingParams
from tasuki.server.grpc_server import internal_channel
from tasuki.v1 import worker_pb2_grpc
from tasuki.wire.prefill import prefill_request_to_proto
from tests.failures.struck import CUT, NEXT, PROMPT, SECONDS, Struck
from tests.integration.faults import BLOCK_BYTES, inject
from tests.integration.scrape import scrape
from tests.integration.streams import ask

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]


async def test_cut_for_less_than_the_timeout(struck: Struck) -> None:
    """Nothing goes through until all of the prompt is computed; then it does, and nobody minds."""
    async with struck.slowed(CUT):
        before = await scrape(struck.decode.metrics)
        asked = struck.ask("link cut for a moment")
        await asked.has_tokens()
        after = await scrape(struck.decode.metrics)
        name = "kv_received_bytes_total"
        assert after.total(name) == before.total(name)
    answer = await asked.answer()
    assert answer.token_ids == await struck.expected()
    assert (answer.placement.kind, answer.placement.fallback_reason) == ("split", "")
    assert answer.placement.decode_computed_prompt_tokens == 0


async def test_cut_for_more_than_the_timeout(struck: Struck) -> None:
    async with struck.slowed(CUT):
        answer = await struck.ask("link cut for long").answer()
    assert answer.token_ids == await struck.expected()
    assert answer.placement.fallback_reason in ("stalled", "link_down")
    assert answer.placement.decode_computed_prompt_tokens == len(PROMPT)


async def test_its_data_connection_ends(struck: Struck) -> None:
    async with struck.held("transferring", "data connection lost") as asked:
        await inject(struck.decode, "cut")
        answer = await asked.answer()
    assert answer.token_ids == await struck.expected()
    assert answer.placement.fallback_reason == "link_down"
    assert 0 < answer.placement.decode_computed_prompt_tokens < len(PROMPT)


async def test_slow(struck: Struck) -> None:
    """It takes longer than the timeout, but never stands still for so long."""
    blocks = -(-len(PROMPT) // 16)
    async with struck.slowed(blocks * BLOCK_BYTES / 2):
        answer = await struck.ask("link slow").answer()
    assert answer.token_ids == await struck.expected()
    assert (answer.placement.kind, answer.placement.fallback_reason) == ("split", "")
    assert answer.timings.transfer is not None
    assert answer.timings.transfer > 1.5  # --handoff-timeout


async def test_corrupted_segment(struck: Struck) -> None:
    before = await scrape(struck.decode.metrics)
    async with struck.held("transferring", "segment corrupted") as asked:
        await inject(struck.decode, "corrupt", 1.0)
        answer = await asked.answer()
    assert answer.token_ids == await struck.expected()
    assert answer.placement.fallback_reason == "digest"
    assert 0 < answer.placement.decode_computed_prompt_tokens < len(PROMPT)
    after = await scrape(struck.decode.metrics)
    name = "kv_transfer_failures_total"
    assert after.total(name, reason="digest") == before.total(name, reason="digest") + 1


async def test_wrong_layout(struck: Struck) -> None:
    """The prefill worker comes back with blocks of another size: no link, and no wrong token."""
    await struck.restart(struck.prefill, block_size=32)
    await struck.until(struck.decode, lambda m: m.total("links", state="failed") == 1, "a refusal")
    answer = await ask(struck.client, PROMPT)
    await struck.restart(struck.prefill, block_size=16)
    assert answer.token_ids == await struck.expected()
    assert answer.placement.kind == "local"


async def test_stale_epoch(struck: Struck) -> None:
    """Who still names the engine that died is served here; its calls are refused by the new one."""
    _, old = await struck.target(struck.prefill)
    await struck.signal_engine(struck.prefill, signal.SIGKILL)
    await struck.until(struck.decode, lambda m: m.total("links", state="open") == 0, "no link")
    await struck.cluster.wait_ready()
    _, new = await struck.target(struck.prefill)
    assert new != old
    stale = PrefillTarget(
        worker_id=struck.prefill.worker_id, worker_epoch=old, address=struck.prefill.address
    )
    tokens, local = await struck.ask_decode_worker(PROMPT, [stale])
    assert (tokens, local) == (await struck.expected(), "link_down")
    with pytest.raises(grpc.aio.AioRpcError, match="restarted"):
        await prefill_with(struck, old)


async def prefill_with(struck: Struck, prefill_epoch: int) -> None:
    """Ask the prefill worker as a decode worker does that has missed its restart."""
    request = PrefillRequest(
        request_id="stale",
        handoff_id="0" * 32,
        link_id="0" * 32,
        prefill_epoch=prefill_epoch,
        decode_worker_id=struck.decode.worker_id,
        decode_epoch=(await struck.target(struck.decode))[1],
        prompt_token_ids=NEXT,
        first_block=0,
        sampling=SamplingParams(),
    )
    async with internal_channel(struck.prefill.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        async for _ in stub.Prefill(prefill_request_to_proto(request), timeout=SECONDS):
            pass
