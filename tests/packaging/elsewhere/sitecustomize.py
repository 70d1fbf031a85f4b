"""With this folder on PYTHONPATH, Python finds what macOS has: no /proc, and none of Linux's own names.

Not ``sys.platform == "darwin"``: other packages would load libraries of macOS.
"""

import builtins
import errno
import io
import mmap
import os
import resource
import select
import signal
import socket
import sys
import sysconfig
import time

#: names that CPython's documentation marks as Linux's, or as not there on macOS.
NAMES = {
    os: (
        "sched_getaffinity sched_setaffinity sched_getscheduler sched_setscheduler posix_fadvise posix_fallocate "
        "fdatasync pidfd_open copy_file_range splice memfd_create eventfd getxattr setxattr listxattr removexattr "
        "getresuid getresgid setresuid setresgid getrandom waitid pipe2 unshare setns O_DIRECT O_TMPFILE O_PATH "
        "O_NOATIME O_RSYNC POSIX_FADV_DONTNEED POSIX_FADV_WILLNEED POSIX_FADV_SEQUENTIAL POSIX_FADV_RANDOM SCHED_BATCH "
        "SCHED_IDLE"
    ),
    signal: "sigwaitinfo sigtimedwait pthread_getcpuclockid SIGRTMIN SIGRTMAX SIGPOLL SIGPWR SIGSTKFLT SIGCLD",
    time: "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
    mmap: "MAP_NORESERVE MAP_POPULATE MAP_DENYWRITE MAP_EXECUTABLE MAP_STACK MADV_HUGEPAGE MADV_DONTFORK MADV_DODUMP",
    resource: "RUSAGE_THREAD RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_SIGPENDING RLIMIT_MSGQUEUE prlimit",
    select: "epoll EPOLLIN",
    socket: "AF_NETLINK AF_VSOCK AF_ALG",
}
#: folders that macOS has not.
FOLDERS = ("/proc", "/sys", "/dev/shm")


def _hidden(path):
    try:
        text = os.fsdecode(path)
    except TypeError:  # a descriptor
        return False
    return any(text == folder or text.startswith(folder + "/") for folder in FOLDERS)


def _without_folders(function):
    def call(path=".", *args, **more):
        if _hidden(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))
        return function(path, *args, **more)

    return call


def hide():
    """Take them away from this process."""
    sysconfig.get_config_vars()  # of a file that is named after the platform
    for module, names in NAMES.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in ("listdir", "lstat", "open", "readlink", "scandir", "stat", "statvfs"):
        setattr(os, name, _without_folders(getattr(os, name)))
    builtins.open = io.open = _without_folders(io.open)
    sys.platform = "elsewhere"


hide()
