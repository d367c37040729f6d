"""A router between real gRPC on both sides and fake workers, on a byte tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from router.config import RouterConfig
from router.process import Router
from router.served_model import ServedModel
from tasuki.messages import Role
from tasuki.server.grpc_server import internal_channel
from tasuki.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.router.fake_worker import MODEL_ID, FakeWorker, wait_until

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,  # 256 bytes, and ids that are only ever ids
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a router reads of a model: a byte tokenizer, a chat template, sizes. No weights."""
    directory: Path = tmp_path_factory.mktemp("models") / MODEL_ID
    directory.mkdir()
    # ByteLevel writes a printable byte as itself, and the n-th of the others as code point 256 + n
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    printable = [c for c in range(256) if chr(c) in alphabet]
    others = [c for c in range(256) if c not in printable]
    vocabulary = {chr(c): c for c in printable}
    vocabulary |= {chr(256 + n): c for n, c in enumerate(others)}
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture(scope="session")
def model(model_directory: Path) -> ServedModel:
    return ServedModel.from_directory(str(model_directory))


@dataclass
class Harness:
    """One running router, its workers, and a client's stub."""

    router: Router
    prefills: list[FakeWorker]
    decodes: list[FakeWorker]
    stub: Any  # the generated stub's async form is not importable at run time

    def generate(self, timeout: float | None = 10.0, **fields: Any) -> Any:
        """Open a Generate call. `token_ids`, `max_tokens`, ... go where they belong."""
        request = inference_pb2.GenerateRequest(outputs=fields.pop("outputs", None))
        ids = fields.pop("token_ids", None)
        messages = fields.pop("messages", None)
        if ids is not None:
            request.token_ids.ids.extend(ids)
        if messages is not None:
            request.messages.SetInParent()
            for role, content in messages:
                request.messages.messages.add(role=role, content=content)
        names = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
        sampling = {name: fields.pop(name) for name in names if name in fields}
        request.sampling.MergeFrom(common_pb2.SamplingParams(**sampling))
        for name in ("ttft_ms", "tpot_ms"):
            if name in fields:
                setattr(request.slo, name, fields.pop(name))
        for name, value in fields.items():
            setattr(request, name, value)
        return self.stub.Generate(request, timeout=timeout)

    async def outputs(self, **fields: Any) -> list[inference_pb2.GenerateResponse]:
        """All messages of one request."""
        async with asyncio.timeout(15):
            return [message async for message in self.generate(**fields)]

    async def resume(
        self, has: list[inference_pb2.SampleOutput], **fields: Any
    ) -> list[inference_pb2.GenerateResponse]:
        """All messages of one request that another router began."""
        return await self.outputs(outputs=has, **fields)

    async def error(self, **fields: Any) -> grpc.aio.AioRpcError:
        """The error that one request ends with."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.outputs(**fields)
        return caught.value

    async def words(self, **fields: Any) -> str:
        """The details of that error."""
        return (await self.error(**fields)).details() or ""

    def metric(self, name: str, **labels: str) -> float:
        value = self.router.metrics.registry.get_sample_value(f"tasuki_{name}", labels)
        assert value is not None, f"no metric {name} {labels}"
        return value

    def total(self, name: str) -> float:
        """Sum of one family over all of its labels."""
        samples = [s for f in self.router.metrics.registry.collect() for s in f.samples]
        return sum(s.value for s in samples if s.name == f"tasuki_{name}")

    def check_nothing_left(self) -> None:
        """No charge, no queue entry, no stream is left."""
        assert len(self.router.placer.queue) == 0
        for worker in (*self.prefills, *self.decodes):
            watched = self.router.registry.worker(worker.address)
            assert not watched.outstanding
            for ledger in watched.ledgers.all():
                ledger.check_integrity()
                assert ledger.is_empty
            assert worker.running == 0


MakeHarness = Callable[..., AbstractAsyncContextManager[Harness]]


@pytest.fixture
def harness(model: ServedModel) -> MakeHarness:
    """`async with harness(prefill=1, decode=2, max_queue=3) as h`: ready when entered."""
    return harness_of(model)


def harness_of(model: ServedModel) -> MakeHarness:
    @asynccontextmanager
    async def make(
        prefill: int = 0, decode: int = 1, linked: bool = True, **settings: Any
    ) -> AsyncIterator[Harness]:
        prefills = [FakeWorker(Role.PREFILL, f"p{n}") for n in range(prefill)]
        decodes = [FakeWorker(Role.DECODE, f"d{n}") for n in range(decode)]
        workers = [*prefills, *decodes]
        for worker in workers:
            await worker.start()
        if linked:
            for worker in decodes:
                await worker.link_to(*prefills)
        config = RouterConfig(
            prefill_workers=",".join(worker.address for worker in prefills),
            decode_workers=",".join(worker.address for worker in decodes),
            **settings,
        )
        router = Router(config, model)
        await router.start()
        channel = internal_channel(router.grpc.address)
        made = Harness(router, prefills, decodes, inference_pb2_grpc.InferenceStub(channel))
        try:
            await wait_until(
                lambda: all(w.live for w in router.registry.snapshots()),
                "every worker is seen",
            )
            yield made
            await wait_until(
                lambda: (
                    not any(
                        worker.running or router.registry.worker(worker.address).outstanding
                        for worker in workers
                    )
                ),
                "every charge is returned, and every worker idle",
            )
            made.check_nothing_left()
        finally:
            await channel.close()
            await router.stop(grace=0.0)
            for worker in workers:
                await worker.stop()

    return make
