"""A miss is explained in the user's terms, against the entry that is really nearest."""

from __future__ import annotations

import pytest

from tpu_compile.cache import CacheKey, CacheStore, explain_miss, nearest
from tpu_compile.cache.explain import bullets, differences

ENVIRONMENT: dict[str, str | bytes] = {"platform": "tpu", "libtpu": "0.0.42", "xla_flags": "", "host_cpu": "avx"}


@pytest.mark.parametrize(
    ("label", "old", "new", "lines"),
    [
        ("arguments", "s8[]; s8[]; f32[8,128]", "s8[]; s8[]; bf16[8,128]", ["argument 2: bf16[8,128] was f32[8,128]"]),
        ("arguments", "f32[8]", "f32[9]", ["argument 0: f32[9] was f32[8]"]),
        ("arguments", "f32[2]", "f32[2]; s32[4]; s32[5]", ["argument 1: s32[4] is new", "argument 2: s32[5] is new"]),
        ("arguments", "f32[2]; s32[4]", "f32[2]", ["argument 1: s32[4] is gone"]),
        ("arguments", "", "f32[2]", ["argument 0: f32[2] is new"]),
        ("libtpu", "0.0.42", "0.0.52", ["libtpu 0.0.42 → 0.0.52"]),
        ("topology", "", "v5e:2x2", ["topology (none) → v5e:2x2"]),
        ("xla_flags", "", "x=true", ["XLA flag --x added"]),
        ("xla_flags", "--x=1 --y", "--x=2", ["XLA flag --y removed", "XLA flag --x=2 was x=1"]),
        ("xla_flags", "x=true y=false", "x=false", ["XLA flag --y=false removed", "XLA flag --x=false was x"]),
        ("libtpu_init_args", "", "x=7", ["libtpu flag --x=7 added"]),
        ("xla_options", "level=1 fast=no", "level=2 fast=no", ["XLA option level=2 was level=1"]),
        ("cpu_features", "x86_64 avx avx2 sse4_1", "x86_64 avx sse4_1", ["cpu feature avx2 removed"]),
        ("host_cpu", "EPYC #1", "Xeon #2", ["host cpu EPYC #1 → Xeon #2"]),
        ("num_replicas", "1", "2", ["num replicas 1 → 2"]),
        ("device_class", "a b", "a c", ["device class a b → a c"]),
        ("program", "ab" * 32, "cd" * 32, ["program abababababab → cdcdcdcdcdcd"]),
    ],
)
def test_differences_of_one_part(label: str, old: str, new: str, lines: list[str]) -> None:
    assert CacheKey.of("m", {label: new}).diff(CacheKey.of("m", {label: old})) == lines


def test_a_program_is_shown_by_hash_and_size() -> None:
    one, other = (CacheKey.of("m", {"program": bytes([value]) * 12_000}) for value in (1, 2))
    (line,) = one.diff(other)
    digests = [key.readable["program"].split(":")[1][:12] for key in (other, one)]
    assert line == f"program {digests[0]} (12,000 bytes) → {digests[1]} (12,000 bytes)"


def test_whole_parts_come_and_go() -> None:
    assert differences({"a": "1", "b": "2"}, {"a": "1", "c": ""}) == ["b is new: 2", "c is gone, was (none)"]


def put(store: CacheStore, name: str, **changes: str | bytes) -> CacheKey:
    made = key(name, **changes)
    assert store.put(made, b"payload", compile_seconds=1, metadata={})
    return made


def key(name: str, **changes: str | bytes) -> CacheKey:
    return CacheKey.of(name, {**ENVIRONMENT, "program": name.encode(), "arguments": "f32[8]", **changes})


def test_the_nearest_entry_shares_most_parts(store: CacheStore) -> None:
    put(store, "norm", libtpu="0.0.52")
    put(store, "add")
    wanted = put(store, "matmul", libtpu="0.0.52")
    put(store, "matmul", libtpu="0.0.52", platform="cpu", arguments="f32[9]")
    missed = key("matmul")
    found = nearest(store.entries(), missed.name, missed.readable, missed.digest)
    assert found is not None and found.entry.header.digest == wanted.digest
    assert found.differences == ("libtpu 0.0.52 → 0.0.42",)


def test_among_equals_the_same_name_then_the_fewest_items_then_the_latest(store: CacheStore) -> None:
    put(store, "add", program=b"1", arguments="f32[7]; f32[7]; f32[1]")
    near = put(store, "matmul", program=b"2", arguments="f32[8]; f32[8]; f32[1]")
    put(store, "matmul", program=b"3", arguments="f32[9]; f32[9]; f32[9]")
    missed = key("matmul", program=b"4", arguments="f32[8]; f32[8]; f32[2]")
    found = nearest(store.entries(), missed.name, missed.readable)
    assert found is not None and found.entry.header.digest == near.digest


def test_the_message_of_a_miss(store: CacheStore) -> None:
    missed = key("matmul", arguments="bf16[8]", libtpu="0.0.52")
    assert "no entry to compare with" in explain_miss(store, missed)
    near = put(store, "matmul")
    assert explain_miss(store, missed) == (
        f"nearest is matmul ({near.digest[:12]}), which differs:\n"
        "  - argument 0: bf16[8] was f32[8]\n"
        "  - libtpu 0.0.42 → 0.0.52"
    )


def test_two_programs_differ_by_their_ops(store: CacheStore) -> None:
    """Where both sides say what they are made of; two digests of programs tell a user nothing."""
    stored = key("mlp", program="0" * 64)
    store.put(stored, b"payload", compile_seconds=1, metadata={"ops": "aten.mm=2 aten.relu=1"})
    missed = key("mlp", program="1" * 64)
    assert "  - op aten.mm=3 was aten.mm=2\n  - program" in explain_miss(
        store, missed, {"ops": "aten.mm=3 aten.relu=1"}
    )
    assert "op aten.gelu=1 added\n  - op aten.relu=1 removed" in explain_miss(
        store, missed, {"ops": "aten.gelu=1 aten.mm=2"}
    )
    assert explain_miss(store, missed).splitlines()[1:] == ["  - program 000000000000 → 111111111111"]


def test_explaining_is_not_using_and_counts_nothing(store: CacheStore) -> None:
    put(store, "matmul")
    explain_miss(store, key("add"))
    (info,) = store.entries()
    assert info.hits == 0


def test_another_model_does_not_hide_the_other_parts(store: CacheStore) -> None:
    put(store, "vit", arguments="; ".join(f"f32[{i}]" for i in range(50)))
    missed = key("bert", arguments="; ".join(f"f32[{i + 1}]" for i in range(50)), libtpu="0.0.52")
    lines = explain_miss(store, missed).splitlines()
    assert lines[4:7] == [
        "  - argument 3: f32[4] was f32[3]",
        "  - 46 more arguments differ",
        "  - libtpu 0.0.42 → 0.0.52",
    ]


def test_a_long_list_is_cut() -> None:
    assert bullets(map(str, range(20))).splitlines()[11:] == ["  - 11", "  … and 8 more"]
    assert bullets(["one"]) == "  - one"
