"""The kernels run uncompiled, from their own sources, on memory that records every store into it.

The modules are executed a second time with numba replaced: decorators do nothing, the atomics keep their plain bodies,
and the views that an entry point opens are arrays that note each store. So what runs is the very text that is compiled.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np

import shmradix
from shmradix.layout import Geometry
from shmradix.views import SLOT, make_handle

MODULES = (
    "allocation", "anchors", "atomics", "block_entries", "claim_entries", "claims", "entries", "guard", "hashing",
    "heap", "index", "leases", "pool", "recovery", "retention", "sections", "snapshot_entries", "snapshot_views",
    "snapshots", "tree", "views",
)  # fmt: skip
"""The modules with kernels; the others are the same compiled and not."""

Change = tuple[str, str, str]  # a module, a piece of its text, what stands there instead
SOURCES = Path(shmradix.__file__).parent


class Store(NamedTuple):
    """One store that changed the image: the 64-bit word it is in, what that is now, whether it keeps the order."""

    word: int
    value: int
    ordered: bool  # atomic: what comes before it in the source is stored before it, what comes after it after it


class Tape:
    """An image, and the stores made in it, in their order."""

    def __init__(self, image: np.ndarray) -> None:
        self.image = image
        self.stores: list[Store] = []
        self.count = 0  # with those that stored what was there
        self._words = image.view(np.uint64)
        self._before = self._words.copy()

    def note(self, ordered: bool) -> None:
        """Note the store that was just made."""
        self.count += 1
        changed = (self._words != self._before).nonzero()[0]
        if changed.size:
            word = int(changed[0])
            assert changed.size == 1, "a store of more than a word: take it apart"
            self.stores.append(Store(word, int(self._words[word]), ordered))
            self._before[word] = self._words[word]


class Counted(np.ndarray):
    """An array over an image whose stores, those of its views too, are noted on the tape."""

    tape: ClassVar[Tape | None] = None
    ordered: ClassVar[bool] = False

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            for i in range(*index.indices(len(self))):
                self[i] = value
            return
        super().__setitem__(index, value)
        if Counted.tape is not None:
            Counted.tape.note(self.ordered)


class Words(Counted):
    """The int64 words that the atomics work on."""

    ordered: ClassVar[bool] = True


def _carray(address: Any, shape: tuple[Any, ...], dtype: Any) -> np.ndarray:
    """numba's `carray` for plain code, the address taken as the pointer."""
    size = int(np.prod([int(n) for n in shape])) * np.dtype(dtype).itemsize
    memory = (ctypes.c_uint8 * size).from_address(int(address))
    return np.ndarray(shape, dtype, buffer=memory).view(Words if dtype is np.int64 else Counted)


class _Absent:
    """Stands for numba and llvmlite: whatever is taken from it, called or used to decorate is absent, too."""

    carray = staticmethod(_carray)

    def __getattr__(self, name: str) -> _Absent:
        return self

    def __call__(self, *args: Any, **named: Any) -> _Absent:
        return self


def _same(function: Any) -> Any:
    return function


_ABSENT = _Absent()
_COMPILE = SimpleNamespace(kernel=_same, inlined=_same, opener=_same, entry=lambda signature: _same)


class Kernels:
    """The plain modules as attributes; `changes` are made in their texts first, to see that faults are found."""

    entries: Any

    def __init__(self, *changes: Change) -> None:
        self._texts = {name: (SOURCES / f"{name}.py").read_text() for name in MODULES}
        for module, old, new in changes:
            assert self._texts[module].count(old) == 1, f"{module}.py: not once in it: {old}"
            self._texts[module] = self._texts[module].replace(old, new)
        self._modules: dict[str, ModuleType] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in MODULES:
            return _COMPILE if name == "compile" else importlib.import_module(f"shmradix.{name}")
        if name not in self._modules:
            module = self._modules[name] = ModuleType(f"plain.{name}")
            vars(module)["__builtins__"] = {**vars(builtins), "__import__": self._import}
            exec(compile(self._texts[name], str(SOURCES / f"{name}.py"), "exec"), vars(module))
            if name == "atomics":
                vars(module)["as_pointer"] = _same
        return self._modules[name]

    def _import(self, name: str, globals_: Any = None, locals_: Any = None, names: Any = (), level: int = 0) -> Any:
        package, _, module = name.partition(".")
        if package == "shmradix":
            return getattr(self, module) if module else self
        if package in ("numba", "llvmlite"):
            return _ABSENT
        return builtins.__import__(name, globals_, locals_, names, level)

    def record(
        self,
        image: np.ndarray,
        geometry: Geometry,
        slot: int,
        call: Callable[[Any, int], Any],
        module: str = "entries",
    ) -> tuple[Tape, Any]:
        """Run `call(entries, handle)` as the worker of `slot` on a copy of a segment: its stores, its answer."""
        copy = image.copy()
        tape, handle = Tape(copy), handle_on(copy, geometry, slot)
        Counted.tape = tape
        try:
            with np.errstate(over="ignore"):
                answer = call(getattr(self, module), handle.ctypes.data)
        finally:
            Counted.tape = None
        return tape, answer


def handle_on(image: np.ndarray, geometry: Geometry, slot: int) -> np.ndarray:
    """A handle of the worker of `slot` on a segment's image, for entry points compiled or plain."""
    handle = make_handle(geometry.views(image), geometry)
    handle[SLOT] = slot
    return handle


def make(image: np.ndarray, stores: Iterable[Store]) -> np.ndarray:
    """Make the stores in the image."""
    words = image.view(np.uint64)
    for store in stores:
        words[store.word] = store.value
    return image
