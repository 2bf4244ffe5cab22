"""Worker processes that serve chats with one KV cache in shared memory, beside private caches, and beside none.

    python examples/serve_llama.py

Each turn of a conversation goes to another worker. With a shared cache that one finds what the others computed: the
system prompt, the turns before, and their answers. The answers must be the same tokens as without any cache.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import crew
from generating import BLOCK_SIZE, Answer, Request, decode, forward, whole_blocks
from llama import BLOCK_SHAPE, blocks_of, load, past_of
from transformers import DynamicCache, LlamaForCausalLM

from shmradix import RadixCache

__all__ = ["load", "serve", "sizes"]
TOLERANCE = 1e-5
"""Of logits, where KV of an answer is reused, which was computed token by token and not by the block."""


def sizes(caches: int) -> dict[str, Any]:
    """What each of so many caches is created with."""
    return {"num_blocks": 1000 // caches, "block_size": BLOCK_SIZE, "block_shape": BLOCK_SHAPE, "dtype": "float32"}


def serve(cache: RadixCache, model: LlamaForCausalLM, request: Request) -> Answer:
    """Answer a prompt with what the cache has of it, and keep what was computed."""
    started, prompt, whole = time.monotonic(), request.prompt, whole_blocks(request.prompt)
    with cache.claim(prompt[:whole]) as claim:
        claim.wait()  # while another worker computes what we need
        match = claim.match
        assert match is not None
        table = match.matched_blocks.tolist()
        past = past_of(cache.kv.gather(table))
        if claim.is_mine:
            forward(model, prompt[match.matched_tokens : whole], past)
            table += keep(cache, past, len(table), whole // BLOCK_SIZE)
            claim.insert(table)
        logits = forward(model, prompt[whole:], past)
        seconds = time.monotonic() - started

        answer = decode(model, logits, past)
        seen = prompt + answer[:-1]  # the last token was never the model's input
        seen = seen[: len(seen) // BLOCK_SIZE * BLOCK_SIZE]
        table += keep(cache, past, len(table), len(seen) // BLOCK_SIZE)
        cache.free(cache.insert(seen, table, match=match).duplicates)  # of both inserts: another had stored them
    return Answer(answer, logits.numpy(), len(prompt) - match.matched_tokens, seconds)


def keep(cache: RadixCache, past: DynamicCache, first: int, last: int) -> list[int]:
    """Copy the model's KV of blocks `first` to `last` - 1 to new blocks of the cache."""
    blocks = cache.allocate(last - first)
    cache.kv.scatter(blocks, blocks_of(past, first, last))
    return blocks.tolist()


if __name__ == "__main__":
    sys.exit(crew.compare("serve_llama", "Serve chats with one KV cache for all workers.", TOLERANCE))
