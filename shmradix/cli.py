"""The command line: `shmradix replay`, `shmradix demo`, and the commands that look into a cache.

Exit status: 0 done; 1 a worker died or failed, or `verify` found something; 2 bad arguments, a bad trace, a cache that
can't be read or a segment that can't be made; 128 + the signal's number where one stopped it (130 for Ctrl-C).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from types import FrameType
from typing import NoReturn

from shmradix import __version__
from shmradix.crew import WorkerFailed
from shmradix.errors import SharedMemoryFull, ShmradixError
from shmradix.handover import Handover, hand_over
from shmradix.inspect.changes import CHANGES
from shmradix.inspect.commands import LOOKS
from shmradix.layout import LIMITS
from shmradix.replay import MAX_WORKERS, Plan, replay
from shmradix.trace import TraceError

SAMPLE = "mooncake_conversation_800.jsonl"

_EXAMPLES = """\
examples:
  shmradix demo
  shmradix replay conversation_trace.jsonl --workers 4 --blocks 30000
  shmradix ls
"""
_REPLAY = """\
Replay a trace of LLM requests with several worker processes, which look up and store their prompts in one
cache in shared memory; then once more with a private cache of BLOCKS // WORKERS blocks for every worker.

TRACE has one JSON object a line, in the format of the Mooncake traces: timestamp, input_length,
output_length and hash_ids, an id for every started 512 tokens of the prompt. Requests are taken in the
order of the lines, the next one by the next free worker.
"""
_REPLAY_EXAMPLES = """\
examples:
  shmradix replay conversation_trace.jsonl --workers 4 --blocks 30000
  shmradix replay conversation_trace.jsonl --workers 2 --blocks 100000 --block-size 256 --json > result.json
