"""Step time, utilisation, memory and the largest batch of a workload on TPUs that are not there.

Everything comes from compiling: a program that libtpu compiles fits, and its schedule gives the time; one that it
refuses does not, and it says by how much. The largest batch is found on a line through two compiles (bytes needed
against batch), and confirmed by a third. Near a chip's limit libtpu begins to compute values again in place of keeping
them, so that larger ones may fit too, and take longer: ``exact`` bisects to the last of them. Only what is timed is
compiled to the end: the others are stopped when their buffers have places in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from typing import Any

from tpu_compile.errors import OutOfMemory
from tpu_compile.executables import options_in_force
from tpu_compile.runtime.topology import workers
from tpu_compile.targets.analysis import analyse, misfit
from tpu_compile.targets.chips import Chip, chip, slice_name
from tpu_compile.targets.compiling import compile_for, hbm_for
from tpu_compile.targets.workload import Load, Workload

_TRIES = 4
"""Compiles that look for the largest batch before it is left at the largest one that was seen to fit."""
_NEAR = 1.1
"""Times a batch that was seen to fit: nothing nearer is tried."""
_FAR = 16
"""Times the first batch: the second of a line is no larger."""
_MEMORY = 5 << 30
"""Bytes that compiles at the same time may take together."""


@dataclass(frozen=True)
class Point:
    """A workload at one batch size on one chip.

    Attributes:
        needed, available: bytes of HBM; from libtpu's refusal if it ``fits`` not. ``arguments`` are part of them.
        seconds: of a step; 0 where it does not fit, or only its memory was asked for. ``by_libtpu`` of them are
            libtpu's own cycles, the rest and ``roofline`` (the least possible) are ours.
        flops: of matrix products in the compiled program, ``bytes`` its HBM traffic.
        model_flops: of the model's own products.
    """

    batch: int
    items: int
    needed: int
    available: int
    fits: bool
    seconds: float = 0.0
    by_libtpu: float = 0.0
    roofline: float = 0.0
    flops: int = 0
    bytes: int = 0
    model_flops: int = 0
    arguments: int = 0


@dataclass(frozen=True)
class Estimate:
    """What a chip does with a workload.

    Attributes:
        asked: at the batch size asked for.
        timed: where the time was taken: ``asked``, or a smaller batch where that does not fit; None if none fits.
        largest: the largest batch that fits, its memory alone; None where none does, or it was not looked for.
        confirmed: how sure ``largest`` is.
        note: how the figures came about, where not in the ordinary way.
    """

    target: str
    unit: str
    asked: Point
    timed: Point | None
    largest: Point | None
    confirmed: str
    note: str = ""

    @property
    def chip(self) -> Chip:
        return chip(self.target)

    @property
    def utilisation(self) -> float:
        """Model flops over the chip's bf16 peak, at the batch that was timed."""
        if self.timed is None or not self.timed.seconds:
            return 0.0
        return self.timed.model_flops / self.timed.seconds / self.chip.peak("bf16")

    @property
    def rate(self) -> float:
        """Tokens, or examples, a second."""
        return self.timed.items / self.timed.seconds if self.timed and self.timed.seconds else 0.0


