"""Atomic operations on the 64-bit words of an array, and the order of stores.

Each is a plain function, used as it stands where kernels run uncompiled, with an overload for compiled code over LLVM's
own atomics. Words are int64 in shared memory, 8-byte aligned.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload


def compare_and_swap(words, index, expected, new):
    """Store `new` in `words[index]` if it holds `expected`; return what it held. Acquires and releases."""
    old = words[index]
    if old == expected:
        words[index] = new
    return old


def exchange(words, index, new):
    """Store `new` in `words[index]` and return what it held. Acquires and releases."""
    old = words[index]
    words[index] = new
    return old


def load_acquire(words, index):
    """`words[index]`; no later access is done before it."""
    return words[index]


def store_release(words, index, value):
    """Set `words[index]`; for whoever sees the memory after this process died, too, no access moves across it."""
    words[index] = value


def _pointer(builder, address):
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


_word = types.int64


@intrinsic
def _compare_and_swap(typing_context, address, expected, new):
    def generate(context, builder, signature, args):
        pair = builder.cmpxchg(_pointer(builder, args[0]), args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 0)

    return _word(_word, _word, _word), generate


@intrinsic
def _exchange(typing_context, address, new):
    def generate(context, builder, signature, args):
        return builder.atomic_rmw("xchg", _pointer(builder, args[0]), args[1], "acq_rel")

    return _word(_word, _word), generate


@intrinsic
def _load_acquire(typing_context, address):
    def generate(context, builder, signature, args):
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8)

    return _word(_word), generate


@intrinsic
def _store_release(typing_context, address, value):
    def generate(context, builder, signature, args):
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(_word, _word), generate


@intrinsic
def as_pointer(typing_context, address):
    """The untyped pointer with this address: only in compiled code."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@overload(compare_and_swap)
def _compiled_compare_and_swap(words, index, expected, new):
    return lambda words, index, expected, new: _compare_and_swap(words.ctypes.data + index * 8, expected, new)


@overload(exchange)
def _compiled_exchange(words, index, new):
    return lambda words, index, new: _exchange(words.ctypes.data + index * 8, new)


@overload(load_acquire)
def _compiled_load_acquire(words, index):
    return lambda words, index: _load_acquire(words.ctypes.data + index * 8)


@overload(store_release)
def _compiled_store_release(words, index, value):
    return lambda words, index, value: _store_release(words.ctypes.data + index * 8, value)
