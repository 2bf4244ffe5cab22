"""The commands that look into a cache; each prints a table, or JSON."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from shmradix import inspect
from shmradix.errors import SegmentNotFound, ShmradixError
from shmradix.inspect.watch import watch
from shmradix.layout import GUARDS
from shmradix.segment import names, path_of

STATES = {True: "alive", False: "DEAD", None: "unknown"}
_WIDTH = 200  # of a table that goes to a file or a pipe


T = TypeVar("T")


class Look(NamedTuple):
    """A command: what it says of itself, the arguments that it takes, what it does (its exit status)."""

    summary: str
    description: str
    examples: str
    arguments: tuple[str, ...]
    run: Callable[[argparse.Namespace], int]
    add_options: Callable[[argparse.ArgumentParser], None] = lambda _: None


def open_cache(cache: str) -> inspect.Reading:
    """The cache of this name, or in this file; where there is none, the error names the nearest."""
    return _found(inspect.open, cache)


def _found(look: Callable[[str], T], cache: str) -> T:
    try:
        return look(cache)
    except SegmentNotFound as error:
        raise SegmentNotFound(f"{error}" + nearest(cache)) from None


def nearest(name: str) -> str:
    """The end of an error that says that there is no such cache."""
    near = difflib.get_close_matches(name, names(), 1)
    return f": did you mean {near[0]!r}?" if near else "; try shmradix ls"


def _summary(reading: inspect.Reading) -> dict[str, Any]:
    """What `stat` says, exact."""
    state, geometry, counters = reading.views.state[0], reading.geometry, reading.counters
    workers = reading.workers
    is_known = reading.alive is not None
    alive = sum(worker.alive is True for worker in workers)
    return {
        "name": reading.name,
        "created": reading.created,
        "file_bytes": geometry.file_size,
        "index_bytes": geometry.size,
        "block_size": geometry.block_size,
        "max_blocks": geometry.max_blocks,
        "num_blocks": geometry.num_blocks,
        "blocks_live": int(state["live_blocks"]),
        "blocks_private": int(state["private_blocks"]),
        "namespaces": int(state["live_namespaces"]),
        "max_namespaces": geometry.max_namespaces,
        "leases": int(state["live_leases"]),
        "max_leases": geometry.max_leases,
        "snapshots": int((reading.views.snapshots["born"][1:] != 0).sum()),
        "max_snapshots": geometry.max_snapshots,
        "claims": int((reading.views.claims["born"][1:] != 0).sum()),
        "max_claims": geometry.max_claims,
        "workers_alive": alive if is_known else None,
        "workers_dead": len(workers) - alive if is_known else None,
        "max_workers": geometry.max_workers,
        "hit_ratio": counters["hit_tokens"] / counters["lookup_tokens"] if counters["lookup_tokens"] else None,
        "guards_held_by": dict(zip(GUARDS, reading.held_by)),
        "counters": counters,
    }


def _ls(args: argparse.Namespace) -> int:
    """One that can't be read is listed with the reason."""
    rows = []
    for name in names():
        try:
            rows.append({**_summary(inspect.open(name, patience=1.0)), "problem": None})
        except SegmentNotFound:
            continue  # removed meanwhile
        except (ShmradixError, OSError) as error:
            with contextlib.suppress(FileNotFoundError):
                rows.append({"name": name, "file_bytes": path_of(name).stat().st_size, "problem": str(error)})
    if args.json:
        return _print_json(rows)
    table = _table("cache", "size", "age", "alive", "dead", "blocks", "full", "tokens hit", "")
    for row in rows:
        if row["problem"]:
            table.add_row(row["name"], decimal(row["file_bytes"]), *[""] * 6, row["problem"])
            continue
        full = row["blocks_live"] / row["max_blocks"]
        table.add_row(
            row["name"], decimal(row["file_bytes"]), age(row["created"]), _plain(row["workers_alive"]),
            _plain(row["workers_dead"]), f"{row['blocks_live']:,}", f"{full:.1%}", ratio(row["hit_ratio"]),
            "" if row["workers_alive"] else "nobody uses it",
        )  # fmt: skip
    return _show(table)


