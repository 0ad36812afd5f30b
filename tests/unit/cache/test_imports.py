"""The cache stands alone: the standard library, filelock, and three modules of ours."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import tpu_compile.cache

FOLDER = Path(tpu_compile.cache.__file__).parent
OURS = {"tpu_compile.errors", "tpu_compile.config", "tpu_compile.stats"}
OTHERS = {"filelock", "platformdirs", "fsspec.core"}


def test_using_the_cache_imports_neither_torch_nor_jaxlib_nor_numpy() -> None:
    program = """
import sys
from tpu_compile.cache import CacheKey, explain_miss, open_store
store = open_store()
key = CacheKey.of("m", {"a": "b"})
with store.compiling(key) as entry:
    assert store.put(key, b"x", compile_seconds=1, metadata={})
assert store.get(key).payload == b"x"
explain_miss(store, key)
import tpu_compile.cli.cache
print({"torch", "jaxlib", "jax", "numpy", "fsspec"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_its_sources_import_nothing_else() -> None:
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                known = name.split(".")[0] in sys.stdlib_module_names or name in OURS | OTHERS
                assert known or name.startswith("tpu_compile.cache"), f"{path.name} imports {name}"
