"""A GPU computes what a CPU computes, within tolerance, and its step has ended when it returns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasuki.config import WorkerConfig
from tasuki.convert.random_llama import make_random_llama
from tasuki.convert.tiny import make_tiny
from tasuki.engine.engine import Engine
from tasuki.messages import SamplingParams
from tasuki.model.transformer import CausalLM
from tasuki.request import Request
from tests.model.test_cuda_kernels import SHAPES, run_all

pytestmark = pytest.mark.gpu

TOLERANCE = {"float32": 2e-3, "bfloat16": 0.5}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_a_cpu(
    gpu: torch.device, shape: str, dtype: str, tmp_path: Path
) -> None:
    make_random_llama(tmp_path, SHAPES[shape], seed=4)
    expected = run_all(CausalLM.load(tmp_path, dtype=dtype))
    model = CausalLM.load(tmp_path, dtype=dtype, device=gpu)
    assert model.facts()["attention"] == "cuda-sdpa"
    assert model.numerics().startswith(f"cuda/{torch.cuda.get_device_name(gpu)}/{dtype}/torch/")
    worst = 0.0
    for mine, other in zip(run_all(model), expected, strict=True):
        for found, wanted in zip(mine.logits, other.logits, strict=True):
            worst = max(worst, float((found - wanted).abs().max()))
    print(f"largest difference of a logit: {worst:.2e}")
    assert worst < TOLERANCE[dtype]


def answer(model: Path, device: str, sampling: SamplingParams) -> Request:
    config = WorkerConfig(
        model=str(model), native=False, device=device, kv_blocks=60, connector="gloo"
    )
    engine = Engine.load(config)
    engine.warm_up()
    request = Request(1, "gpu", [*range(40, 140)], sampling, frozenset(), 0.0)
    engine.add(request)
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    return request


def test_an_engine_answers_with_every_kind_of_sampling(gpu: torch.device, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny")
    greedy = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    assert len(answer(model, "cuda", greedy).output_token_ids) == 8
    drawn = SamplingParams(
        max_tokens=8, ignore_eos=True, temperature=0.8, top_p=0.9, top_k=40, seed=3,
        repetition_penalty=1.2, logit_bias={7: 1.0},
    )  # fmt: skip
    first, again = (answer(model, "cuda", drawn).output_token_ids for _ in range(2))
    assert len(first) == 8
    assert first == again
