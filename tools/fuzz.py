"""Random programs, eager against compiled: mixed dtypes, complex numbers, views, in-place ops, reductions,
broadcasting, indexing; of a third of them the gradients too.

    python tools/fuzz.py [--graphs 500] [--seed 0]

A program that differs is shrunk and printed as a script that fails alone; the exit status is 1.
"""

from __future__ import annotations

import logging
import sys
import warnings

import click
from fuzzing import run


@click.command()
@click.option("--graphs", default=500, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the first graph; the next has the next one.")
def main(graphs: int, seed: int) -> None:
    """Compare random programs, eager and compiled."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # torch logs what FakeTensor refuses, beside raising it
    found = run(range(seed, seed + graphs))
    print(f"{graphs} graphs, {len(found)} wrong")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