"""
_DEMO = """\
Show what sharing is worth: replay 800 real chat requests that come with the package (the start of the
conversation trace of Mooncake, FAST '25), first with one cache that all workers share, then with a private
cache for every worker, with the same memory in all. Then a worker writes the KV of a prompt into blocks of
a cache, and another one reads it.
"""
_DEMO_EXAMPLES = """\
examples:
  shmradix demo
  shmradix demo --workers 2 --blocks 12000
"""
_DEMO_TEXT = (
    "{serve} 800 real chat requests (the start of the Mooncake FAST '25 conversation trace). Where a prompt starts "
    "like an earlier one, that part need not be computed again if the cache still has it: a hit.",
    "First all share one cache of {blocks} of {tokens}, so each finds what any has computed. Then each has a cache of "
    "its own of {private}, the same memory in all, and finds only what it has computed itself.",
    "At the end one worker writes the KV of a prompt (random bytes here) into blocks of a cache and exits, and another "
    "finds it by the prompt, and reads it.",
    "Starting takes a few seconds each time; on its first use on a machine shmradix also compiles for 10 to 30 "
    "seconds. Only the serving of the requests, usually below a second, is measured.",
)
_TEXT_WIDTH = 79


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status; bad arguments exit through argparse."""
    args = _parser().parse_args(argv)
    if hasattr(args, "blocks") and args.blocks < args.workers:
        args.usage_error(f"--blocks {args.blocks} is less than one block for each of --workers {args.workers}")
    run: Callable[[argparse.Namespace], int | None] = args.run
    try:
        with _stopped_by_signals():
            status = run(args)
            sys.stdout.flush()
        return status or 0
    except KeyboardInterrupt:
        return _complain("interrupted", 128 + signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except WorkerFailed as error:
        return _complain(str(error), 1)
    except SharedMemoryFull as error:
        return _complain(f"{error.strerror}\nshmradix: here, lower --blocks or --block-size", 2)
    except (TraceError, ShmradixError, OSError) as error:
        return _complain(str(error), 2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shmradix",
        description="Looks into prefix caches that LLM serving processes share, and measures what sharing is worth.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    replaying = _command(commands, "replay", "replay a trace", _REPLAY, _REPLAY_EXAMPLES)
    replaying.add_argument("trace", metavar="TRACE", help="the trace, a .jsonl file")
    _add_sizes(replaying, workers=None, blocks=None)
    replaying.set_defaults(run=_run_replay)
    demo = _command(commands, "demo", "replay a packaged sample and explain it", _DEMO, _DEMO_EXAMPLES)
    _add_sizes(demo, workers=4, blocks=8000)
    demo.set_defaults(run=_run_demo)
    for name, look in (LOOKS | CHANGES).items():
        looking = _command(commands, name, look.summary, look.description, look.examples)
        for argument in look.arguments:
            looking.add_argument(argument, metavar=argument.upper())
        look.add_options(looking)
        looking.add_argument("--json", action="store_true", help="print JSON: exact bytes, unix times, counts")
        looking.set_defaults(run=look.run, usage_error=looking.error)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
    examples: str,
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_sizes(parser: argparse.ArgumentParser, *, workers: int | None, blocks: int | None) -> None:
    """Add the options that both commands have; one without a default is required."""

    def add(option: str, metavar: str, limits: tuple[int, int], default: int | None, text: str) -> None:
        shown = "" if default is None else f" (default {default})"
        parser.add_argument(
            option, metavar=metavar, type=_whole_number(*limits), default=default, required=default is None,
            help=text + shown,
        )  # fmt: skip

    add("--workers", "N", (1, MAX_WORKERS), workers, f"worker processes, at most {MAX_WORKERS}")
    add("--blocks", "B", LIMITS["max_blocks"], blocks, "blocks that the shared cache may hold")
    add("--block-size", "S", LIMITS["block_size"], 512, "tokens of a block")
    parser.add_argument(
        "--json", action="store_true",
        help="print one JSON object instead of the table: at its top level the figures of the shared cache, under "
        "'private' the same of the private caches, to compare; ratios from 0 to 1, times in seconds, latency_us in "
        "microseconds",
    )  # fmt: skip
    parser.set_defaults(usage_error=parser.error)


def _whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers in a range."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text} is not in {least} to {most:,}")
        return number

    return parse


def _run_replay(args: argparse.Namespace) -> None:
    _replay_and_report(args, args.trace)


def _run_demo(args: argparse.Namespace) -> None:
    if not args.json:
        _introduce_demo(args)
    with resources.as_file(resources.files("shmradix") / "data" / SAMPLE) as path:
        _replay_and_report(args, str(path), hand_over)


def _introduce_demo(args: argparse.Namespace) -> None:
    from shmradix.report import counted

    words = {
        "serve": "1 worker process serves" if args.workers == 1 else f"{args.workers} worker processes serve",
        "blocks": counted(args.blocks, "block"),
        "tokens": counted(args.block_size, "token"),
        "private": counted(args.blocks // args.workers, "block"),
    }
    for paragraph in _DEMO_TEXT:
        print(textwrap.fill(paragraph.format(**words), _TEXT_WIDTH), end="\n\n", flush=True)


def _replay_and_report(
    args: argparse.Namespace, trace_path: str, hand_over: Callable[[], Handover] | None = None
) -> None:
    # Imported here: the workers import this module too, and have no use for the display.
    from shmradix.report import ProgressDisplay, print_json, print_table

    plan = Plan(trace_path, args.workers, args.blocks, args.block_size)
    with ProgressDisplay() as display:
        shared, private = replay(plan, display)
    handover = hand_over() if hand_over else None
    show = print_json if args.json else print_table
    show(plan, shared, private, handover)
    if handover and not handover.is_same:
        raise WorkerFailed("the second worker read other bytes than the first one wrote")


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the program by way of all its clean-up, unless they are ignored."""
    signums = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) == signal.SIG_DFL]
    try:
        for signum in signums:
            signal.signal(signum, _exit_on_signal)
        yield
    finally:
        for signum in signums:
            signal.signal(signum, signal.SIG_DFL)


def _exit_on_signal(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def _complain(message: str, status: int) -> int:
    print(f"shmradix: {message}", file=sys.stderr)
    return status
