"""Worker processes that serve chats with one KV cache in shared memory, beside private caches, and beside none.

    python examples/serve_llama.py

Each turn of a conversation goes to another worker. With a shared cache that one finds what the others computed: the
system prompt, the turns before, and their answers. The answers must be the same tokens as without any cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import llama
import numpy as np
import torch
from llama import BLOCK_SHAPE, BLOCK_SIZE
from transformers import DynamicCache, LlamaForCausalLM
from workload import conversations

from shmradix import RadixCache

ANSWER = 24  # tokens
SIZES: dict[str, Any] = {"block_size": BLOCK_SIZE, "block_shape": BLOCK_SHAPE, "dtype": "float32"}
TOLERANCE = 1e-5
"""Of logits, where KV of an answer is reused, which was computed token by token and not by the block."""


class Answer(NamedTuple):
    tokens: list[int]
    logits: np.ndarray  # after the prompt's last token, float32[vocabulary]
    computed: int  # tokens of the prompt
    seconds: float  # until the first token of the answer was known


def serve(cache: RadixCache | None, model: LlamaForCausalLM, prompt: list[int]) -> Answer:
    """Answer a prompt."""
    started = time.monotonic()
    if cache is None:
        past = DynamicCache(config=llama.CONFIG)
        logits = llama.forward(model, prompt, past)
        computed, seconds = len(prompt), time.monotonic() - started
        return Answer(decode(model, logits, past), logits.numpy(), computed, seconds)

    whole = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE  # the last token is always computed, for its logits
    with cache.claim(prompt[:whole]) as claim:
        claim.wait()  # while another worker computes what we need
        match = claim.match
        assert match is not None
        table, computed = match.matched_blocks.tolist(), len(prompt) - match.matched_tokens
        past = llama.past_of(cache.kv.gather(table))
        if claim.is_mine:
            llama.forward(model, prompt[match.matched_tokens : whole], past)
            table += keep(cache, past, len(table), whole // BLOCK_SIZE)
            cache.free(claim.insert(table).duplicates)
        logits = llama.forward(model, prompt[whole:], past)
        seconds = time.monotonic() - started

        answer = decode(model, logits, past)
        seen = prompt + answer[:-1]  # the last token was never the model's input
        seen = seen[: len(seen) // BLOCK_SIZE * BLOCK_SIZE]
        table += keep(cache, past, len(table), len(seen) // BLOCK_SIZE)
        cache.free(cache.insert(seen, table, match=match).duplicates)
    return Answer(answer, logits.numpy(), computed, seconds)


def keep(cache: RadixCache, past: DynamicCache, first: int, last: int) -> list[int]:
    """Copy the model's KV of blocks `first` to `last` - 1 to new blocks of the cache."""
    blocks = cache.allocate(last - first)
    cache.kv.scatter(blocks, llama.blocks_of(past, first, last))
    return blocks.tolist()


def decode(model: LlamaForCausalLM, logits: torch.Tensor, past: DynamicCache) -> list[int]:
    """The likeliest answer."""
    answer = [int(logits.argmax())]
    while len(answer) < ANSWER:
        answer.append(int(llama.forward(model, answer[-1:], past).argmax()))
    return answer


# --- the workers, and who sends them requests -------------------------------------------------------------------


def worker(name: str | None, requests: Connection) -> None:
    """Serve the prompts that come; None ends it."""
    model = llama.load()
    cache = RadixCache.attach(name) if name else None
    requests.send("ready")
    while prompt := requests.recv():
        requests.send(serve(cache, model, prompt))
    if cache is not None:
        cache.close()


def run(names: list[str | None], count: int, turns: int) -> list[list[Answer]]:
    """Have a worker for each name serve so many conversations. Returns the answers, [turn][conversation]."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for name in names:
        ours, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=worker, args=(name, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    users = conversations(count, turns)
    prompts, answers = [list(user.system) for user in users], []
    for turn in range(turns):
        for user, prompt in zip(users, prompts):
            prompt += user.turns[turn]
        served: list[Answer] = []
        for first in range(0, count, len(pipes)):  # at the same time, each turn of a user by another worker
            some = range(first, min(first + len(pipes), count))
            for number in some:
                pipes[(number + turn) % len(pipes)].send(prompts[number])
            served += [pipes[(number + turn) % len(pipes)].recv() for number in some]
        answers.append(served)
        for prompt, answer in zip(prompts, served):
            prompt += answer.tokens
    for pipe, process in zip(pipes, processes):
        pipe.send(None)
        process.join()
    return answers


def run_with(caches: int, workers: int, count: int, turns: int, blocks: int) -> list[list[Answer]]:
    """As `run`, with so many caches, of `blocks` in all."""
    names = [f"llama-{os.getpid()}-{number}" for number in range(caches)]
    for name in names:
        RadixCache.create(name, num_blocks=blocks // caches, **SIZES).close()
    try:
        return run([names[number % caches] if caches else None for number in range(workers)], count, turns)
    finally:
        for name in names:
            RadixCache.unlink(name)


def difference(answers: list[list[Answer]], expected: list[list[Answer]]) -> list[float]:
    """By turn, how far the logits are from those expected, at most. ValueError where other tokens were generated."""
    for turn, (served, right) in enumerate(zip(answers, expected)):
        if [answer.tokens for answer in served] != [answer.tokens for answer in right]:
            raise ValueError(f"turn {turn + 1}: other tokens than without a cache")
    return [
        max(float(np.abs(one.logits - other.logits).max()) for one, other in zip(*both))
        for both in zip(answers, expected)
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Serve chats with one KV cache for all workers.")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=1000, help="in all caches together")
    options = parser.parse_args(arguments)
    how = options.workers, options.conversations, options.turns, options.blocks
    expected = run_with(0, *how)
    print(f"{'cache':<10}{'prompt tokens computed':>24}{'prefill seconds':>18}{'logits differ by':>18}")
    status = 0
    for title, caches in (("none", 0), ("private", options.workers), ("shared", 1)):
        answers = run_with(caches, *how) if caches else expected
        differ = difference(answers, expected)
        computed = sum(answer.computed for served in answers for answer in served)
        seconds = sum(answer.seconds for served in answers for answer in served)
        print(f"{title:<10}{computed:>24,}{seconds:>18.2f}{max(differ):>18.2g}")
        if differ[0] > 0 or max(differ) > TOLERANCE:
            print(f"WRONG: by turn {differ}, expected 0 in the first and at most {TOLERANCE}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
