"""TokenEmbedding: the table from token id to vector; a tied output head reads the same table.

Invariant: the table stays a plain tensor [V, hidden_size], never packed, since rows are looked up in it.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from nanoapc.layers import Layer, declare_parameter


class TokenEmbedding(Layer):
    """A row of weight [vocab_size, hidden_size] for each token id."""

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = declare_parameter(vocab_size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, hidden_size]."""
        return F.embedding(token_ids, self.weight)
