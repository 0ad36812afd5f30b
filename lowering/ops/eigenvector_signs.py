"""Which sign an eigenvector of a small Hermitian matrix gets in torch on a CPU.

Up to order 25 LAPACK iterates by QL and QR (``steqr``), and every rotation's sign is that of ``lartg``. LAPACK 3.10
changed it; torch's MKL has the older rule, the LAPACK that jax calls the newer one, and from order 26 on (divide and
conquer) they agree. So the iteration is run once more, with the older rule, for nothing but the signs: a gradient that
depends on them, or a comparison with eager, then sees what eager saw. Up to order 12 only: beyond, it would take longer
than the decomposition, and in float32 roundings decide how often it turns.

Everything here is one matrix; ``vmap`` makes it a batch. Elements are read and written through masks: n is small.
"""

from __future__ import annotations

from typing import Any

from tpu_compile.lowering.jnp import jax, jnp, lax

Array = Any

REPEATED = 12
"""The largest order whose iteration is repeated."""

SWEEPS = 30
"""LAPACK's limit of sweeps for each eigenvalue."""


def with_torch_signs(a: Array, vectors: Array, lower: bool) -> Array:
    """Eigenvectors [..., n, n] in the order of their eigenvalues, with the signs that torch gives those of ``a``."""
    n = a.shape[-1]
    if not 2 < n <= REPEATED or not a.size:
        return vectors
    flat = [t.reshape(-1, n, n) for t in (a if lower else _reversed(a), vectors)]
    reflectors, d, e, scales = lax.linalg.tridiagonal(flat[0], lower=True)
    inner = lax.linalg.householder_product(reflectors[..., 1:, :-1], scales)
    basis = jnp.zeros_like(flat[0]).at[..., 0, 0].set(1).at[..., 1:, 1:].set(inner)
    if not lower:
        d, e, basis = d[..., ::-1], e[..., ::-1], _reversed(basis)
    iterated = jax.vmap(_iterated)(d, jnp.pad(e, ((0, 0), (0, 1))), basis)
    overlap = jnp.real((jnp.conj(iterated) * flat[1]).sum(-2, keepdims=True))
    return jnp.where(overlap < 0, -flat[1], flat[1]).reshape(vectors.shape)


def _reversed(a: Array) -> Array:
    """Rows and columns from last to first: LAPACK reduces an upper triangle as the lower one of this."""
    return a[..., ::-1, ::-1]


def _at(x: Array, i: Array) -> Array:
    return jnp.where(jnp.arange(x.shape[0]) == i, x, 0).sum()


def _put(x: Array, i: Array, value: Array) -> Array:
    return jnp.where(jnp.arange(x.shape[0]) == i, value, x)


def _rotated(z: Array, i: Array, c: Array, s: Array) -> Array:
    """Columns i and i + 1 turned, as ``lasr`` does."""
    columns = jnp.arange(z.shape[1])
    left = jnp.where(columns == i, z, 0).sum(1, keepdims=True)
    right = jnp.where(columns == i + 1, z, 0).sum(1, keepdims=True)
    return jnp.where(columns == i, s * right + c * left, jnp.where(columns == i + 1, c * right - s * left, z))


def _rotation(f: Array, g: Array) -> tuple[Array, Array, Array]:
    """``lartg`` before LAPACK 3.10: the cosine is positive only where it is the larger."""
    r = jnp.sqrt(f * f + g * g)
    safe = jnp.where(r == 0, 1, r)
    flip = jnp.where((jnp.abs(f) > jnp.abs(g)) & (f < 0), -1, 1).astype(f.dtype)
    c, s, r = flip * f / safe, flip * g / safe, flip * r
    simple = g == 0
    return jnp.where(simple, 1, c), jnp.where(simple, 0, s), jnp.where(simple, f, r)


def _two_by_two(a: Array, b: Array, c: Array) -> tuple[Array, Array, Array, Array]:
    """``laev2``: (larger eigenvalue in size, the other, cosine, sine) of [[a, b], [b, c]]."""
    total, gap = a + c, a - c
    root = jnp.hypot(gap, 2 * b)
    above, below = jnp.where(jnp.abs(a) > jnp.abs(c), a, c), jnp.where(jnp.abs(a) > jnp.abs(c), c, a)
    first = jnp.where(total < 0, (total - root) / 2, (total + root) / 2)
    safe = jnp.where(total == 0, 1, first)
    second = jnp.where(total == 0, -root / 2, above / safe * below - b / safe * b)
    cs = jnp.where(gap >= 0, gap + root, gap - root)
    by_cotangent = jnp.abs(cs) > jnp.abs(2 * b)
    ct = -2 * b / jnp.where(cs == 0, 1, cs)
    tn = -cs / jnp.where(b == 0, 1, 2 * b)
    sine = jnp.where(by_cotangent, 1 / jnp.hypot(1, ct), jnp.where(b == 0, 0, tn / jnp.hypot(1, tn)))
    cosine = jnp.where(by_cotangent, ct / jnp.hypot(1, ct), jnp.where(b == 0, 1, 1 / jnp.hypot(1, tn)))
    same = (total < 0) != (gap >= 0)
    return first, second, jnp.where(same, -sine, cosine), jnp.where(same, cosine, sine)


