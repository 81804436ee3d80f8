"""The decoder that all supported families share: the whole forward pass of a step on one page.

    token_ids [T] -> embedding -> layer 0 -> ... -> layer L-1 -> norm -> hidden [T, hidden_size]
                                     |                 |
                            kv_memory[:, 0]   kv_memory[:, L-1]         hidden [n, .] -> head -> logits [n, V]

A row is one token of one sequence; where it stands and what it attends to is told by `plan`.
Letters of shapes: see `kernels/__init__.py`.
Invariant: there is no state but the weights and the KV memory that the caller passes in; families differ in
data (`ModelConfig`), not in code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from nanoapc.kernels import Kernels
from nanoapc.layers import Layer, declare_parameter
from nanoapc.layers.attention import Attention
from nanoapc.layers.linear import Linear
from nanoapc.layers.mlp import GatedMLP
from nanoapc.layers.norm import RMSNorm
from nanoapc.layers.rotary import cos_sin_table

if TYPE_CHECKING:
    from nanoapc.engine.attention_plan import AttentionPlan
    from nanoapc.models.config import ModelConfig


class DecoderLayer(Layer):
    """Attention and feed-forward, each behind a norm, each added to the residual stream."""

    def __init__(self, config: ModelConfig, kernels: Kernels):
        super().__init__()
        self.self_attn = Attention(config, kernels)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, cos_sin: Tensor, kv_cache: Tensor, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, hidden_size] is what is to be added to `residual` (None: the stream starts here)."""
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, cos_sin, kv_cache, plan)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Decoder(Layer):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, kernels: Kernels):
        super().__init__()
        # nn.Embedding(...) would draw a weight, for which PyTorch imports its compiler: seconds of the start-up.
        self.embed_tokens = nn.Embedding.from_pretrained(declare_parameter(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(DecoderLayer(config, kernels) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)

    def forward(self, token_ids: Tensor, cos_sin: Tensor, kv_memory: Tensor, plan: AttentionPlan) -> Tensor:
        """See CausalLM.forward; cos_sin [max_len, D] float32."""
        hidden, residual = self.embed_tokens(token_ids), None
        for layer, kv_cache in zip(self.layers, kv_memory.unbind(1), strict=True):
            hidden, residual = layer(hidden, residual, cos_sin, kv_cache, plan)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class Variant(NamedTuple):
    """What a family makes of the shared decoder; `sliding_window` in tokens, None for full attention."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None


class CausalLM(Layer):
    """A decoder with a language-model head. Families subclass it to say how their config.json is to be read.

    Args:
        max_len: positions that the rotary table covers, so the longest sequence.
        device: where the rotary table lives; the weights are only declared here, see `models/weights.py`.
    """

    model_type: ClassVar[str] = ""
    """The family's name in config.json, for files that do not name an architecture."""
    config_defaults: ClassVar[Mapping[str, Any]] = {}
    """What transformers takes for keys that config.json lacks (see COMMON_DEFAULTS in models/config.py, too)."""
    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    """Our merged module -> the checkpoint's modules, in the order of their rows."""

    def __init__(self, config: ModelConfig, kernels: Kernels, max_len: int, device: torch.device):
        super().__init__()
        self.config = config
        self.kernels = kernels
        self.cos_sin = cos_sin_table(config.rope, config.head_dim, max_len, device)
        self.model = Decoder(config, kernels)
        self.lm_head = Linear(config.hidden_size, (config.vocab_size,), bias=False)

    @classmethod
    def variant(cls, raw: Mapping[str, Any]) -> Variant:
        """What this family makes of a config.json (defaults filled in); the plain decoder, unless it says more."""
        return Variant()

    def forward(self, token_ids: Tensor, kv_memory: Tensor, plan: AttentionPlan) -> Tensor:
        """One step: computes T tokens, writes their K and V, returns their hidden states.

        Args:
            token_ids: [T] int64.
            kv_memory: [NB, L, 2, Hkv, B, D]; written at `plan.slots`.
            plan: each token's position (below max_len) and slot, and which row attends to what.

        Returns:
            [T, hidden_size] in the model's dtype, after the final norm.
        """
        return self.model(token_ids, self.cos_sin, kv_memory, plan)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] -> logits [n, V] in the model's dtype; only for the rows that are sampled."""
        return self.lm_head(hidden)
