"""A causal language model of a Llama-shaped family over a paged KV cache.

Knows nothing about requests, scheduling or sampling. Shapes: T rows of a step, D hidden size, H
query heads, K key/value heads, d head_dim. Every operation treats rows independently and none is
given a single row, so that a row's logits do not depend on the batch, the chunk or the number of
threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tasuki.errors import ModelError
from tasuki.kv.cache import DTYPES, KVCache
from tasuki.kv.layout import KVLayout
from tasuki.model.batch import Batch
from tasuki.model.checkpoint import Checkpoint
from tasuki.model.config import ModelConfig
from tasuki.model.cuda_kernels import CudaKernels
from tasuki.model.device import CPU, machine
from tasuki.model.kernels import HeadWeights, Kernels
from tasuki.model.linear import PLAIN, Linear, probe
from tasuki.model.native_kernels import NativeKernels
from tasuki.model.rotary import RotaryTable
from tasuki.model.torch_kernels import TorchKernels
from tasuki.model.weight_memory import WeightMemory
from tasuki.model.weights import LayerTensors, ModelWeights


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, ready to compute with; those of norms are float32."""

    attention_norm: torch.Tensor
    qkv: Linear
    heads: HeadWeights
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @classmethod
    def pack(
        cls,
        tensors: LayerTensors,
        kind: str,
        dtype: torch.dtype,
        device: torch.device,
        memory: WeightMemory,
    ) -> Layer:
        def linear(weight: torch.Tensor) -> Linear:
            return Linear(weight.to(device), kind=kind, dtype=dtype, memory=memory)

        def small(weight: torch.Tensor) -> torch.Tensor:
            return kept(weight.to(device), dtype)

        def maybe(weight: torch.Tensor | None) -> torch.Tensor | None:
            return None if weight is None else small(weight)

        return cls(
            attention_norm=small(tensors.attention_norm),
            qkv=linear(tensors.qkv),
            heads=HeadWeights(
                qkv_bias=maybe(tensors.qkv_bias),
                q_norm=maybe(tensors.q_norm),
                k_norm=maybe(tensors.k_norm),
            ),
            output=linear(tensors.output),
            mlp_norm=small(tensors.mlp_norm),
            gate_up=linear(tensors.gate_up),
            down=linear(tensors.down),
        )


def kept(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values that `dtype` can hold, as float32."""
    return weight.to(dtype).float()


class CausalLM:
    """One loaded model. Not thread-safe: one step at a time."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        dtype: str,
        native: bool,
        positions: int | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        kind_of = DTYPES[dtype]
        on_cpu = device.type == "cpu"
        self._linear_kind = probe(kind_of, native=native) if on_cpu else PLAIN
        memory = WeightMemory()
        self._embedding = weights.embedding().to(device).to(kind_of)
        self._layers = [
            Layer.pack(tensors, self._linear_kind, kind_of, device, memory)
            for tensors in weights.layers()
        ]
        self._final_norm = kept(weights.final_norm().to(device), kind_of)
        head = weights.head()
        head = self._embedding if head is None else head.to(device)
        self._head = Linear(
            head, kind=self._linear_kind, dtype=kind_of, rows_hint=16, memory=memory
        )
        rotary = RotaryTable(config, positions, device)
        self._kernels = self._choose_kernels(rotary, native)

    def _choose_kernels(self, rotary: RotaryTable, native: bool) -> Kernels:
        if self.device.type != "cpu":
            return CudaKernels(self.config, rotary, self.device)
        return NativeKernels(self.config, rotary) if native else TorchKernels(self.config, rotary)

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        directory: Path,
        *,
        dtype: str = "float32",
        native: bool = False,
        positions: int | None = None,
        device: torch.device = CPU,
    ) -> CausalLM:
        """Read a model directory. Raises ModelError for what is missing, damaged, unsupported.

        With `native` the compiled kernels compute; `tasuki.native.library.load` comes first. Of
        the model's positions only the first `positions` will be used; None: all. On another
        device than a CPU torch's own kernels compute, and `native` must be off.
        """
        if dtype not in DTYPES:
            raise ModelError(f"dtype {dtype!r} is not supported; expected {' or '.join(DTYPES)}")
        config = ModelConfig.from_directory(directory)
        with Checkpoint(directory) as checkpoint:
            weights = ModelWeights(config, checkpoint)
            return cls(
                config, weights, dtype=dtype, native=native, positions=positions, device=device
            )

    def layout(self, block_size: int) -> KVLayout:
        """The shape of this model's KV. Raises ConfigError for an impossible block size."""
        return self.config.kv_layout(
            block_size, self.dtype, keys_transposed=self._kernels.keys_transposed
        )

    def facts(self) -> dict[str, str]:
        """What computes here, for people."""
        return {
            "device": machine(self.device),
            "linears": self._linear_kind,
            "attention": self._kernels.kind,
            "dtype": self.dtype,
        }

    def numerics(self) -> str:
        """Workers with the same one give the same bits."""
        kinds = f"{self._linear_kind}/{self._kernels.kind}"
        return f"{machine(self.device)}/{self.dtype}/{kinds}"

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache, depth: int | None = None) -> torch.Tensor:
        """Compute a step: writes KV of its tokens, returns float32 [rows whose logits are wanted,
        vocab_size] in host memory, in the order of entries.

        The blocks that the batch names belong to the caller, and nothing else is written. With
        `depth` only so many layers are computed. When this returns, the device has finished: the
        KV is complete, and may be announced to another worker.
        """
        logits = self._forward(batch, kv, depth)
        if self.device.type == "cpu":
            return logits
        # A step without samples copies nothing back, and would return before its KV is written. An
        # event of this step alone is waited for: other streams carry the transfers of other steps.
        # (torch does not annotate `Event`)
        finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
        finished.record(torch.cuda.current_stream(self.device))
        finished.synchronize()
        return logits.cpu()

    def _forward(self, batch: Batch, kv: KVCache, depth: int | None) -> torch.Tensor:
        layers = self._layers[:depth]
        kernels = self._kernels
        step = kernels.begin(batch, kv)
        x_TD = self._embedding.index_select(0, batch.token_ids.to(self.device))
        normal = kernels.norm(x_TD, layers[0].attention_norm)
        for number, layer in enumerate(layers):
            mixed = step.attend(number, layer.qkv(normal), layer.heads)
            normal = kernels.add_norm(x_TD, layer.output(mixed), layer.mlp_norm)
            delta = layer.down(kernels.gated(layer.gate_up(normal)))
            if number + 1 < len(layers):
                normal = kernels.add_norm(x_TD, delta, layers[number + 1].attention_norm)
        if not batch.num_samples:
            return x_TD.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        rows = batch.sample_rows.to(self.device)
        wanted = [t.index_select(0, rows) for t in (x_TD, delta)]
        normal = kernels.add_norm(wanted[0], wanted[1], self._final_norm)
        return self._head(normal)[: batch.num_samples].float()