@dataclass
class Estimator:
    """Compiles a workload for one chip after another.

    Args:
        largest: look for the largest batch.
        exact: by bisection, to the last example.
        tell: hears what is being compiled.
        at_once: chips that are compiled for at the same time, each in a process of its own.
    """

    workload: Workload
    largest: bool = True
    exact: bool = False
    tell: Callable[[str], None] = lambda _: None
    at_once: int = 2
    _points: dict[tuple[str, int], Point] = field(default_factory=dict)
    _timed: set[tuple[str, int]] = field(default_factory=set)

    def estimate(self, targets: Sequence[str], batch: int | None = None) -> list[Estimate]:
        """One estimate a target, in order.

        Args:
            batch: the batch size to time; None for the factory's own.

        Raises:
            ConfigError: a target that does not exist.
            CompilationFailed: XLA rejected the program, other than for its size.
        """
        names = [slice_name(target) for target in targets]
        for name in names:
            chip(name)
        asked = self.workload.own_batch if batch is None else batch
        return list(self._all(names, asked))

    def _all(self, names: Sequence[str], asked: int) -> Iterator[Estimate]:
        with workers(self.at_once, _MEMORY), ThreadPoolExecutor(self.at_once) as pool:
            running = [pool.submit(copy_context().run, self._one, name, asked) for name in names]
            found = [each.result() for each in running]
        roomy = next((e for e in found if e.timed is not None), None)
        for each in found:
            if each.timed is None and roomy is not None and roomy.timed is not None:
                yield _borrowed(each, roomy)
            else:
                yield each

    def _one(self, name: str, asked: int) -> Estimate:
        point = self.point(name, asked, timed=True)
        timed, note = (point, "") if point.fits else self._smaller(name, asked)
        largest, confirmed = None, "not looked for"
        if self.largest and timed is not None:
            largest, confirmed = self._largest(name, timed)
        return Estimate(name, self.workload.load(asked).unit, point, timed, largest, confirmed, note)

    def point(self, name: str, batch: int, *, timed: bool = False) -> Point:
        """One compile (or none, if it is in the cache): up to its memory, or ``timed``."""
        if (name, batch) not in (self._timed if timed else self._points):
            load = self.workload.load(batch)
            self.tell(f"{load.program.name}, batch {batch}, for {name}")
            self._points[name, batch] = measured(load, name) if timed else sized(load, name)
            self._timed |= {(name, batch)} if timed else set()
        return self._points[name, batch]

    def _smaller(self, name: str, asked: int) -> tuple[Point | None, str]:
        batch = asked // 2
        while batch:
            if self.point(name, batch).fits:
                point = self.point(name, batch, timed=True)
                return point, f"batch {asked} does not fit: time and rate are of batch {batch}"
            batch //= 2
        return None, f"does not fit, not even at batch {1 if asked > 1 else asked}"

    # ---- the largest batch

    def _largest(self, name: str, first: Point) -> tuple[Point, str]:
        """(the largest batch seen to fit, how sure that is)."""
        seen = [first, self.point(name, _second(first))]
        if self.exact:
            return self._bisected(name, *_around(seen))
        for tries in range(_TRIES):
            best, over = _around(seen)
            guess = _next(seen, tries)
            if guess <= best.batch or (tries and over is None and guess < _NEAR * best.batch):
                break
            seen.append(self.point(name, guess))
            if seen[-1].fits and over is not None:
                break
        best, over = _around(seen)
        sure = "compiled" if best in seen[:2] else "confirmed by a compile"
        beyond = f"batch {over.batch} does not fit" if over else "the line through two others ends there"
        return best, f"{sure}; {beyond}"

    def _bisected(self, name: str, best: Point, over: Point | None) -> tuple[Point, str]:
        while over is None:
            point = self.point(name, best.batch * 2)
            best, over = (point, None) if point.fits else (best, point)
        while over.batch - best.batch > 1:
            point = self.point(name, (best.batch + over.batch) // 2)
            best, over = (point, over) if point.fits else (best, point)
        return best, f"exact: batch {over.batch} does not fit"


def _second(first: Point) -> int:
    """Another batch, for a line: as far from the first as surely fits where arguments are parameters, which stay."""
    others = max(first.needed - first.arguments, 1)
    return min(max(_end(first, others / first.batch), 2 * first.batch), _FAR * first.batch)


def _around(seen: Sequence[Point]) -> tuple[Point, Point | None]:
    """(the largest batch that fits, the smallest that does not)."""
    fitting, others = [p for p in seen if p.fits], [p for p in seen if not p.fits]
    return max(fitting, key=lambda p: p.batch), min(others, key=lambda p: p.batch, default=None)


def _next(seen: Sequence[Point], tries: int) -> int:
    """The batch to try: where a line reaches what the chip has, through the first and the largest, since two that are
    near the limit tell of what libtpu computes again; past the limit through the nearest two. With each refusal a step
    back: what is short is short of more than the line says."""
    best, over = _around(seen)
    if over is None:
        return _line(seen[0], best)
    return min(_line(best, over), int(over.batch * (1 - 0.005 * tries)), over.batch - 1)


def _line(first: Point, second: Point) -> int:
    """Where the line of bytes against batch reaches what a chip has."""
    slope = _slope(first, second)
    return _end(first, slope) if slope > 0 else max(first.batch, second.batch)


def _slope(first: Point, second: Point) -> float:
    """Bytes an example."""
    return (second.needed - first.needed) / (second.batch - first.batch)


def _end(point: Point, slope: float) -> int:
    """Where a line of ``slope`` bytes an example through a point reaches what the chip has."""
    return max(point.batch + 1, int(point.batch + (point.available - point.needed) / slope))


def measured(load: Load, target: str) -> Point:
    """Compile a program for a slice and read it."""
    base = _unmeasured(load, target)
    try:
        compiled = compile_for(target, load.program, options_in_force(), code=False)
    except OutOfMemory as error:
        return _refused(base, error)
    found = analyse(compiled.executable.as_text(), compiled.executable.memory_analysis(), target)
    times = found.schedule
    return replace(
        base,
        needed=found.fit.needed,
        available=found.fit.available,
        fits=True,
        seconds=times.seconds,
        by_libtpu=times.seconds_by("libtpu"),
        roofline=times.roofline,
        flops=times.flops,
        bytes=times.bytes,
        arguments=compiled.executable.memory_analysis().argument_size_in_bytes,
    )


def sized(load: Load, target: str) -> Point:
    """How much memory a program takes on a slice."""
    base = _unmeasured(load, target)
    try:
        needed = hbm_for(target, load.program, options_in_force())
    except OutOfMemory as error:
        return _refused(base, error)
    return replace(base, needed=needed, fits=True)


def _unmeasured(load: Load, target: str) -> Point:
    return Point(load.batch, load.items, 0, chip(target).usable_bytes, False, model_flops=load.model_flops)


def _refused(base: Point, error: OutOfMemory) -> Point:
    fit = misfit(error)
    return replace(base, needed=fit.needed, available=fit.available)


def _borrowed(each: Estimate, roomy: Estimate) -> Estimate:
    """The least time on a chip too small, from the work of the program of a larger one."""
    assert roomy.timed is not None
    work = roomy.timed
    least = max(work.flops / each.chip.peak("bf16"), work.bytes / each.chip.hbm_bandwidth)
    said = f"{each.note}; the least time, at batch {work.batch}, is that of the program for {roomy.target}"
    return replace(each, asked=replace(each.asked, roofline=least), note=said)


def as_rows(estimates: Sequence[Estimate]) -> list[dict[str, Any]]:
    """Estimates as plain data."""
    return [
        {
            "target": each.target,
            "unit": each.unit,
            "asked": vars(each.asked),
            "timed": vars(each.timed) if each.timed else None,
            "utilisation": each.utilisation,
            "rate": each.rate,
            "largest": vars(each.largest) if each.largest else None,
            "confirmed": each.confirmed,
            "note": each.note,
        }
        for each in estimates
    ]


def price(row: Mapping[str, Any], hourly: float) -> dict[str, float]:
    """What a step, and a million tokens or examples, cost at a price of a chip hour, for a row of ``as_rows``. A chip
    of two devices runs two such programs at that price."""
    devices, seconds, rate = chip(row["target"]).devices, row["timed"]["seconds"] if row["timed"] else 0.0, row["rate"]
    second = hourly / 3600 / devices
    return {"hourly": hourly, "step": seconds * second, "million": 1e6 / rate * second if rate else 0.0}
