"""Writes a program's stages as files: FX graph, StableHLO, optimised HLO, cache key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from torch.fx import GraphModule

from tpu_compile.lowering import fx

if TYPE_CHECKING:
    from tpu_compile.compiler import Compiled


def stages(graph_module: GraphModule, compiled: Compiled) -> dict[str, str]:
    """File suffix → text of every stage of one program."""
    return {
        "fx.py": graph_module.print_readable(print_output=False),
        "stablehlo.mlir": fx.text(compiled.program.bytecode, locations=True),
        "hlo.txt": compiled.executable.as_text(),
        "key.json": json.dumps({label: str(part) for label, part in compiled.key.parts}, indent=1),
    }


def write(folder: str | Path, graph_module: GraphModule, compiled: Compiled) -> list[Path]:
    """Write every stage to ``folder``; the files are named after the program and its digest."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    stem = f"{compiled.program.name}-{compiled.program.digest[:12]}"
    paths = []
    for suffix, text in stages(graph_module, compiled).items():
        paths.append(root / f"{stem}.{suffix}")
        paths[-1].write_text(text + "\n")
    return paths