def _iterated(d: Array, e: Array, z: Array) -> Array:
    """``steqr``: ``z`` times the eigenvectors of the tridiagonal matrix, in ascending order of eigenvalues."""
    n = d.shape[0]
    index = jnp.arange(n)
    eps = jnp.finfo(d.dtype).eps / 2

    def next_block(state: Any) -> Any:
        d, e, z, start, sweeps = state
        after = jnp.roll(d, -1)
        tiny = jnp.abs(e) <= jnp.sqrt(jnp.abs(d)) * jnp.sqrt(jnp.abs(after)) * eps
        end = jnp.argmax((tiny | (index == n - 1)) & (index >= start))
        e = _put(e, end, 0)
        upward = jnp.abs(_at(d, end)) < jnp.abs(_at(d, start))
        at, last = jnp.where(upward, end, start), jnp.where(upward, start, end)
        step = jnp.where(upward, -1, 1)
        d, e, z, _, sweeps = lax.while_loop(
            lambda s: ((last - s[3]) * step > 0) & (s[4] < SWEEPS * n),
            lambda s: _iteration(*s, last=last, step=step, eps=eps),
            (d, e, z, at, sweeps),
        )
        return d, e, z, end + 1, sweeps

    zero = jnp.zeros((), jnp.int_)
    d, e, z, *_ = lax.while_loop(lambda s: s[3] < n, next_block, (d, e, z, zero, zero))
    return z[:, jnp.argsort(d)]


def _iteration(d: Array, e: Array, z: Array, at: Array, sweeps: Array, *, last: Array, step: Array, eps: float) -> Any:
    """One deflation or sweep of the block between ``at`` and ``last``; ``step`` is 1 for QL, -1 for QR."""
    index = jnp.arange(d.shape[0])
    small = e * e <= eps * eps * jnp.abs(d) * jnp.abs(jnp.roll(d, -1)) + jnp.finfo(d.dtype).tiny
    stop = jnp.where(step > 0, small, jnp.roll(small, 1)) | (index == last)
    ahead = stop & ((index - at) * step >= 0)
    m = jnp.where(step > 0, jnp.argmax(ahead), d.shape[0] - 1 - jnp.argmax(ahead[::-1]))
    e = jnp.where(m != last, _put(e, jnp.minimum(m, m + step), 0), e)
    low = jnp.minimum(at, m)

    def alone(_: Any) -> Any:
        return d, e, z, at + step, sweeps

    def pair(_: Any) -> Any:
        first, second, c, s = _two_by_two(_at(d, low), _at(e, low), _at(d, low + 1))
        return (
            _put(_put(d, low, first), low + 1, second),
            _put(e, low, 0),
            _rotated(z, low, c, s),
            at + 2 * step,
            sweeps,
        )

    def many(_: Any) -> Any:
        return *_swept(d, e, z, at, m, step), at, sweeps + 1

    return lax.switch(jnp.minimum(jnp.abs(m - at), 2), [alone, pair, many], None)


def _swept(d: Array, e: Array, z: Array, at: Array, m: Array, step: Array) -> tuple[Array, Array, Array]:
    """One implicit shift, chased from ``m`` to ``at``."""
    edge = jnp.minimum(at, at + step)
    shift = (_at(d, at + step) - _at(d, at)) / (2 * _at(e, edge))
    g = _at(d, m) - _at(d, at) + _at(e, edge) / (shift + jnp.copysign(jnp.hypot(shift, 1), shift))

    def turn(state: Any) -> Any:
        d, e, z, node, g, s, c, p = state
        i = jnp.minimum(node, node - step)
        f, b = s * _at(e, i), c * _at(e, i)
        c, s, r = _rotation(g, f)
        e = jnp.where(node != m, _put(e, i + step, r), e)
        g = _at(d, node) - p
        r = (_at(d, node - step) - g) * s + 2 * c * b
        p = s * r
        return _put(d, node, g + p), e, _rotated(z, i, c, -step * s), node - step, c * r - b, s, c, p

    one, none = jnp.ones((), d.dtype), jnp.zeros((), d.dtype)
    d, e, z, _, g, *_, p = lax.while_loop(lambda s: (s[3] - at) * step > 0, turn, (d, e, z, m, g, one, one, none))
    return _put(d, at, _at(d, at) - p), _put(e, edge, g), z
