"""A small Llama with random weights, and its KV as the blocks of a cache hold it."""

from __future__ import annotations

import numpy as np
import torch
from generating import BLOCK_SIZE
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from workload import VOCABULARY

CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, max_position_embeddings=2048,
)  # fmt: skip
BLOCK_SHAPE = (CONFIG.num_hidden_layers, 2, CONFIG.num_key_value_heads, BLOCK_SIZE, CONFIG.head_dim)
"""Of one block: layers, keys and values, heads, tokens, elements."""


def load() -> LlamaForCausalLM:
    """The model, the same in each process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def past_of(blocks: np.ndarray) -> DynamicCache:
    """What the model goes on from: the KV of whole blocks, float32[n, *BLOCK_SHAPE]."""
    past = DynamicCache(config=CONFIG)
    layers, two, heads, _, elements = BLOCK_SHAPE
    tokens = len(blocks) * BLOCK_SIZE
    kv = torch.from_numpy(blocks).permute(1, 2, 3, 0, 4, 5).reshape(layers, two, heads, tokens, elements)
    for layer, (keys, values) in enumerate(kv):
        past.update(keys[None], values[None], layer)
    return past


def blocks_of(past: DynamicCache, first: int, last: int) -> np.ndarray:
    """The KV of blocks `first` to `last` - 1 of what the model has seen, float32[n, *BLOCK_SHAPE]."""
    tokens = slice(first * BLOCK_SIZE, last * BLOCK_SIZE)
    kv = torch.stack([torch.stack([layer.keys[0, :, tokens], layer.values[0, :, tokens]]) for layer in past.layers])
    layers, two, heads, _, elements = BLOCK_SHAPE
    kv = kv.reshape(layers, two, heads, last - first, BLOCK_SIZE, elements)
    return kv.permute(3, 0, 1, 2, 4, 5).contiguous().numpy()
