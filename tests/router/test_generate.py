"""Generate end to end over real gRPC: tokens, text, facts on the last message, and every count."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import xxhash

from router.served_model import ServedModel
from tasuki.messages import (
    DecodeRequest,
    DispatchedEvent,
    FallbackEvent,
    FinishReason,
    FirstTokenParts,
    HandoffTimings,
)
from tasuki.v1 import common_pb2, inference_pb2
from tasuki.wire.decode import WireDecodeEvent
from tests.router.conftest import MakeHarness, harness_of
from tests.router.fake_worker import MODEL_ID, Script, finished, place_event, tokens, wait_until

PROMPT = list(range(100))


async def test_tokens_text_and_the_end(harness: MakeHarness) -> None:
    async with harness() as h:
        outputs = await h.outputs(request_id="r", text="hello", max_tokens=4)
        assert [list(o.token_ids) for o in outputs] == [[65], [66], [67], [68], []]
        assert [o.index for o in outputs] == [0, 1, 2, 3, 4]
        assert "".join(o.text for o in outputs) == "ABCD"
        assert {o.request_id for o in outputs} == {"r"}
        assert [len(o.token_offsets) for o in outputs] == [1, 1, 1, 1, 0]
        assert not any(o.finish_reason for o in outputs[:-1])
        last = outputs[-1]
        assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 4)
        assert (last.placement.kind, last.placement.reason) == ("local", "no_prefill_worker")
        assert last.placement.decode_worker_id == "d0"
        assert last.placement.decode_computed_prompt_tokens == 5
        assert last.timings.slo_result == "met"
        [request] = h.decodes[0].decodes
        assert request.prompt_token_ids == list(b"hello")
        assert request.sampling.seed == xxhash.xxh3_64_intdigest(b"r")
        assert request.timeout == pytest.approx(10, abs=1)
        assert h.decodes[0].cancelled == 0  # a stream that ended well is not cancelled


async def test_a_request_without_a_deadline_gets_the_default(harness: MakeHarness) -> None:
    async with harness(request_timeout=33.0, max_request_timeout=44.0) as h:
        await h.outputs(text="x", max_tokens=1, timeout=None)
        await h.outputs(text="x", max_tokens=1, timeout=1000.0)
        timeouts = [request.timeout for request in h.decodes[0].decodes]
        assert timeouts == [pytest.approx(33, abs=1), pytest.approx(44, abs=1)]


async def test_tokens_that_came_together_leave_together_and_text_waits_until_certain(
    harness: MakeHarness,
) -> None:
    smile = list("é😀".encode())  # 2 + 4 bytes

    async def script(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield place_event(request)
        yield tokens(0, *smile[:3])
        yield tokens(3, *smile[3:])
        yield finished(request, 6, FinishReason.STOP)

    async with harness() as h:
        h.decodes[0].script = script
        outputs = await h.outputs(text="x", max_tokens=6)
        assert [len(o.token_ids) for o in outputs] == [3, 3, 0]
        assert [o.text for o in outputs] == ["é", "😀", ""]
        assert h.metric("inter_token_latency_seconds_count") == 5


async def test_messages_use_the_template_and_ids_go_as_they_are(harness: MakeHarness) -> None:
    async with harness() as h:
        await h.outputs(messages=[("system", "be"), ("user", "hi")], max_tokens=1)
        await h.outputs(token_ids=[299, 0, 7], max_tokens=1, seed=5, temperature=0.5)
        rendered, ids = (request for request in h.decodes[0].decodes)
        assert bytes(rendered.prompt_token_ids) == b"system:be;user:hi;"
        assert ids.prompt_token_ids == [299, 0, 7]
        assert (ids.sampling.seed, ids.sampling.temperature) == (5, 0.5)


async def test_long_text_is_tokenized_beside_the_event_loop(harness: MakeHarness) -> None:
    async with harness() as h:
        assert "30000 tokens" in await h.words(text="y" * 30_000)


async def test_a_split_request_and_all_of_its_facts(harness: MakeHarness) -> None:
    parts = FirstTokenParts(reservation=1e-6, prefill_queue=2e-6, prefill_compute=3e-6)
    handoff = HandoffTimings(
        transfer=0.25, exposed_transfer=0.125, commit_wait=0.5, first_decode=1.0, nbytes=4096,
        blocks=7,
    )  # fmt: skip

    async def script(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield place_event(request)
        yield tokens(0, 65, parts=parts)
        yield tokens(1, 66)
        yield finished(request, 2, handoff=handoff, cached_tokens=3)

    async with harness(prefill=1) as h:
        h.decodes[0].script = script
        last = (await h.outputs(token_ids=PROMPT, max_tokens=2))[-1]
        [request] = h.decodes[0].decodes
        [candidate] = request.prefill_candidates
        assert (candidate.worker_id, candidate.worker_epoch) == ("p0", 11)
        assert candidate.address == h.prefills[0].address
        assert request.local_reason == ""
        place, timings = last.placement, last.timings
        assert (place.kind, place.reason) == ("split", "prefill_available")
        assert (place.prefill_worker_id, place.decode_computed_prompt_tokens) == ("p0", 0)
        assert (timings.transfer_bytes, timings.transfer_blocks) == (4096, 7)
        assert (timings.transfer, timings.exposed_transfer) == (0.25, 0.125)
        assert (timings.commit_wait, timings.first_decode) == (0.5, 1.0)
        assert last.usage.cached_tokens == 3
        named = [timings.queue, timings.reservation, timings.prefill_queue]
        named += [timings.prefill_compute, timings.fallback, timings.hop]
        assert sum(named) == pytest.approx(timings.ttft, abs=1e-9)
        assert min(named) >= 0
        assert timings.e2e >= timings.ttft
        assert timings.tpot == pytest.approx(timings.e2e - timings.ttft)
        assert h.metric("placements_total", kind="split", reason="prefill_available") == 1


async def test_a_fallback_is_told_and_counted_once(harness: MakeHarness) -> None:
    async def script(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield DispatchedEvent(prefill_worker_id="p0")
        yield FallbackEvent(reason="prefill_died", kept_tokens=16)
        yield tokens(0, 65)
        yield finished(request, 1, computed_prompt_tokens=84)

    async with harness(prefill=1) as h:
        h.decodes[0].script = script
        last = (await h.outputs(token_ids=PROMPT, max_tokens=1))[-1]
        assert last.placement.fallback_reason == "prefill_died"
        assert last.placement.kind == "local"  # where the prompt was computed in the end
        assert last.placement.prefill_worker_id == "p0"  # who did not deliver
        assert last.placement.decode_computed_prompt_tokens == 84
        assert h.metric("fallbacks_total", reason="prefill_died") == 1
        assert h.total("placements_total") == 1
        assert h.metric("placements_total", kind="split", reason="prefill_available") == 1


async def test_local_reasons_reach_worker_client_and_metrics(harness: MakeHarness) -> None:
    async with harness(prefill=1, linked=False) as h:
        short = (await h.outputs(token_ids=PROMPT[:10], max_tokens=1))[-1]
        down = (await h.outputs(token_ids=PROMPT, max_tokens=1))[-1]
        assert (short.placement.reason, down.placement.reason) == ("short_prompt", "link_down")
        await h.decodes[0].link_to(*h.prefills)
        await h.decodes[0].report(prefill_tokens_per_second=1000.0)
        await h.prefills[0].report(prefill_tokens_per_second=1000.0, queued_tokens=9000)
        snapshots = h.router.registry.snapshots
        await wait_until(lambda: any(w.reported_tokens == 9000 for w in snapshots()), "the queue")
        await wait_until(lambda: any(w.open_links for w in snapshots()), "the link")
        busy = (await h.outputs(token_ids=PROMPT, max_tokens=1))[-1]
        assert busy.placement.reason == "prefill_busy"
        assert [r.local_reason for r in h.decodes[0].decodes] == [
            "short_prompt", "link_down", "prefill_busy",
        ]  # fmt: skip
        for reason in ("short_prompt", "link_down", "prefill_busy"):
            assert h.metric("placements_total", kind="local", reason=reason) == 1


async def test_every_request_is_counted_once_and_parts_sum_to_ttft(harness: MakeHarness) -> None:
    async with harness(prefill=1, decode=2) as h:
        asked = [h.outputs(token_ids=PROMPT[: 1 + n * 20], max_tokens=3) for n in range(5)]
        asked.append(h.outputs(token_ids=PROMPT, max_tokens=3, ttft_ms=1e-6))
        asked.append(h.outputs(token_ids=PROMPT, max_tokens=3, tpot_ms=1e-9))
        asked.append(h.outputs(token_ids=PROMPT, max_tokens=1, tpot_ms=1e-9))
        results = [o[-1].timings.slo_result for o in await asyncio.gather(*asked)]
        assert results == [*["met"] * 5, "ttft_miss", "tpot_miss", "met"]
        await h.error(token_ids=[], max_tokens=1)
        await h.error(token_ids=PROMPT, model="other")
        assert h.metric("requests_total", outcome="completed") == 8
        assert h.metric("requests_total", outcome="rejected") == 2
        assert h.total("requests_total") == 10
        assert h.total("slo_requests_total") == 10
        assert h.metric("slo_requests_total", result="met", setup="split") == 6
        assert h.metric("slo_requests_total", result="rejected", setup="split") == 2
        assert h.metric("rejections_total", reason="invalid") == 2
        assert h.total("placements_total") == 8
        assert h.total("ttft_seconds_count") == 8
        assert h.total("ttft_part_seconds_count") == 8 * 6
        assert h.total("ttft_part_seconds_sum") == pytest.approx(h.total("ttft_seconds_sum"))
        assert h.total("negative_hop_total") == 0
        assert h.metric("queue_seconds_count") == 8
        queue = h.metric("ttft_part_seconds_sum", part="queue")
        assert h.metric("queue_seconds_sum") == pytest.approx(queue)
        assert h.metric("tpot_seconds_count") == 7
        assert h.metric("inter_token_latency_seconds_count") == 7 * 2
        assert h.metric("e2e_seconds_count") == 8
        assert h.total("slo_misses_total") == 2
        assert h.metric("slo_misses_total", blamed="decode") == 1


async def test_parts_that_claim_more_than_passed_are_counted_as_a_bug(harness: MakeHarness) -> None:
    async def script(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield place_event(request)
        yield tokens(0, 65, parts=FirstTokenParts(prefill_compute=1000.0))
        yield finished(request, 1)

    async with harness() as h:
        h.decodes[0].script = script
        last = (await h.outputs(text="x", max_tokens=1))[-1]
        assert last.timings.hop < -999
        assert h.total("negative_hop_total") == 1


async def test_model_info_and_server_info(harness: MakeHarness) -> None:
    async with harness(prefill=1, decode=1) as h:
        await wait_until(lambda: "p0->d0" in h.router.registry.facts()["links"], "the link")
        model = await h.stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=5)
        assert (model.model, model.max_model_len) == (MODEL_ID, 2048)  # 128 blocks of 16
        assert (model.vocab_size, model.has_chat_template, model.setup) == (300, True, "split")
        facts = h.router.describe().facts
        assert '"worker_id": "d0"' in facts["workers"]
        assert facts["links"] == '["p0->d0"]'
        assert facts["ready"] == "true"
        assert (facts["setup"], h.router.describe().role) == ("split", common_pb2.ROLE_ROUTER)


def misbehave(*events: WireDecodeEvent) -> Script:
    async def script(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield place_event(request)
        for event in events:
            yield event

    return script


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((tokens(1, 65),), "1 tokens from index 1; expected at least one from index 0"),
        ((tokens(0, 65), tokens(0, 65)), "from index 0; expected at least one from index 1"),
        ((tokens(0, 65, 66, 67, 68),), "more than 3 tokens"),
        ((tokens(0, 65),), "ended the stream before the request was finished"),
    ],
)
async def test_a_client_never_sees_a_token_twice_or_out_of_order(
    harness: MakeHarness, events: tuple[WireDecodeEvent, ...], words: str
) -> None:
    async with harness(max_migrations=0) as h:
        h.decodes[0].script = misbehave(*events)
        error = await h.error(text="x", max_tokens=3)
        assert words in (error.details() or "")
        assert error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
        assert h.metric("requests_total", outcome="failed") == 1
        assert h.total("slo_requests_total") == 1


async def test_priority_and_cache_salt_reach_the_worker(harness: MakeHarness) -> None:
    async with harness() as h:
        await h.outputs(text="x", max_tokens=1, priority=-3, cache_salt="tenant")
        await h.outputs(text="x", max_tokens=1)
        asked = [(request.priority, request.cache_salt) for request in h.decodes[0].decodes]
        assert asked == [(-3, "tenant"), (0, "")]


async def test_the_models_recommendation_counts_where_a_request_says_nothing(
    model_directory: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(model_directory, tmp_path / MODEL_ID)
    recommended = {"do_sample": True, "temperature": 0.5, "top_k": 7}
    (directory / "generation_config.json").write_text(json.dumps(recommended))
    model = ServedModel.from_directory(str(directory))
    async with harness_of(model)() as h:
        await h.outputs(text="x", max_tokens=1)
        await h.outputs(text="x", max_tokens=1, temperature=0.0, top_k=3)
        asked = [(d.sampling.temperature, d.sampling.top_k) for d in h.decodes[0].decodes]
        assert asked == [(0.5, 7), (0.0, 3)]
    plain = ServedModel.from_directory(str(directory), recommended=False)
    assert plain.sampling.temperature == 0
