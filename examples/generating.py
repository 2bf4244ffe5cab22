"""How the examples' models compute and answer, with or without a cache."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache

BLOCK_SIZE = 16  # tokens
ANSWER = 24  # tokens


class Request(NamedTuple):
    """What a worker is asked."""

    user: int
    prompt: list[int]


class Answer(NamedTuple):
    """What it answers."""

    tokens: list[int]
    logits: np.ndarray  # after the prompt's last token, float32[vocabulary]
    computed: int  # tokens of the prompt
    seconds: float  # until the first token of the answer was known


def whole_blocks(tokens: list[int]) -> int:
    """Tokens in the whole blocks of a prompt but its last token, which is always computed, for its logits."""
    return (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE


def forward(model: Any, tokens: list[int], past: DynamicCache) -> torch.Tensor:
    """Compute what follows `past`, one block at a time. Returns the logits after the last token, float32[vocabulary].

    So whoever computes a block does the same arithmetic on the same shapes, whatever else was found in the cache, and
    gets the same bits. A real engine computes longer chunks, and gets bits that differ in the last place.
    """
    with torch.inference_mode():
        for start in range(0, len(tokens), BLOCK_SIZE):
            chunk = torch.tensor([tokens[start : start + BLOCK_SIZE]])
            logits = model(chunk, cache=past).logits[0, -1]
    return logits


def decode(model: Any, logits: torch.Tensor, past: DynamicCache) -> list[int]:
    """The likeliest answer."""
    answer = [int(logits.argmax())]
    while len(answer) < ANSWER:
        answer.append(int(forward(model, answer[-1:], past).argmax()))
    return answer


def serve_alone(model: Any, request: Request) -> Answer:
    """Answer without a cache."""
    started, past = time.monotonic(), DynamicCache(config=model.config)
    logits = forward(model, request.prompt, past)
    seconds = time.monotonic() - started
    return Answer(decode(model, logits, past), logits.numpy(), len(request.prompt), seconds)
