"""The parts of `tools/bench.py`: networks, their JAX twins, timing, fresh processes."""
