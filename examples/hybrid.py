"""A small hybrid model with random weights: three gated delta nets to an attention layer, as Qwen3.5 has them.

Attention layers have KV, one row for each token, which goes to blocks. A gated delta net has a state, of one size
however many tokens it has seen, which is good for going on from exactly there: that goes to a snapshot's slot.
"""

from __future__ import annotations

import numpy as np
import torch
from generating import BLOCK_SIZE
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig, logging
from workload import VOCABULARY

logging.set_verbosity_error()  # it would say that its layers' kernels for GPUs are missing, which is meant here

CONFIG = Qwen3_5TextConfig(
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=32,
    linear_value_head_dim=32, max_position_embeddings=2048,
)  # fmt: skip
ATTENTION = [layer for layer, kind in enumerate(CONFIG.layer_types) if kind == "full_attention"]
RECURRENT = [layer for layer in range(CONFIG.num_hidden_layers) if layer not in ATTENTION]
BLOCK_SHAPE = (len(ATTENTION), 2, CONFIG.num_key_value_heads, BLOCK_SIZE, CONFIG.head_dim)
"""Of one block: layers, keys and values, heads, tokens, elements."""
_KEYS, _VALUES = CONFIG.linear_key_head_dim, CONFIG.linear_value_head_dim
_CONV = (
    CONFIG.linear_num_key_heads * _KEYS * 2 + CONFIG.linear_num_value_heads * _VALUES,
    CONFIG.linear_conv_kernel_dim,
)
_STATE = (CONFIG.linear_num_value_heads, _KEYS, _VALUES)
_NUMBERS = int(np.prod(_CONV) + np.prod(_STATE))  # of one layer
STATE_NBYTES = 4 * _NUMBERS * len(RECURRENT)
"""Of one snapshot, float32."""


def load() -> Qwen3_5ForCausalLM:
    """The model, the same in each process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(CONFIG).eval()


def past_of(blocks: np.ndarray, state: np.ndarray | None) -> DynamicCache:
    """What the model goes on from: KV, float32[n, *BLOCK_SHAPE], and the state after it, uint8[STATE_NBYTES]."""
    past = DynamicCache(config=CONFIG)
    if state is None:
        return past
    layers, two, heads, _, elements = BLOCK_SHAPE
    tokens = len(blocks) * BLOCK_SIZE
    kv = torch.from_numpy(blocks).permute(1, 2, 3, 0, 4, 5).reshape(layers, two, heads, tokens, elements)
    for layer, (keys, values) in zip(ATTENTION, kv):
        past.update(keys[None], values[None], layer)
    numbers = torch.from_numpy(state.copy().view(np.float32)).reshape(len(RECURRENT), _NUMBERS)
    for layer, row in zip(RECURRENT, numbers):
        conv, recurrent = row.split([int(np.prod(_CONV)), int(np.prod(_STATE))])
        past.update_conv_state(conv.reshape(1, *_CONV), layer)
        past.update_recurrent_state(recurrent.reshape(1, *_STATE), layer)
        past.layers[layer].cumulative_length_linear.fill_(tokens)
    return past


def blocks_of(past: DynamicCache, first: int, last: int) -> np.ndarray:
    """The KV of blocks `first` to `last` - 1 of what the model has seen, float32[n, *BLOCK_SHAPE]."""
    tokens = slice(first * BLOCK_SIZE, last * BLOCK_SIZE)
    seen = [past.layers[layer] for layer in ATTENTION]
    kv = torch.stack([torch.stack([layer.keys[0, :, tokens], layer.values[0, :, tokens]]) for layer in seen])
    layers, two, heads, _, elements = BLOCK_SHAPE
    kv = kv.reshape(layers, two, heads, last - first, BLOCK_SIZE, elements)
    return kv.permute(3, 0, 1, 2, 4, 5).contiguous().numpy()


def state_of(past: DynamicCache) -> np.ndarray:
    """The state after the last token that the model has seen, uint8[STATE_NBYTES]."""
    seen = [past.layers[layer] for layer in RECURRENT]
    parts = [part.flatten() for layer in seen for part in (layer.conv_states[0], layer.recurrent_states[0])]
    return torch.cat(parts).numpy().view(np.uint8)