def _stat(args: argparse.Namespace) -> int:
    if args.watch is not None:
        watch(lambda: open_cache(args.cache), args.watch, args.json)
    summary = _summary(open_cache(args.cache))
    if args.json:
        return _print_json(summary)
    counters, guards = summary.pop("counters"), summary.pop("guards_held_by")
    table = _table("", "")
    shown: dict[str, Callable[[Any], str]] = {
        "created": age, "file_bytes": decimal, "index_bytes": decimal, "hit_ratio": ratio,
    }  # fmt: skip
    for key, value in summary.items():
        show = shown.get(key, _plain)
        table.add_row(key.replace("_", " "), show(value) + (" ago" if key == "created" else ""))
    for guard, slot in guards.items():
        table.add_row(f"{guard} guard", "free" if slot is None else f"held by slot {slot}, whose worker is dead")
    table.add_section()
    for key, value in counters.items():
        table.add_row(key.replace("_", " "), f"{value:,}")
    return _show(table)


def _workers(args: argparse.Namespace) -> int:
    workers = open_cache(args.cache).workers
    if args.json:
        return _print_json([asdict(worker) for worker in workers])
    table = _table("slot", "pid", "state", "since", "leases", "private blocks", "lookups", "tokens hit")
    for worker in workers:
        looked_up = worker.counters["lookup_tokens"]
        table.add_row(
            str(worker.slot), str(worker.pid), STATES[worker.alive], age(worker.attached), f"{worker.leases:,}",
            f"{worker.private_blocks:,}", f"{worker.counters['lookups']:,}",
            ratio(worker.counters["hit_tokens"] / looked_up if looked_up else None),
        )  # fmt: skip
    return _show(table)


def _leases(args: argparse.Namespace) -> int:
    leases = open_cache(args.cache).leases
    if args.older_than:
        leases = [lease for lease in leases if lease.seconds is None or lease.seconds > args.older_than]
    if args.json:
        return _print_json([asdict(lease) for lease in leases])
    table = _table("slot", "pid", "worker", "held for", "blocks", "and tokens")
    for lease in leases:
        table.add_row(
            str(lease.slot), str(lease.pid), STATES[lease.alive],
            "unknown" if lease.seconds is None else span(lease.seconds), f"{lease.depth:,}", str(lease.partial_tokens),
        )  # fmt: skip
    return _show(table)


def _snapshots(args: argparse.Namespace) -> int:
    snapshots = open_cache(args.cache).snapshots
    if args.json:
        return _print_json([asdict(snapshot) for snapshot in snapshots])
    table = _table("tokens", "session", "adapter", "slot", "tier key", "pins", "idle", "what")
    for snapshot in snapshots:
        what = [*snapshot.flags, *(["cleared"] if snapshot.is_cleared else [])]
        table.add_row(
            f"{snapshot.tokens:,}", str(snapshot.session or ""), str(snapshot.adapter_id),
            "" if snapshot.slot is None else str(snapshot.slot), str(snapshot.tier_key or ""), str(snapshot.pins),
            f"{snapshot.idle:,}", " ".join(what),
        )  # fmt: skip
    return _show(table)


def _guards(args: argparse.Namespace) -> int:
    guards = _found(inspect.guards, args.cache)
    if args.json:
        return _print_json([asdict(guard) for guard in guards])
    table = _table("guard", "held by", "pid", "worker", "for", "waited for", "recoveries")
    for guard in guards:
        is_free = guard.slot is None
        table.add_row(
            guard.name, "nobody" if is_free else f"slot {guard.slot}", str(guard.pid or ""),
            "" if is_free else STATES[guard.alive], "" if guard.seconds is None else f"{guard.seconds * 1e3:,.1f} ms",
            "yes" if guard.is_waited_for else "no", f"{guard.recoveries:,}",
        )  # fmt: skip
    return _show(table)


