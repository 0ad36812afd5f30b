"""The layers of the package: who may import whom, read from the sources without importing anything."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "cache": ROOT / "cache",
    "runtime": ROOT / "runtime",
    "lowering": ROOT / "lowering",
    "": ROOT / "tpu_compile",
}
FOUNDATION = {"errors", "config", "stats"}
SOURCES = [(layer, path) for layer, folder in FOLDERS.items() for path in sorted(folder.rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """Every module named in an import statement, wherever it stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def ours(names: set[str]) -> set[str]:
    """First component below tpu_compile."""
    return {name.split(".")[1] for name in names if name.startswith("tpu_compile.")}


@pytest.mark.parametrize(
    ("layer", "path"), SOURCES, ids=lambda x: x if isinstance(x, str) else str(x.relative_to(ROOT))
)
def test_imports_go_downwards(layer, path):
    used = ours(imported(path))
    if layer:
        assert used <= FOUNDATION | {layer}, f"{layer}/ imports {used - FOUNDATION - {layer}}"
    elif path.stem in FOUNDATION and path.parent.name == "tpu_compile":
        assert used <= FOUNDATION


@pytest.mark.parametrize(
    ("layer", "path"), SOURCES, ids=lambda x: x if isinstance(x, str) else str(x.relative_to(ROOT))
)
def test_private_interfaces_have_one_home(layer, path):
    names = imported(path)
    mlir = {n for n in names if n.startswith("jaxlib.mlir")}
    # The worker for an absent TPU builds none either, but its client takes a parsed module where others take bytes.
    parses = path == ROOT / "runtime" / "tpu_worker.py"
    assert not mlir or layer == "lowering" or parses, f"only lowering/ builds MLIR: {mlir}"
    client = {n for n in names if n.startswith("jaxlib") and n not in mlir and not n.startswith("jaxlib.version")}
    assert layer in ("lowering", "runtime") or not client, f"only runtime/ talks to PJRT: {client}"
    if layer == "cache":
        assert not {n.split(".")[0] for n in names} & {"torch", "jax", "jaxlib", "numpy"}


@pytest.mark.parametrize(
    ("layer", "path"), SOURCES, ids=lambda x: x if isinstance(x, str) else str(x.relative_to(ROOT))
)
def test_the_environment_is_read_in_config_alone(layer, path):
    if path == ROOT / "tpu_compile" / "config.py":
        return
    reads = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert not reads, f"os.environ at lines {reads}: declare a knob in config.py"


def test_a_forbidden_import_would_be_seen(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from tpu_compile.runtime import client\n    import jaxlib.mlir.ir\n")
    assert ours(imported(bad)) == {"runtime"} and "jaxlib.mlir.ir" in imported(bad)


MAKERS = frozenset(
    "empty empty_strided zeros ones full tensor scalar_tensor arange linspace eye rand randn randint".split()
)


@pytest.mark.parametrize(
    ("layer", "path"), SOURCES, ids=lambda x: x if isinstance(x, str) else str(x.relative_to(ROOT))
)
def test_tensors_made_for_ourselves_name_their_device(layer, path):
    """Under ``torch.set_default_device`` any other would go to the user's device, and be lost there."""
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    made = [n for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr in MAKERS]
    bare = [n for n in made if isinstance(n.func.value, ast.Name) and n.func.value.id == "torch"]
    silent = [n.lineno for n in bare if "device" not in {k.arg for k in n.keywords}]
    assert not silent, f"lines {silent}: which device?"
