"""Worker processes for the examples: with one cache for all, with a cache each, with none; and the difference."""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from generating import Answer, Request, serve_alone
from workload import conversations

from shmradix import RadixCache


def worker(example: str, name: str | None, requests: Connection) -> None:
    """Serve the requests that come with `serve` of the example, or without a cache; None ends it."""
    module = importlib.import_module(example)
    model = module.load()
    cache = RadixCache.attach(name) if name else None
    if cache:
        cache.lookup([0]).release()  # compiles the kernels, where no process of this machine has yet
    requests.send("ready")
    while request := requests.recv():
        requests.send(module.serve(cache, model, request) if cache else serve_alone(model, request))
    if cache:
        cache.close()


def run(example: str, names: list[str | None], count: int, turns: int) -> list[list[Answer]]:
    """Have a worker for each name serve so many conversations. Returns the answers, [turn][conversation]."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for name in names:
        ours, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=worker, args=(example, name, theirs), daemon=True))
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
                pipes[(number + turn) % len(pipes)].send(Request(number, prompts[number]))
            served += [pipes[(number + turn) % len(pipes)].recv() for number in some]
        answers.append(served)
        for prompt, answer in zip(prompts, served):
            prompt += answer.tokens
    for pipe, process in zip(pipes, processes):
        pipe.send(None)
        process.join()
    return answers


def run_with(caches: int, example: str, workers: int, count: int, turns: int) -> list[list[Answer]]:
    """As `run`, with so many caches, as large as the example says in all."""
    names = [f"{example}-{os.getpid()}-{number}" for number in range(caches)]
    sizes = importlib.import_module(example).sizes(max(1, caches))
    for name in names:
        RadixCache.create(name, **sizes).close()
    try:
        return run(example, [names[number % caches] if caches else None for number in range(workers)], count, turns)
    finally:
        for name in names:
            RadixCache.unlink(name)


def difference(answers: list[list[Answer]], expected: list[list[Answer]]) -> list[float]:
    """By turn, how far the logits are from those expected, at most. ValueError where other tokens were generated."""
    for turn, (served, right) in enumerate(zip(answers, expected), 1):
        if [answer.tokens for answer in served] != [answer.tokens for answer in right]:
            raise ValueError(f"turn {turn}: other tokens than without a cache")
    return [
        max(float(np.abs(one.logits - other.logits).max()) for one, other in zip(*both))
        for both in zip(answers, expected)
    ]


def compare(example: str, description: str, tolerance: float, arguments: list[str] | None = None) -> int:
    """Run the example's three ways and print what each computed; 1 where the logits differ by more than `tolerance`.

    In the first turn, where all was computed by the block, they must be the same.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args(arguments)
    how: tuple[Any, ...] = example, options.workers, options.conversations, options.turns
    expected = run_with(0, *how)
    print(f"{'cache':<10}{'prompt tokens computed':>24}{'prefill seconds':>18}{'logits differ by':>18}")
    status = 0
    for title, caches in (("none", 0), ("private", options.workers), ("shared", 1)):
        answers = run_with(caches, *how) if caches else expected
        differ = difference(answers, expected)
        computed = sum(answer.computed for served in answers for answer in served)
        seconds = sum(answer.seconds for served in answers for answer in served)
        print(f"{title:<10}{computed:>24,}{seconds:>18.2f}{max(differ):>18.2g}", flush=True)
        if differ[0] > 0 or max(differ) > tolerance:
            print(f"WRONG: by turn {differ}, expected 0 in the first and at most {tolerance}")
            status = 1
    return status
