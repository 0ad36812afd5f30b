"""A key changes with everything that decides the program, and with nothing else."""

from __future__ import annotations

import random
import string
import subprocess
import sys

import pytest

from tpu_compile.cache import CacheKey

Parts = dict[str, str | bytes]


def _random_parts(rng: random.Random) -> Parts:
    letters = string.ascii_lowercase + " "
    labels = {"".join(rng.choices(letters, k=rng.randint(1, 12))) for _ in range(rng.randint(1, 8))}
    return {label: _random_value(rng) for label in sorted(labels)}


def _random_value(rng: random.Random) -> str | bytes:
    text = "".join(rng.choices("ab;=- é0\0\udc80", k=rng.randint(0, 20)))
    return text if rng.random() < 0.5 else text.encode("utf-8", "surrogatepass")


def _mutate(parts: Parts, rng: random.Random) -> Parts:
    """The smallest changes one can make: a value, its kind, a label, one part more or less, a moved boundary."""
    label = rng.choice(sorted(parts))
    value = parts[label]
    rest = {other: item for other, item in parts.items() if other != label}
    changes: list[Parts] = [rest, {**parts, label + "x": ""}, {**rest, label + "y": value}]
    if isinstance(value, str):
        changes += [{**parts, label: value + " "}, {**parts, label: value.encode("utf-8", "surrogatepass")}]
        changes += [{**rest, label + value[:1]: value[1:]}] * bool(value[:1])
    else:
        changes += [{**parts, label: value + b"\0"}, {**parts, label: value.decode("utf-8", "surrogatepass")}]
    return rng.choice([change for change in changes if change])


@pytest.mark.parametrize("seed", range(20))
def test_any_change_changes_the_digest_and_order_never_does(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        parts = _random_parts(rng)
        key = CacheKey.of("name", parts)
        shuffled = dict(rng.sample(sorted(parts.items()), len(parts)))
        assert CacheKey.of("other name", shuffled).digest == key.digest
        mutant = _mutate(parts, rng)
        assert CacheKey.of("name", mutant).digest != key.digest, (parts, mutant)


def test_distinct_parts_have_distinct_digests() -> None:
    rng = random.Random(0)
    samples = [_random_parts(rng) for _ in range(2000)]
    keys = {tuple(sorted(parts.items())): CacheKey.of("x", parts).digest for parts in samples}
    assert len(set(keys.values())) == len(keys)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": "bc"}, {"ab": "c"}),
        ({"a": "b", "c": "d"}, {"a": "bc", "d": ""}),
        ({"a": "1"}, {"a": b"1"}),
        ({"a": ""}, {"a": b""}),
        ({"a": b"program"}, {"a": CacheKey.of("x", {"a": b"program"}).readable["a"]}),
    ],
)
def test_parts_cannot_be_mistaken_for_each_other(one: Parts, other: Parts) -> None:
    assert CacheKey.of("x", one).digest != CacheKey.of("x", other).digest


def test_the_digest_is_the_same_in_every_process() -> None:
    """A change here invalidates every cache in the world: raise FORMAT with it."""
    program = "from tpu_compile.cache import CacheKey; print(CacheKey.of('m', {'b': 'x', 'a': b'y', 'c': ''}).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert digests == {"9d67a1e403ebb08dc9c5cb594e37285198cabd85a8498bb08d910587047e8241"}


@pytest.mark.parametrize("value", [1, None, 1.5, ["x"], object()])
def test_a_part_that_is_neither_text_nor_bytes_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="key part 'level'"):
        CacheKey.of("m", {"level": value})  # type: ignore[dict-item]


def test_a_key_is_a_value() -> None:
    one, same = CacheKey.of("m", {"a": "1", "b": b"2"}), CacheKey.of("m", {"b": b"2", "a": "1"})
    assert one == same and hash(one) == hash(same)
    assert one.diff(same) == []
    assert one.readable["b"].startswith("sha256:") and one.readable["a"] == "1"
