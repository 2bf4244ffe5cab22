"""The commands that change something, `reap`, `evict`, `clear` and `rm`: they say what they will do, and ask."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from shmradix import RadixCache
from shmradix.errors import SegmentNotFound, ShmradixError
from shmradix.inspect.commands import Look, nearest, open_cache
from shmradix.inspect.reading import living_slots
from shmradix.results import EvictedBlocks
from shmradix.segment import names


class Refused(ShmradixError):
    """What was asked for would take a cache from those who use it, or nobody said yes."""


def _rm(args: argparse.Namespace) -> int:
    """Remove one cache, or all that nobody uses. Who is attached keeps the memory until he leaves."""
    if (args.cache is None) != args.stale:
        args.usage_error("expected the name of a cache, or --stale, and not both")
    if args.stale:
        doomed = [name for name in names() if _is_unused(name)]
    else:
        doomed = [args.cache]
        if args.cache not in names():
            raise SegmentNotFound(f"no cache {args.cache!r}" + nearest(args.cache))
        if not args.force and (living := len(living_slots(args.cache))):
            raise Refused(f"cache {args.cache!r} is used by {living} workers: stop them first, or say --force")
    _ask(args, [f"remove {name}" for name in doomed])
    removed = []
    for name in doomed:
        if args.stale and not _is_unused(name):
            continue  # somebody came while we asked
        if RadixCache.unlink(name):
            removed.append(name)
    _say(args, {"removed": removed}, "\n".join(f"removed {name}" for name in removed) or "nothing to remove")
    return 0


def _is_unused(name: str) -> bool:
    """Whether nobody is attached; False where this user may not look."""
    try:
        return not living_slots(name)
    except (ShmradixError, OSError):
        return False


def _reap(args: argparse.Namespace) -> int:
    """As every worker does when it attaches or runs out of something; this attaches, too."""
    dead = [worker for worker in open_cache(args.cache).workers if worker.alive is False]
    leases, blocks = (sum(getattr(worker, what) for worker in dead) for what in ("leases", "private_blocks"))
    if dead:
        _ask(args, [f"free {leases} leases and {blocks} private blocks of {len(dead)} dead workers of {args.cache}"])
        with RadixCache.attach(args.cache) as cache:
            cache.reap()
    freed = {"workers": len(dead), "leases": leases, "private_blocks": blocks}
    _say(args, freed, f"freed {leases} leases and {blocks} private blocks of {len(dead)} dead workers")
    return 0


def _evict(args: argparse.Namespace) -> int:
    """Those that no lease needs, the longest unused first."""
    deed = f"evict up to {args.blocks_wanted} blocks of {args.cache}"
    return _take_out(args, deed, lambda cache: cache.evict(args.blocks_wanted))


def _clear(args: argparse.Namespace) -> int:
    """Leased blocks follow as their leases end."""
    return _take_out(args, f"make {args.cache} forget all that it holds", lambda cache: cache.clear())


def _take_out(args: argparse.Namespace, deed: str, do: Callable[[RadixCache], EvictedBlocks]) -> int:
    """In a cache whose blocks the engine manages, what was evicted is the engine's to free, which only --json tells."""
    is_managed = bool(open_cache(args.cache).geometry.num_blocks)
    if not is_managed and not args.json:
        raise Refused(
            f"cache {args.cache!r} does not manage its blocks: whoever does would never learn which ones are free now; "
            "let a worker do it, or take --json, which names them"
        )
    _ask(args, [deed])
    with RadixCache.attach(args.cache) as cache:
        blocks = do(cache)
    fields = "blocks", "disk_block_ids", "snapshot_slots"
    _say(args, {field: getattr(blocks, field).tolist() for field in fields}, f"{len(blocks)} blocks are free")
    return 0


def _ask(args: argparse.Namespace, deeds: list[str]) -> None:
    """Raises Refused unless the answer, or --yes, is yes. Nothing to do needs none."""
    if args.yes or not deeds:
        return
    print("\n".join(deeds) + "? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Refused("nothing was done: answer y, or say --yes")


def _say(args: argparse.Namespace, report: dict[str, object], text: str) -> None:
    print(json.dumps(report, indent=2) if args.json else text)


def _add_yes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _add_rm_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cache", metavar="CACHE", nargs="?")
    parser.add_argument("--stale", action="store_true", help="all caches that nobody uses")
    parser.add_argument("--force", action="store_true", help="also where workers use it; they keep what they have")
    _add_yes(parser)


def _add_count(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("blocks_wanted", metavar="N", type=_count, help="blocks")
    _add_yes(parser)


def _count(text: str) -> int:
    """An argparse type."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


CHANGES = {
    "reap": Look(
        "free what dead workers hold", "Free the leases, private blocks and claims of workers that died.",
        "examples:\n  shmradix reap llm --yes\n", ("cache",), _reap, _add_yes,
    ),
    "evict": Look(
        "free blocks that nobody needs now", "Evict up to N blocks that no lease needs, the longest unused first.",
        "examples:\n  shmradix evict llm 1000\n", ("cache",), _evict, _add_count,
    ),
    "clear": Look(
        "make a cache forget everything",
        "Make a cache forget everything, as after new weights: no worker finds anything older.",
        "examples:\n  shmradix clear llm\n", ("cache",), _clear, _add_yes,
    ),
    "rm": Look(
        "remove a cache", "Remove a cache, its semaphores and all, or with --stale every one that nobody uses.",
        "examples:\n  shmradix rm llm\n  shmradix rm --stale --yes\n", (), _rm, _add_rm_options,
    ),
}  # fmt: skip
