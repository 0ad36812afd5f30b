"""Why two keys differ, and which stored entry is nearest to one that missed: in the user's terms, item by item.

A part's label says how it reads. Plural labels are lists: items separated by ``;`` have positions (``arguments``),
words have names (``xla_flags``: ``a=1 b=true``) or only a presence. All others are single values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tpu_compile.cache.faults import contained

if TYPE_CHECKING:
    from tpu_compile.cache.key import CacheKey
    from tpu_compile.cache.store import CacheStore, EntryInfo

_MOST_LINES = 12
_MOST_OF_A_PART = 4
"""Another model differs in every argument: a few of them say so, and leave room for the other parts."""
_DETAILS = ("ops",)
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_FLAGS = {"xla_flags": "XLA flag --", "libtpu_init_args": "libtpu flag --"}
"""Labels whose words are command-line flags, as their users write them."""


@dataclass(frozen=True)
class Nearest:
    """The stored entry that shares most with a key, and what separates them."""

    entry: EntryInfo
    differences: tuple[str, ...]


def explain_miss(store: CacheStore, key: CacheKey, metadata: Mapping[str, Any] = _NOTHING) -> str:
    """Why ``key`` was not found: the nearest stored entry, and every part that differs from it. ``metadata``: what
    would be stored with it."""
    found = None
    with contained("list the cache", store.folder.root):
        found = nearest(store.entries(), key.name, described(key.readable, metadata), key.digest)
    if found is None:
        return f"there is no entry to compare with in {store.folder.root}."
    header = found.entry.header
    return f"nearest is {header.name} ({header.digest[:12]}), which differs:\n" + bullets(found.differences)


def described(parts: Mapping[str, str], metadata: Mapping[str, Any]) -> dict[str, str]:
    """A key's parts, and what the metadata says readably about the part that is only a hash: the program's ops."""
    return {**parts, **{label: str(metadata[label]) for label in _DETAILS if label in metadata}}


def nearest(infos: Iterable[EntryInfo], name: str, parts: Mapping[str, str], digest: str = "") -> Nearest | None:
    """Of ``infos`` the one that shares most parts, then the name, then most items, then the most recently used.

    ``parts`` are the key's, ``described`` or plain.

    The entry ``digest`` itself, where it is stored, is not compared with: explaining a stored entry means explaining
    why it had to be compiled beside the others.
    """
    others = [info for info in infos if info.header.digest != digest]
    if not others:
        return None

    def closeness(info: EntryInfo) -> tuple[int, bool, int, float]:
        stored = info.header.parts
        shared = sum(stored.get(label) == value for label, value in parts.items())
        return shared, info.header.name == name, -len(_differences(parts, info)), info.used

    best = max(others, key=closeness)
    return Nearest(best, tuple(_differences(parts, best, most=_MOST_OF_A_PART)))


def _differences(parts: Mapping[str, str], info: EntryInfo, most: int | None = None) -> list[str]:
    """Details that only one of the two sides has say nothing."""
    stored = described(info.header.parts, info.header.metadata)
    one_sided = {label for label in _DETAILS if label not in parts or label not in stored}
    new, old = ({label: v for label, v in side.items() if label not in one_sided} for side in (parts, stored))
    return differences(new, old, most)


def bullets(lines: Iterable[str]) -> str:
    """The lines as a list, cut where nobody would read on."""
    lines = list(lines)
    shown = [f"  - {line}" for line in lines[:_MOST_LINES]]
    return "\n".join(shown + [f"  … and {len(lines) - _MOST_LINES} more"] * (len(lines) > _MOST_LINES))


def differences(new: Mapping[str, str], old: Mapping[str, str], most: int | None = None) -> list[str]:
    """One line for each difference: ``argument 2: bf16[8,128] was f32[8,128]``, ``libtpu 0.0.42 → 0.0.52``.

    ``most``: so many lines of one part, and then how many more there are.
    """
    lines: list[str] = []
    for label in sorted({*new, *old}):
        if label not in old:
            lines.append(f"{label.replace('_', ' ')} is new: {_readable(new[label])}")
        elif label not in new:
            lines.append(f"{label.replace('_', ' ')} is gone, was {_readable(old[label])}")
        elif new[label] != old[label]:
            part = _part(label, new[label], old[label])
            hidden = 0 if most is None else len(part) - most
            lines += part if hidden <= 1 else [*part[:most], f"{hidden} more {label.replace('_', ' ')} differ"]
    return lines


def _part(label: str, new: str, old: str) -> list[str]:
    title = label.replace("_", " ")
    if not label.endswith("s") or label.endswith("ss") or is_hash(new) or is_hash(old):
        return [f"{title} {_readable(old)} → {_readable(new)}"]
    if ";" in new + old or not _is_words(new + " " + old):
        return _positions(title[:-1], _split(new), _split(old))
    if label in _FLAGS or "=" in new + old or max(len(new.split()), len(old.split())) > 1:
        return _names(_FLAGS.get(label, title[:-1].replace("xla", "XLA") + " "), _words(new), _words(old))
    return [f"{title} {_readable(old)} → {_readable(new)}"]


def is_hash(value: str) -> bool:
    """Whether a readable part stands for bytes (``sha256:<hex>:<size>``), or is a digest itself."""
    return value.startswith("sha256:") or re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _readable(value: str) -> str:
    if not is_hash(value):
        return value or "(none)"
    if ":" not in value:
        return value[:12]
    _, digest, size = value.split(":")
    return f"{digest[:12]} ({int(size):,} bytes)"


def _is_words(text: str) -> bool:
    """Flags, name=value pairs or bare words; an argument such as ``f32[8]`` alone is a position, not a word."""
    return all(word.startswith("-") or "=" in word or re.fullmatch(r"[\w.]+", word) for word in text.split())


def _words(text: str) -> dict[str, str]:
    return {name.lstrip("-"): value for name, _, value in (word.partition("=") for word in text.split())}


def _names(label: str, new: Mapping[str, str], old: Mapping[str, str]) -> list[str]:
    lines = [f"{label}{_item(name, new)} added" for name in new if name not in old]
    lines += [f"{label}{_item(name, old)} removed" for name in old if name not in new]
    changed = [name for name in new if name in old and new[name] != old[name]]
    return lines + [f"{label}{_item(name, new)} was {_item(name, old)}" for name in changed]


def _item(name: str, values: Mapping[str, str]) -> str:
    return name if values[name] in ("", "true") else f"{name}={values[name]}"


def _split(text: str) -> list[str]:
    return [item.strip() for item in text.split(";")] if text.strip() else []


def _positions(label: str, new: list[str], old: list[str]) -> list[str]:
    changed = [f"{label} {i}: {a} was {b}" for i, (a, b) in enumerate(zip(new, old, strict=False)) if a != b]
    added = [f"{label} {i}: {item} is new" for i, item in enumerate(new) if i >= len(old)]
    return changed + added + [f"{label} {i}: {item} is gone" for i, item in enumerate(old) if i >= len(new)]
