"""A thread that runs compiled sequences in order, while the thread that asks for them goes on noting down."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Background:
    """Runs jobs one after another."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` after those submitted before. After one has failed, none runs until ``drain`` has said so."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="tpu_compile-deferred", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def drain(self) -> None:
        """Wait until every job has run.

        Raises:
            DeviceError: what a job raised since the last time.
        """
        if self._thread is None:
            return
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if self._error is None or getattr(job, "__self__", None).__class__ is threading.Event:
                    job()
            except BaseException as error:
                self._error = error
            del job  # and with it the buffers that it ran on


background = Background()
