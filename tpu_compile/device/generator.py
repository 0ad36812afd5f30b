"""The device's random state: a seed of two words, and how many draws were made since.

Draw ``n`` of a program has the key (first word, second word + draws so far + n), so that eager ops, a fused sequence
and a compiled graph that make the same draws in the same order see the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch

_MASK = 2**64 - 1
_WORDS = 3


class DeviceGenerator(torch.Generator):
    """``torch.tpu.default_generator``. torch sees a CPU generator, so it may be given as ``generator=``; what the
    device draws does not advance the CPU's state. In a compiled function ask ``torch.tpu``'s functions instead: Dynamo
    neither traces nor breaks a graph for the methods of a generator's subclass."""

    def __new__(cls) -> DeviceGenerator:
        made: DeviceGenerator = super().__new__(cls)
        return made

    def __init__(self) -> None:
        self._seed = torch.default_generator.initial_seed()
        self._words: tuple[int, int] | None = None
        self._draws = 0

    def draw(self, count: int) -> torch.Tensor:
        """The seed (uint64[2], on the CPU) of a program that makes ``count`` draws."""
        first, second = self._key()
        word = (second + self._draws) & _MASK
        self._draws += count
        return torch.tensor([first, word], dtype=torch.uint64, device="cpu")

    def follows(self, seed: torch.Tensor, draws: int) -> bool:
        """Whether the next draw is the one after ``draws`` draws from ``seed``."""
        first, second = self._key()
        known, begun = seed.tolist()
        return bool(first == known and (second + self._draws) & _MASK == (begun + draws) & _MASK)

    def _key(self) -> tuple[int, int]:
        if self._words is None:
            source = torch.Generator()
            source.manual_seed(self._seed)
            self._words = words(source)
        return self._words

    def manual_seed(self, seed: int) -> DeviceGenerator:
        """Start the sequence that belongs to ``seed``."""
        self._seed, self._words, self._draws = int(seed) & _MASK, None, 0
        return self

    def initial_seed(self) -> int:
        """The seed of the sequence in use."""
        return self._seed

    def seed(self) -> int:
        """A new sequence from the system's entropy; returns its seed."""
        self.manual_seed(torch.Generator().seed())
        return self._seed

    def get_state(self) -> torch.Tensor:
        """Seed, words and draws as a uint8 tensor, for ``set_state``."""
        numbers = [self._seed, *self._key(), self._draws & _MASK]
        return torch.tensor(numbers, dtype=torch.uint64, device="cpu").view(torch.uint8).clone()

    def set_state(self, new_state: torch.Tensor) -> DeviceGenerator:
        """Continue from what ``get_state`` gave.

        Raises:
            ValueError: the tensor is not a state of this generator.
        """
        if new_state.dtype != torch.uint8 or new_state.numel() != 8 * (_WORDS + 1):
            raise ValueError("This is no state of the tpu generator: use what torch.tpu.get_rng_state() returned.")
        seed, first, second, draws = new_state.cpu().contiguous().view(torch.uint64).tolist()
        self._seed, self._words, self._draws = seed, (first, second), draws
        return self


def words(source: torch.Generator) -> tuple[int, int]:
    """Two 64-bit words drawn from a CPU generator."""
    drawn = torch.empty(2, dtype=torch.int64, device="cpu").random_(generator=source).view(torch.uint64).tolist()
    return drawn[0], drawn[1]


def seed_from(given: Any, own: Any, count: int) -> torch.Tensor:
    """The seed (uint64[2]) of a program with ``count`` draws, from the generator that an op was given, if any. torch
    hands a generator over in a new Python object each time."""
    if given is None or given._cdata == own._cdata:
        drawn: torch.Tensor = own.draw(count)
        return drawn
    return torch.tensor(words(given), dtype=torch.uint64, device="cpu")
