"""What is installed is what is in the tree, needs what it says, and costs little to import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {"tpu_compile": "tpu_compile", **{name: f"tpu_compile.{name}" for name in ("lowering", "runtime", "cache")}}


def modules(root: Path, package: str) -> set[str]:
    """Dotted names of every module below ``root``, which is imported as ``package``; packages by their own name."""
    files = (path.relative_to(root).with_suffix("") for path in root.rglob("*.py"))
    return {".".join((package, *file.parts)).removesuffix(".__init__") for file in files}


def tree() -> set[str]:
    return set().union(*(modules(ROOT / folder, package) for folder, package in FOLDERS.items()))


def requirements(*groups: str) -> dict[str, Requirement]:
    optional = PROJECT["project"]["optional-dependencies"]
    lines = [line for group in groups for line in optional[group]] if groups else PROJECT["project"]["dependencies"]
    return {canonicalize_name(each.name): each for each in map(Requirement, lines)}


def test_every_package_of_the_tree_is_listed() -> None:
    found = set()
    for folder, package in FOLDERS.items():
        inits = (path.parent.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("__init__.py"))
        found |= {".".join((package, *path.parts)) for path in inits}
    assert sorted(found) == sorted(PROJECT["tool"]["setuptools"]["packages"])
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {package: folder for folder, package in FOLDERS.items()}


def test_no_module_lies_outside_a_package() -> None:
    packages = set(PROJECT["tool"]["setuptools"]["packages"])
    assert [name for name in sorted(tree()) if name not in packages and name.rpartition(".")[0] not in packages] == []


def test_an_install_holds_the_whole_tree_and_nothing_else(tmp_path: Path) -> None:
    build = "import setuptools; setuptools.setup()", "-q", "build_py", "--build-lib", str(tmp_path)
    subprocess.run([sys.executable, "-c", *build], cwd=ROOT, check=True, capture_output=True)
    assert modules(tmp_path / "tpu_compile", "tpu_compile") == tree()
    assert [path.name for path in tmp_path.iterdir()] == ["tpu_compile"]
    assert (tmp_path / "tpu_compile" / "py.typed").is_file()


def test_constraints_pin_what_pyproject_names() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    assert len(pins) == len(lines), "a line is not name==version, or a name comes twice"
    named = set(requirements()) | set(requirements("tpu", "demo", "test"))
    assert named - pins == {"tpu-compile"}


def test_the_pins_satisfy_pyproject() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+?)(?:\.\*)?$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    named = {**requirements(), **requirements("tpu", "demo", "test")}
    assert [str(r) for name, r in named.items() if name in versions and not r.specifier.contains(versions[name])] == []


def test_users_get_nothing_that_only_tests_need() -> None:
    only_for_tests = set(requirements("demo", "test")) - {"tpu-compile"}
    assert only_for_tests.isdisjoint(requirements()), "a test dependency is among [project.dependencies]"
    assert "libtpu" not in requirements() and "libtpu" in requirements("tpu")


@pytest.mark.parametrize("name", ["tpu", "tpu_compile"])
def test_the_backend_is_found_by_entry_point(name: str) -> None:
    (found,) = entry_points(group="torch_dynamo_backends", name=name)
    assert found.value == "tpu_compile.backend:tpu"
    assert callable(found.load())


def test_the_command_is_installed() -> None:
    (found,) = entry_points(group="console_scripts", name="tpu-compile")
    assert found.value == "tpu_compile.cli:main"


def test_importing_the_package_brings_neither_jaxlib_nor_jax_nor_a_cli(run_python: Any) -> None:
    done = run_python("""
        import sys, torch
        before = set(sys.modules)
        import tpu_compile
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(sorted(new & {"jax", "jaxlib", "torch_mlir", "libtpu", "click", "rich"}))
        """)
    assert done.stdout.strip() == "[]"


def test_continuous_integration_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK) and "make test" in script.read_text().splitlines()