def _tree(args: argparse.Namespace) -> int:
    """In JSON with all tokens and blocks; in the table without, and no deeper than asked for."""
    reading = open_cache(args.cache)
    runs = [
        run
        for run in inspect.runs(reading)
        if (args.depth is None or run.level < args.depth)
        and (args.adapter is None or run.adapter_id == args.adapter)
        and run.leases >= args.min_refs
    ]
    if args.json:
        return _print_json([asdict(run) for run in runs])
    table = _table("tokens", "at depth", "blocks", "leases", "idle", "adapter", "salt")
    for run in runs:
        first = " ".join(map(str, run.tokens[:6])) + (" ..." if len(run.tokens) > 6 else "")
        table.add_row(
            "  " * run.level + first, f"{run.depth:,}", f"{len(run.block_ids):,}", f"{run.leases:,}", f"{run.idle:,}",
            str(run.adapter_id), "yes" if run.is_salted else "",
        )  # fmt: skip
    return _show(table)


def _explain(args: argparse.Namespace) -> int:
    reading = open_cache(args.cache)
    try:
        found = inspect.explain(reading, _token_ids(args.tokens), args.adapter or 0, args.salt, args.session)
    except (TypeError, ValueError) as error:
        args.usage_error(str(error))
    if args.json:
        return _print_json(asdict(found))
    blocks = " ".join(map(str, found.block_ids)) or "none"
    print(f"{found.matched_tokens:,} of {found.prompt_tokens:,} tokens are cached, blocks: {blocks}")
    print(f"It ends there because {found.reason}.")
    for other in found.others:
        salt = " with a salt" if other.is_salted else ""
        print(f"Adapter {other.adapter_id}{salt} has {other.matched_tokens:,} tokens of it.")
    for state in found.snapshots:
        where = f"slot {state.slot}" if state.tier_key is None else f"tier, key {state.tier_key}"
        print(f"Snapshot of {state.tokens:,} tokens, {where}: {state.obstacle or 'can be resumed from'}.")
    return 0


def _token_ids(text: str) -> list[int]:
    """Token ids, from the text itself, from the file of that name, or, for "-", from stdin; any JSON list will do."""
    try:
        said = sys.stdin.read() if text == "-" else Path(text).read_text() if os.path.isfile(text) else text
        return [int(number) for number in re.split(r"[\s,\[\]]+", said) if number]
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{text!r} holds no token ids: expected whole numbers with blanks or commas between"
        ) from error


def _verify(args: argparse.Namespace) -> int:
    """Exit status 1 where an invariant does not hold."""
    found = open_cache(args.cache).verify()
    if args.json:
        print(json.dumps([violation._asdict() for violation in found], indent=2))
    else:
        for violation in found:
            print(f"invariant {violation.number} ({violation.name}): {violation.detail}")
        if not found:
            print("sound: every invariant holds")
    return 1 if found else 0


def _dump(args: argparse.Namespace) -> int:
    reading = open_cache(args.cache)
    inspect.dump(reading, args.file)
    if args.json:
        print(json.dumps({"name": reading.name, "file": args.file, "bytes": len(reading.image)}, indent=2))
    else:
        print(f"{decimal(len(reading.image))}: the index of {reading.name}, token ids of its prompts and all")
    return 0


def _add_lease_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--older-than", metavar="SECONDS", type=float, default=0.0, help="only those held for longer")


def _add_stat_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--watch", metavar="SECONDS", type=_seconds,
        help="print rates every so many seconds, until Ctrl-C; with --json an object a line",
    )  # fmt: skip


