"""Makes the k-th system call of a child fail: a seccomp filter asks us about each, and we let it through, or do not.

It needs neither root nor a compiler, and unlike a preloaded library it meets the calls inside the C library, too.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import platform
import select
import signal
import socket
import struct
import time
from collections.abc import Callable

# What is never asked about. A futex wait that fails with an error of our choice aborts the C library; a `close` or
# `munmap` that is not done is a leak by itself (the kernel's own do what they shall even where they report an error);
# some can't fail; the filter's descriptor goes to the parent by `sendmsg`.
_FREE = {
    "x86_64": {"futex": 202, "close": 3, "munmap": 11, "rt_sigreturn": 15, "exit": 60, "exit_group": 231,
               "getpid": 39, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "sendmsg": 46},
    "aarch64": {"futex": 98, "close": 57, "munmap": 215, "rt_sigreturn": 139, "exit": 93, "exit_group": 94,
                "getpid": 172, "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "sendmsg": 211},
}  # fmt: skip
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_PR_SET_NO_NEW_PRIVS, _SET_MODE_FILTER, _NEW_LISTENER = 38, 1, 8
_ALLOW, _ASK = 0x7FFF_0000, 0x7FC0_0000  # SECCOMP_RET_ALLOW, SECCOMP_RET_USER_NOTIF
_RECEIVE, _ANSWER = 0xC050_2100, 0xC018_2101  # SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND
_GO_ON = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE, Linux 5.5
_NOTIFICATION = struct.Struct("<Q2Ii I Q 6Q")  # struct seccomp_notif: id, pid, flags, call, machine, where, arguments
_REPLY = struct.Struct("<QqiI")  # struct seccomp_notif_resp: id, value, error, flags
_MARK = 0x5EED_CA11 & 0x7FFF_FFFF  # first argument of a `prctl` that is meant for us

PATIENCE = 60.0  # seconds without any call: it hangs
_ENDLESS = 20_000  # calls within one use

_libc = ctypes.CDLL(None, use_errno=True)


class NoSuchFilter(Exception):
    """This machine does not let us filter; says why."""


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def _listen() -> int:
    """Have each further system call of this thread asked about; the descriptor on which to answer."""
    machine = platform.machine()
    if machine not in _SECCOMP:
        raise NoSuchFilter(f"the numbers of {machine}'s system calls are not known here")
    free = sorted(_FREE[machine].values())
    load, equal, answer = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    program = [
        _Instruction(load, 0, 0, 0),
        *(_Instruction(equal, len(free) - at, 0, number) for at, number in enumerate(free)),
        _Instruction(answer, 0, 0, _ASK),
        _Instruction(answer, 0, 0, _ALLOW),
    ]
    code = (_Instruction * len(program))(*program)
    filled = _Program(len(program), code)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    fd = _libc.syscall(_SECCOMP[machine], _SET_MODE_FILTER, _NEW_LISTENER, ctypes.byref(filled))
    if fd < 0:
        raise NoSuchFilter(f"no seccomp filter with a listener: {os.strerror(ctypes.get_errno())}")
    return int(fd)


def fail(kth: int, error: int) -> None:
    """In the child: from now on count, and let the `kth` system call fail with `error`."""
    _libc.prctl(_MARK, kth, error)


def count() -> tuple[int, int]:
    """In the child: let all calls through again. How many were counted, and the number of the one that failed."""
    answer = _libc.prctl(_MARK, 0, 0)
    return answer & 0xFFFF, answer >> 16


class _Supervisor:
    """Answers a child's filter."""

    def __init__(self, listener: int) -> None:
        self.listener = listener
        self.kth = self.error = self.calls = self.failed = 0

    def answer(self) -> None:
        asked = bytearray(_NOTIFICATION.size)
        fcntl.ioctl(self.listener, _RECEIVE, asked)
        identity, _, _, number, _, _, *arguments = _NOTIFICATION.unpack(asked)
        reply = (identity, 0, 0, _GO_ON)
        if arguments[0] == _MARK:
            reply = (identity, self.failed << 16 | self.calls & 0xFFFF, 0, 0)
            self.kth, self.error, self.calls, self.failed = arguments[1], arguments[2], 0, 0
        elif self.kth:
            self.calls += 1
            if self.calls == self.kth:
                self.failed, reply = number, (identity, 0, -self.error, 0)
        fcntl.ioctl(self.listener, _ANSWER, _REPLY.pack(*reply))

    def where(self) -> str:
        if not self.kth:
            return ""
        return f" after call {self.kth} (number {self.failed}) had failed with {errno.errorcode[self.error]}"


def supervised(work: Callable[[], str]) -> str:
    """Run `work`, which calls `fail` and `count`, in a forked child: what it returned or raised, or how it ended.

    Raises NoSuchFilter where this machine has none.
    """
    ours, theirs = socket.socketpair()
    said, said_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(work, theirs, said_end)
    theirs.close()
    os.close(said_end)
    try:
        with ours:
            ours.settimeout(PATIENCE)
            message, descriptors, _, _ = socket.recv_fds(ours, 1000, 1)
        if not descriptors:
            raise NoSuchFilter(message.decode())
        return _converse(pid, descriptors[0], said)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(said)


def _child(work: Callable[[], str], theirs: socket.socket, said_end: int) -> None:
    try:
        listener = _listen()
        # The raw call: what `socket.send_fds` does around it might ask, and nobody answers yet.
        theirs.sendmsg([b"listener"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener]))])
        os.close(listener)
        answer = work()
    except NoSuchFilter as error:
        theirs.send(str(error).encode())
        os._exit(1)
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"
    os.write(said_end, answer.encode()[:60_000] or b"nothing")
    signal.pause()  # until the parent has read it and kills us: so it knows our death from an answer
    os._exit(1)


def _converse(pid: int, listener: int, said: int) -> str:
    supervisor, poll = _Supervisor(listener), select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(said, select.POLLIN)
    try:
        while True:
            ready = dict(poll.poll(PATIENCE * 1000))
            if not ready:
                return f"hung{supervisor.where()}"
            if supervisor.calls > _ENDLESS:
                return f"went on and on{supervisor.where()}"
            if said in ready:
                if answer := os.read(said, 65_536):
                    return answer.decode()
                return f"ended by itself{supervisor.where()}: {_end(pid)}"
            if ready.get(listener, 0) & select.POLLIN:
                supervisor.answer()
            else:
                time.sleep(0.001)  # the child is dying: the end of its pipe comes next
    finally:
        os.close(listener)


def _end(pid: int) -> str:
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert status is not None
    return f"{'exit status' if status.si_code == os.CLD_EXITED else 'signal'} {status.si_status}"
