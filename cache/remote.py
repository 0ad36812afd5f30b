"""A second, shared level by URL through fsspec: read through, written behind, never in the way.

A look-up waits ``cache_remote_timeout`` at most; after three failures in a row the remote is left alone for the rest of
the process. Writes go through one background thread, and at exit the last ones get that much time again.
"""

from __future__ import annotations

import atexit
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from tpu_compile.cache.entry import Entry, Rejected, decode
from tpu_compile.cache.faults import report
from tpu_compile.config import config
from tpu_compile.errors import CacheError, MissingDependency
from tpu_compile.stats import count

log = logging.getLogger("tpu_compile.cache")
_FAILURES_BEFORE_GIVING_UP = 3
_MOST_PENDING = 256
_Result = TypeVar("_Result")


class Remote:
    """Entries below one URL, as ``<url>/entries/<digest>``."""

    def __init__(self, url: str, *, write: bool = False) -> None:
        self.url = url
        self.write = write
        self._failures = 0
        self._files: tuple[Any, str] | None = None
        self._pending: queue.Queue[tuple[str, bytes]] = queue.Queue(_MOST_PENDING)
        self._writer: threading.Thread | None = None
        self._lock = threading.Lock()
        self._error: CacheError | None = None

    def fetch(self, digest: str, secret: bytes = b"") -> tuple[Entry, bytes] | None:
        """The checked entry and its file, or None. Never raises for what the remote does, never waits long."""
        if self._given_up:
            return None
        data = self._attempt("read", lambda: self._in_time(lambda: self._read(digest)))
        if data is None:
            count("remote_misses")
            return None
        try:
            return decode(data, digest, secret), data
        except Rejected as fault:
            report(f"remote {fault.kind}", f"Entry {digest} of {self.url} is not used: {fault}.")
            return None

    def push(self, digest: str, data: bytes) -> None:
        """Write an entry in the background; when too many are waiting, this one stays local."""
        if self._given_up:
            return
        self._start_writer()
        try:
            self._pending.put_nowait((digest, data))
        except queue.Full:
            report("remote queue", f"{self.url} is slower than the compiler; some entries are not written there.")

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything pushed is written (or has failed). False when ``timeout`` seconds were not enough.

        Raises:
            CacheError: a write failed, and ``config.raise_cache_errors`` is on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._pending.all_tasks_done:
            while self._pending.unfinished_tasks:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._pending.all_tasks_done.wait(left)
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    @property
    def _given_up(self) -> bool:
        return self._failures >= _FAILURES_BEFORE_GIVING_UP

    def _attempt(self, action: str, work: Callable[[], _Result]) -> _Result | None:
        try:
            result = work()
        except Exception as fault:  # every fsspec backend raises its own library's errors; all of them end in a report
            self._failures += 1
            more = " It is not asked again in this process." if self._given_up else ""
            report(f"remote {action}", f"Cannot {action} the remote cache {self.url}: {_describe(fault)}.{more}")
            return None
        self._failures = 0
        return result

    def _in_time(self, work: Callable[[], _Result]) -> _Result:
        """Run ``work`` in a thread of its own, which is left behind when it does not finish in time."""
        done: queue.Queue[tuple[bool, Any]] = queue.Queue()

        def run() -> None:
            try:
                done.put((True, work()))
            except BaseException as fault:  # handed to the thread that waits
                done.put((False, fault))

        threading.Thread(target=run, name="tpu-compile-remote-read", daemon=True).start()
        limit = config.cache_remote_timeout
        try:
            finished, value = done.get(timeout=limit)
        except queue.Empty:
            raise TimeoutError(f"no answer within {limit:g} s") from None
        if not finished:
            raise value
        return value  # type: ignore[no-any-return]

    def _read(self, digest: str) -> bytes | None:
        files, root = self._open()
        try:
            return bytes(files.cat_file(f"{root}/entries/{digest}"))
        except FileNotFoundError:
            return None

    def _write(self, digest: str, data: bytes) -> bool:
        """Object stores replace an object at once; a file system needs the rename to be as good."""
        files, root = self._open()
        path = f"{root}/entries/{digest}"
        if "file" not in _protocols(files):
            files.pipe_file(path, data)
            return True
        files.makedirs(f"{root}/entries", exist_ok=True)
        temporary = f"{root}/entries/.tmp-{secrets.token_hex(8)}"
        files.pipe_file(temporary, data)
        files.mv(temporary, path)
        return True

    def _open(self) -> tuple[Any, str]:
        with self._lock:
            if self._files is None:
                try:
                    from fsspec.core import url_to_fs  # type: ignore[import-untyped]
                except ImportError:
                    raise MissingDependency("fsspec", "the knob cache_remote", "fsspec") from None
                files, root = url_to_fs(self.url, use_listings_cache=False)
                self._files = files, str(root).rstrip("/")
            return self._files

    def _start_writer(self) -> None:
        with self._lock:
            if self._writer is None:
                atexit.register(self._flush_at_exit)
            if self._writer is None or not self._writer.is_alive():
                # A forked child has the object and not the thread; what waits in the queue is the parent's to write.
                self._pending = queue.Queue(_MOST_PENDING)
                name, work = "tpu-compile-remote-write", (self._pending,)
                self._writer = threading.Thread(target=self._write_pending, args=work, name=name, daemon=True)
                self._writer.start()

    def _write_pending(self, pending: queue.Queue[tuple[str, bytes]]) -> None:
        while True:
            digest, data = pending.get()
            try:
                if not self._given_up and self._attempt("write to", partial(self._write, digest, data)):
                    count("remote_puts")
            except CacheError as error:
                self._error = error  # raise_cache_errors: flush raises it, in a thread that somebody watches
            finally:
                pending.task_done()

    def _flush_at_exit(self) -> None:
        if not self.flush(config.cache_remote_timeout):
            log.warning("the last entries were not written to %s in time", self.url)


def _protocols(files: Any) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)


def _describe(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {fault}".rstrip(".: ")
