"""The tree of a reading: for people, with runs of single children as one, and the walk that says why a prompt ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shmradix.inputs import NO_KEYS, Ids, as_namespace, as_tokens
from shmradix.inspect.reading import Reading
from shmradix.layout import HIDDEN, PENDING, TAIL
from shmradix.prefix_hash import prefix_hashes


@dataclass(frozen=True)
class Run:
    """Nodes below each other without a branch: those from depth `depth` on, of one adapter's namespace."""

    depth: int
    """Blocks above it."""
    level: int
    """Branches above it."""
    block_ids: list[int]
    tokens: list[int]
    leases: int
    """That pin a node of it."""
    idle: int
    """Uses and births in the cache since its last node was used."""
    adapter_id: int
    is_salted: bool


@dataclass(frozen=True)
class Other:
    """A namespace that has more of a prompt: its adapter, whether it is salted, and how many tokens it has."""

    adapter_id: int
    is_salted: bool
    matched_tokens: int


@dataclass(frozen=True)
class Candidate:
    """A snapshot of a prefix of the prompt, and why a lookup can't resume from it; "" where it can."""

    tokens: int
    session: int
    slot: int | None
    tier_key: int | None
    obstacle: str


@dataclass(frozen=True)
class Explanation:
    """How far a prompt is cached, in which blocks, why no further, who has more of it, and the saved states of it."""

    prompt_tokens: int
    matched_tokens: int
    block_ids: list[int]
    reason: str
    others: list[Other]
    snapshots: list[Candidate]


class _Tree:
    """The live nodes of a reading that a lookup can see, each with its children, the oldest first."""

    def __init__(self, reading: Reading) -> None:
        views = reading.views
        self.views, self.clock = views, int(views.state["clock"][0])
        self.first_block_node = 1 + reading.geometry.max_namespaces
        born = views.nodes["born"]
        live = np.flatnonzero(born)
        live = live[np.argsort(born[live], kind="stable")]
        self.children: dict[int, list[int]] = {}
        for node, parent in zip(live.tolist(), views.nodes["parent"][live].tolist()):
            if node >= self.first_block_node:
                self.children.setdefault(parent, []).append(node)
        epochs, epoch = views.namespaces["epoch"], int(views.state["epoch"][0])
        self.roots = [int(node) for node in live if 0 < node < self.first_block_node and epochs[node] == epoch]

    def namespace(self, root: int) -> tuple[int, bool]:
        record = self.views.namespaces[root]
        return int(record["adapter_id"]), bool(record["salt"].any())


def runs(reading: Reading) -> Iterator[Run]:
    """Every run of the tree, each before those below it; namespaces and siblings from the oldest on."""
    tree = _Tree(reading)
    nodes, tokens = tree.views.nodes, tree.views.tokens
    for root in tree.roots:
        adapter_id, is_salted = tree.namespace(root)
        waiting = [(node, 0, 0) for node in reversed(tree.children.get(root, []))]
        while waiting:
            node, depth, level = waiting.pop()
            run = [node]
            while len(below := tree.children.get(run[-1], [])) == 1:
                run.append(below[0])
            yield Run(
                depth, level, nodes["block"][run].tolist(), tokens[run].reshape(-1).tolist(),
                int(nodes["leases"][run].sum()), tree.clock - int(nodes["last_use"][run[-1]]), adapter_id, is_salted,
            )  # fmt: skip
            waiting += [(child, depth + len(run), level + 1) for child in reversed(below)]


