"""A small GPT over bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class GptShape:
    """How large the model is."""

    num_layers: int = 3
    num_heads: int = 4
    width: int = 128
    context: int = 128
    num_bytes: int = 256
    dropout: float = 0.0
    """Which values are dropped depends on each worker's random state, so on how many workers there are."""


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.feed_forward_norm = nn.LayerNorm(shape.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        projected = self.query_key_value(self.attention_norm(hidden))
        query, key, value = projected.view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.attention_out(attended.transpose(1, 2).reshape(batch, length, width)))
        return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))


class Gpt(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(shape.num_bytes, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.num_bytes, bias=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of the next bytes, in nats."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.byte_embedding(inputs) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden)
        scores = self.head(self.norm(hidden))
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
