"""The same with a hybrid model, which can go on only from where its recurrent layers' state was saved.

    python examples/serve_hybrid.py

On the way through a prompt a worker saves states every few blocks, for everybody, and one at its end, the tail, for the
conversation's next turn. A prompt resumes from the deepest that there is, with the KV of the blocks up to there.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import crew
import numpy as np
from generating import BLOCK_SIZE, Answer, Request, decode, forward, whole_blocks
from hybrid import BLOCK_SHAPE, STATE_NBYTES, blocks_of, load, past_of, state_of
from transformers import Qwen3_5ForCausalLM

from shmradix import PrefixMatch, RadixCache

__all__ = ["load", "serve", "sizes"]
CHUNK = 4 * BLOCK_SIZE  # tokens from one saved state to the next


def sizes(caches: int) -> dict[str, Any]:
    """What each of so many caches is created with."""
    return {
        "num_blocks": 1000 // caches, "block_size": BLOCK_SIZE, "block_shape": BLOCK_SHAPE, "dtype": "float32",
        "max_snapshots": 128 // caches, "snapshot_slots": 128 // caches, "snapshot_nbytes": STATE_NBYTES,
    }  # fmt: skip


def serve(cache: RadixCache, model: Qwen3_5ForCausalLM, request: Request) -> Answer:
    """Answer a prompt from the deepest saved state, and save the states on the way."""
    started, prompt, whole = time.monotonic(), request.prompt, whole_blocks(request.prompt)
    session = request.user + 1  # not 0, which is no session
    with cache.lookup(prompt, session=session, max_snapshot_tokens=whole, require_snapshot=True) as match:
        at = found = match.snapshot_tokens
        table = match.matched_blocks.tolist()
        state = None if match.snapshot_slot is None else cache.states[match.snapshot_slot]
        past = past_of(cache.kv.gather(table), state)
        duplicates: Any = []
        while at < whole:
            end = min(at // CHUNK * CHUNK + CHUNK, whole)
            forward(model, prompt[at:end], past)
            blocks = cache.allocate((end - at) // BLOCK_SIZE)
            cache.kv.scatter(blocks, blocks_of(past, at // BLOCK_SIZE, end // BLOCK_SIZE))
            table += blocks.tolist()
            duplicates = cache.insert(prompt[:end], table, match=match).duplicates
            save(cache, match, prompt[:end], state_of(past), session if end == whole else 0)
            at = end
        cache.free(duplicates)  # of all inserts: another had stored them
        logits = forward(model, prompt[whole:], past)
        seconds = time.monotonic() - started
    return Answer(decode(model, logits, past), logits.numpy(), len(prompt) - found, seconds)


def save(cache: RadixCache, match: PrefixMatch, tokens: list[int], state: np.ndarray, session: int) -> None:
    """Keep the state after these tokens: as the session's tail, or, where that is 0, for everybody."""
    slot = cache.allocate_snapshot_slot()
    cache.states[slot][:] = state
    if session:
        superseded = cache.insert_tail_snapshot(tokens, slot, session, match=match)
    else:
        superseded = cache.insert_intermediate_snapshot(tokens, slot, match=match)
    for old in superseded:
        cache.free_snapshot_slot(old)


if __name__ == "__main__":
    sys.exit(crew.compare("serve_hybrid", "Serve chats with a hybrid model and one cache for all workers.", 0.0))
