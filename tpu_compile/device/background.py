"""A thread that runs compiled sequences in order, while the thread that asks for them goes on noting down."""

from __future__ import annotations

import atexit
import queue
import threading
from collections import deque
from collections.abc import Callable

MOST_WAITING = 16
"""Jobs that may wait: a loop that reads nothing runs ahead of the device by no more, and holds no more memory."""


class Background:
    """Runs jobs one after another."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], threading.Lock] | None] = queue.SimpleQueue()
        self._latest: deque[threading.Lock] = deque()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closed = False

    def submit(self, job: Callable[[], object]) -> threading.Lock:
        """Run ``job`` after those submitted before; after one has failed, none runs until ``drain`` has said so.

        Waits while ``MOST_WAITING`` others are not over. Returns a lock that is held until the job is over.
        """
        over = threading.Lock()
        if self._closed:
            job()
            return over
        if self._thread is None or not self._thread.is_alive():
            if self._thread is None:
                atexit.register(self.close)
            self._jobs = queue.SimpleQueue()  # a forked child's would hold what its parent's thread was to run
            self._latest.clear()
            self._thread = threading.Thread(target=self._work, name="tpu_compile-deferred", daemon=True)
            self._thread.start()
        over.acquire()
        if len(self._latest) >= MOST_WAITING:
            with self._latest.popleft():
                pass
        self._latest.append(over)
        self._jobs.put((job, over))
        return over

    def drain(self) -> None:
        """Wait until every job has run.

        Raises:
            DeviceError: what a job raised since the last time.
        """
        if self._thread is None or not self._thread.is_alive():
            return
        with self.submit(_nothing):
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Run what waits and end the thread, at exit: one that Python's end meets inside XLA aborts the process. Jobs
        that come later run at once."""
        self._closed = True
        if self._thread is not None and self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (waiting := self._jobs.get()) is not None:
            job, over = waiting
            try:
                if self._error is None:
                    job()
            except BaseException as error:
                self._error = error
            del job, waiting  # and with them the buffers that it ran on
            over.release()


def _nothing() -> None:
    """What is submitted to know that all before it is over."""


background = Background()