def explain(
    reading: Reading, tokens: Ids, adapter_id: int = 0, salt: bytes | None = None, session: int = 0
) -> Explanation:
    """Walk a prompt down the tree, as a lookup without block keys does. Raises TypeError or ValueError as that does."""
    ids, tree = as_tokens(tokens), _Tree(reading)
    wanted = as_namespace(adapter_id, salt).tobytes()
    root, others = 0, []
    for candidate in tree.roots:
        record = tree.views.namespaces[candidate]
        if np.array([record["adapter_id"], *record["salt"]], np.uint64).tobytes() == wanted:
            root = candidate
        else:
            others.append((candidate, _walk(tree, candidate, ids)))
    path = _walk(tree, root, ids) if root else []
    size = reading.geometry.block_size
    better = [
        Other(*tree.namespace(candidate), len(found) * size) for candidate, found in others if len(found) > len(path)
    ]
    reason = _reason(tree, path[-1] if path else root, ids, len(path) * size, size)
    blocks = tree.views.nodes["block"][path].tolist()
    states = _candidates(reading, ids, len(path) * size, wanted, session)
    return Explanation(len(ids), len(path) * size, blocks, reason, better, states)


def _candidates(reading: Reading, ids: np.ndarray, matched: int, namespace: bytes, session: int) -> list[Candidate]:
    """The snapshots of prefixes of the prompt, the shortest first."""
    views, records = reading.views, reading.views.snapshots
    depths = records["token_count"]
    near = 1 + np.flatnonzero((records["born"][1:] != 0) & (depths[1:] > 0) & (depths[1:] <= len(ids)))
    near = near[np.argsort(depths[near], kind="stable")]
    seed, size = int(views.header["hash_seed"][0]), reading.geometry.block_size
    hashes = prefix_hashes(seed, ids, NO_KEYS, size, depths[near].tolist())
    epoch, found = int(views.state["epoch"][0]), []
    for at, digest in zip(near.tolist(), hashes):
        record = records[at]
        whose = np.array([record["adapter_id"], *record["salt"]], np.uint64).tobytes()
        if whose != namespace or not np.array_equal(record["prefix_hash"], digest):
            continue
        flags, owner, key = int(record["flags"]), int(record["session"]), int(record["tier_key"])
        obstacle = (
            "from before the last clear()" if record["epoch"] != epoch
            else "not committed yet" if flags & PENDING
            else "displaced" if flags & HIDDEN
            else f"of session {owner} alone" if flags & TAIL and owner != session
            else f"deeper than the {matched} tokens that are cached" if depths[at] > matched
            else ""
        )  # fmt: skip
        slot = None if key else int(record["slot"])
        found.append(Candidate(int(record["token_count"]), owner, slot, key or None, obstacle))
    return found


def _walk(tree: _Tree, root: int, ids: np.ndarray) -> list[int]:
    """The nodes that hold the prompt's full blocks, from the root on."""
    size, path, at = tree.views.tokens.shape[1], list[int](), root
    for start in range(0, len(ids) - len(ids) % size, size):
        for child in tree.children.get(at, []):
            is_same = np.array_equal(tree.views.tokens[child], ids[start : start + size])
            if is_same and not tree.views.nodes["block_key"][child]:
                path.append(child)
                at = child
                break
        else:
            break
    return path


def _reason(tree: _Tree, node: int, ids: np.ndarray, matched: int, size: int) -> str:
    """Why the match ends at `node`."""
    if not node:
        return "nothing is cached for this adapter and salt"
    rest = ids[matched : matched + size]
    if len(rest) == 0:
        return "the whole prompt is cached"
    if len(rest) < size:
        return f"the last {len(rest)} tokens do not fill a block of {size}"
    children = tree.children.get(node, [])
    if not children:
        return f"nothing is cached behind token {matched - 1}"
    agree = [int(np.argmin(np.append(tree.views.tokens[child] == rest, False))) for child in children]
    best = int(np.argmax(agree))
    if agree[best] == size:
        key = int(tree.views.nodes["block_key"][children[best]])
        return f"from token {matched} on it is cached with a block key only, {key:#x}"
    at, child = agree[best], children[best]
    where = f"{len(children)} blocks that follow token {matched - 1}" if matched else f"{len(children)} first blocks"
    return (
        f"token {matched + at} is {ids[matched + at]}, and {tree.views.tokens[child][at]} in the nearest of {where}, "
        f"block {tree.views.nodes['block'][child]}"
    )
