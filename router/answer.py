"""What a client reads: the messages of one Generate stream, built from what is known of a request.

Keeps the facts that the last message reports. Knows nothing about workers' streams or metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.answer_text import AnswerText
from router.generation import Generation
from router.placement import Placement
from tasuki.messages import (
    FallbackEvent,
    FinishedEvent,
    FinishReason,
    HandoffTimings,
    TokensEvent,
)
from tasuki.slo import SloResult
from tasuki.text.tokenizer import Tokenizer
from tasuki.timeline import Timeline
from tasuki.v1 import common_pb2, inference_pb2
from tasuki.wire.sampling import logprobs_to_proto
from tasuki.wire.values import finish_reason_to_proto


@dataclass(eq=False)
class PromptPlace:
    """Where a prompt was computed, as the decode worker told it."""

    decode_worker_id: str
    kind: str
    reason: str
    prefill_worker_id: str = ""
    fallback_reason: str = ""

    @classmethod
    def planned(cls, placement: Placement) -> PromptPlace:
        return cls(placement.decode.worker_id, placement.kind, placement.reason)

    def dispatched(self, prefill_worker_id: str) -> None:
        self.kind = "split"
        self.prefill_worker_id = prefill_worker_id

    def local(self, reason: str) -> None:
        self.kind, self.reason, self.prefill_worker_id = "local", reason, ""

    def fell_back(self, event: FallbackEvent) -> None:
        """The prefill worker stays named: it is the one that did not deliver."""
        self.kind, self.fallback_reason = "local", event.reason

    def to_proto(self, computed_prompt_tokens: int) -> inference_pb2.PlacementInfo:
        return inference_pb2.PlacementInfo(
            kind=self.kind,
            reason=self.reason,
            decode_worker_id=self.decode_worker_id,
            prefill_worker_id=self.prefill_worker_id,
            fallback_reason=self.fallback_reason,
            decode_computed_prompt_tokens=computed_prompt_tokens,
        )


class Answer:
    """Deltas of one request: each message holds what became known of one sample since the one
    before. A sample is open until its end was made.
    """

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self._generation = generation
        samples = range(generation.sampling.n)
        self.token_ids: dict[int, list[int]] = {index: [] for index in samples}  # by sample
        self._texts = {
            index: AnswerText(tokenizer, generation)
            for index in samples
            if index not in generation.ended
        }
        for index, token_ids in generation.outputs.items():
            self.token_ids[index] += token_ids
            if index in self._texts:
                self._texts[index].push(token_ids)  # its text was told before
        self._cached_tokens = 0
        self._computed_prompt_tokens = 0
        self._handoff = HandoffTimings()
        self.missed_deadline = False  # of any sample
        self.moved = False  # it goes on where its prompt was not first computed

    def is_open(self, sample_index: int) -> bool:
        return sample_index in self._texts

    @property
    def is_over(self) -> bool:
        return not self._texts

    @property
    def open_samples(self) -> list[int]:
        return list(self._texts)

    @property
    def has_tokens(self) -> bool:
        """Whether any of them, told by this router or by one before."""
        return any(self.token_ids.values())

    def num_tokens(self, sample_index: int | None) -> int:
        """Of one sample; None: of all."""
        if sample_index is not None:
            return len(self.token_ids[sample_index])
        return sum(map(len, self.token_ids.values()))

    def delta(self, event: TokensEvent) -> inference_pb2.GenerateResponse:
        """The tokens up to the one that completed a stop string, if one did."""
        if event.index == 0 and event.sample_index == 0:
            self._cached_tokens = event.cached_tokens
            self._computed_prompt_tokens = event.computed_prompt_tokens
        answer_text = self._texts[event.sample_index]
        text = answer_text.push(event.token_ids)
        count = answer_text.num_tokens - event.index
        self.token_ids[event.sample_index] += event.token_ids[:count]
        return inference_pb2.GenerateResponse(
            request_id=self._generation.request_id,
            sample_index=event.sample_index,
            index=event.index,
            token_ids=event.token_ids[:count],
            text=text,
            token_offsets=event.offsets[:count],
            logprobs=logprobs_to_proto(event.logprobs[:count]),
            prompt_logprobs=logprobs_to_proto(event.prompt_logprobs),
        )

    def stopped(self, sample_index: int) -> FinishedEvent | None:
        """The end that a stop string makes, before the worker knows of it.

        What a worker tells only with its own end is left at zero: the pieces of the transfer.
        """
        text = self._texts[sample_index]
        if text.stop is None:
            return None
        return FinishedEvent(
            finish_reason=FinishReason.STOP,
            prompt_tokens=self._generation.prompt_len,
            output_tokens=text.num_tokens,
            cached_tokens=self._cached_tokens,
            computed_prompt_tokens=self._computed_prompt_tokens,
            handoff=self._handoff,
            sample_index=sample_index,
        )

    def end(self, event: FinishedEvent) -> inference_pb2.GenerateResponse:
        """The end of a sample: no tokens, and what text was still uncertain."""
        answer_text = self._texts.pop(event.sample_index)
        self._handoff, self._computed_prompt_tokens = event.handoff, event.computed_prompt_tokens
        cached = self._cached_tokens if self.moved else event.cached_tokens
        self.missed_deadline |= event.finish_reason is FinishReason.DEADLINE
        text = answer_text.finish()
        response = inference_pb2.GenerateResponse(
            request_id=self._generation.request_id,
            sample_index=event.sample_index,
            index=event.output_tokens,
            text=text,
            finish_reason=finish_reason_to_proto(event.finish_reason),
            usage=common_pb2.Usage(
                prompt_tokens=event.prompt_tokens,
                completion_tokens=event.output_tokens,
                cached_tokens=cached,
            ),
        )
        if answer_text.stop is not None:  # perhaps only now, with the last of the text
            response.finish_reason = common_pb2.FINISH_REASON_STOP
            response.stop_string = answer_text.stop
        elif event.stop_token_id is not None:
            response.stop_token_id = event.stop_token_id
        return response

    def add_facts(
        self,
        last: inference_pb2.GenerateResponse,
        place: PromptPlace,
        timeline: Timeline,
        slo_result: SloResult,
    ) -> None:
        """Put what is known of the whole request into the last message."""
        last.timings.CopyFrom(timings_to_proto(timeline, self._handoff, slo_result))
        last.placement.CopyFrom(place.to_proto(self._computed_prompt_tokens))


def timings_to_proto(
    timeline: Timeline, handoff: HandoffTimings, slo_result: SloResult
) -> inference_pb2.Timings:
    """Zeros for what did not happen: no token, no handoff."""
    parts = timeline.parts()
    return inference_pb2.Timings(
        ttft=timeline.ttft or 0.0,
        tpot=timeline.tpot or 0.0,
        e2e=timeline.e2e or 0.0,
        **({} if parts is None else parts.as_dict()),
        transfer=handoff.transfer,
        exposed_transfer=handoff.exposed_transfer,
        commit_wait=handoff.commit_wait,
        first_decode=handoff.first_decode,
        transfer_bytes=handoff.nbytes,
        transfer_blocks=handoff.blocks,
        slo_result=slo_result,
    )
