"""The fixture that this suite's tests compare with."""

from agreement import agrees

__all__ = ["agrees"]