def _seconds(text: str) -> float:
    """An argparse type."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.01 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0.01 to 86,400")
    return seconds


def _add_adapter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", metavar="ID", type=int, help="of this adapter")


def _add_tree_options(parser: argparse.ArgumentParser) -> None:
    _add_adapter(parser)
    parser.add_argument("--depth", metavar="N", type=int, help="no more than N branches deep")
    parser.add_argument("--min-refs", metavar="N", type=int, default=0, help="only what N leases or more pin")


def _add_explain_options(parser: argparse.ArgumentParser) -> None:
    _add_adapter(parser)
    parser.add_argument("--session", metavar="ID", type=int, default=0, help="as this session, whose tails it may use")
    parser.add_argument("--salt", metavar="TEXT", type=os.fsencode, help="with this salt")


LOOKS = {
    "ls": Look(
        "list the caches on this host", "List the caches on this host; those that can't be read with the reason.",
        "examples:\n  shmradix ls\n", (), _ls,
    ),
    "stat": Look(
        "sizes, fill and counters of a cache",
        "Sizes, fill and counters of a cache. CACHE is a name, or a file that dump made.",
        "examples:\n  shmradix stat llm --json\n  shmradix stat llm --watch 1\n", ("cache",), _stat, _add_stat_options,
    ),
    "workers": Look(
        "who uses a cache",
        "The processes that use a cache, what they hold and how much they found; dead ones until somebody reaps them.",
        "examples:\n  shmradix workers llm\n", ("cache",), _workers,
    ),
    "leases": Look(
        "who keeps which prompts", "The leases, the oldest first; those of dead workers until somebody reaps them.",
        "examples:\n  shmradix leases llm --older-than 60\n", ("cache",), _leases, _add_lease_options,
    ),
    "snapshots": Look(
        "the saved states in a cache", "The snapshots, the oldest first: see docs/snapshots.md for what they are.",
        "examples:\n  shmradix snapshots llm\n", ("cache",), _snapshots,
    ),
    "guards": Look(
        "who has the guards at this moment",
        "Who has the guards at this moment, for how long, and how often one was taken from a worker that had died.",
        "examples:\n  shmradix guards llm\n", ("cache",), _guards,
    ),
    "tree": Look(
        "the prompts in a cache",
        "The tree, a line for each run of blocks without a branch: its first tokens, its depth in blocks, its blocks, "
        "the leases that pin it, and how many uses and births in the cache ago it was last used.",
        "examples:\n  shmradix tree llm --depth 2\n", ("cache",), _tree, _add_tree_options,
    ),
    "explain": Look(
        "why a prompt is cached so far and no further",
        "Walk a prompt, token ids, a file of them or - for stdin, and say where the match ends and why. Block keys "
        "are taken as none.",
        "examples:\n  shmradix explain llm 1,2,3,4\n  shmradix explain llm prompt.txt --adapter 7\n",
        ("cache", "tokens"), _explain, _add_explain_options,
    ),
    "verify": Look(
        "check whether a cache is sound",
        "Check every invariant of the layout on a copy, which takes no lock and stops nobody. Exit status 1 where one "
        "does not hold.",
        "examples:\n  shmradix verify llm\n", ("cache",), _verify,
    ),
    "dump": Look(
        "copy a cache's index to a file",
        "Copy the index of a cache, with the token ids of its prompts and without KV bytes, to a new file, which the "
        "other commands take in place of a name.",
        "examples:\n  shmradix dump llm llm.shmradix && shmradix stat ./llm.shmradix\n", ("cache", "file"), _dump,
    ),
}  # fmt: skip


def age(since: float) -> str:
    """How long ago a unix time was, in one unit: "3 min"."""
    return span(max(0.0, time.time() - since))


def span(seconds: float) -> str:
    """A time in one unit."""
    for limit, step, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / step:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def ratio(value: float | None) -> str:
    """A share in percent, "-" where there is none."""
    return "-" if value is None else f"{value:.1%}"


def _plain(value: object) -> str:
    return "unknown" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _table(*columns: str) -> Table:
    table = Table(box=None, show_header=any(columns), pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _show(table: Table) -> int:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    console.print(table)
    return 0


def _print_json(report: object) -> int:
    print(json.dumps(report, indent=2))
    return 0
