"""Requests as chat users make them: a long system prompt that all share, and conversations that grow turn by turn."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

VOCABULARY = 1000


class Conversation(NamedTuple):
    """What one user says. Token ids, each turn's behind the answer to the one before."""

    system: list[int]
    turns: list[list[int]]


def conversations(count: int, turns: int, system_tokens: int = 200, turn_tokens: int = 24) -> list[Conversation]:
    """The same ones each time."""
    random = np.random.default_rng(0)
    system = random.integers(0, VOCABULARY, system_tokens).tolist()
    return [Conversation(system, random.integers(0, VOCABULARY, (turns, turn_tokens)).tolist()) for _ in range(count)]
