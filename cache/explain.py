"""Why two keys differ, and which stored entry is nearest to one that missed: in the user's terms, item by item."""

from __future__ import annotations

from collections.abc import Mapping

_POSITIONAL = ";"


def differences(new: Mapping[str, str], old: Mapping[str, str]) -> list[str]:
    """One line for each difference: ``argument 2: bf16[8,128] was f32[8,128]``, ``libtpu 0.0.42 → 0.0.52``."""
    lines: list[str] = []
    for label in sorted({*new, *old}):
        if label not in old:
            lines.append(f"{label} is new: {new[label]}")
        elif label not in new:
            lines.append(f"{label} is gone, was {old[label]}")
        elif new[label] != old[label]:
            lines += _part(label, new[label], old[label])
    return lines


def _part(label: str, new: str, old: str) -> list[str]:
    if new.startswith("sha256:") and old.startswith("sha256:"):
        return [f"{label} differs: {_bytes(new)}, was {_bytes(old)}"]
    if _is_flags(new) and _is_flags(old):
        return _flags(_singular(label), new, old)
    if _POSITIONAL in new or _POSITIONAL in old or label.endswith("s"):
        return _positions(_singular(label), _split(new), _split(old))
    return [f"{label} {old or '(none)'} → {new or '(none)'}"]


def _bytes(text: str) -> str:
    _, digest, size = text.split(":")
    return f"{digest[:12]} ({int(size):,} bytes)"


def _split(text: str) -> list[str]:
    return [item.strip() for item in text.split(_POSITIONAL)] if text.strip() else []


def _singular(label: str) -> str:
    return label[:-1] if label.endswith("s") and not label.endswith("ss") else label


def _is_flags(text: str) -> bool:
    """Space-separated flags (``--a=1 --b``), options (``a=1 b=2``), or nothing at all."""
    return all(word.startswith("--") or "=" in word for word in text.split()) and _POSITIONAL not in text


def _flags(label: str, new: str, old: str) -> list[str]:
    now, then = (dict(word.partition("=")[::2] for word in text.split()) for text in (new, old))
    lines = [f"{label} {_flag(name, now)} added" for name in now if name not in then]
    lines += [f"{label} {_flag(name, then)} removed" for name in then if name not in now]
    return lines + [f"{label} {_flag(n, now)} was {_flag(n, then)}" for n in now if n in then and now[n] != then[n]]


def _flag(name: str, values: Mapping[str, str]) -> str:
    return f"{name}={values[name]}" if values[name] else name


def _positions(label: str, new: list[str], old: list[str]) -> list[str]:
    changed = [f"{label} {i}: {a} was {b}" for i, (a, b) in enumerate(zip(new, old, strict=False)) if a != b]
    added = [f"{label} {i}: {item} is new" for i, item in enumerate(new) if i >= len(old)]
    return changed + added + [f"{label} {i}: {item} is gone" for i, item in enumerate(old) if i >= len(new)]
