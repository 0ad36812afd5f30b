"""Constants of each TPU generation, in one table with its sources.

Rates and sizes, for a chip: https://cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and /tpu7x ("System architecture");
the v4's interconnect: "TPU v4: An Optically Reconfigurable Supercomputer for Machine Learning" (six links of 50 GB/s).
VMEM, and int8 and fp8 rates: ``tpu_info.py`` of JAX 0.10.2's Pallas. The published HBM is in GiB.

``clock`` is that of libtpu's ``estimated_cycles``: the peak bf16 rate over the flops of the matrix units in a cycle.
Read off libtpu itself (0.0.42): its estimate for a large bf16 product comes to 0.7–0.9 of the flops a cycle below, in
every generation. That gives 1.05 GHz for the v4 and 1.75 for the v5p, which are their published clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tpu_compile.errors import ConfigError, nearest


@dataclass(frozen=True)
class Chip:
    """One *device* of a TPU generation, which is what a program runs on: a chip, or on v4 and tpu7x one of a chip's two
    cores, as libtpu's topologies have it.

    Attributes:
        name: as in a topology's name.
        devices: devices of a chip.
        flops: peak operations a second, by HLO element type.
        hbm_bytes, vmem_bytes: sizes; VMEM lies beside the matrix units.
        usable_bytes: of HBM, for programs: what libtpu 0.0.42 says is available when it refuses one.
        hbm_bandwidth: bytes a second.
        ici_bandwidth: bytes a second to other chips, both directions together.
        mxu: rows, and columns, of a matrix unit.
        cycle_flops: what the device's matrix units do in a cycle, bf16.
    """

    name: str
    devices: int
    flops: Mapping[str, float]
    hbm_bytes: int
    usable_bytes: int
    hbm_bandwidth: float
    ici_bandwidth: float
    vmem_bytes: int
    mxu: int
    cycle_flops: int

    @property
    def clock(self) -> float:
        """Cycles a second."""
        return self.flops["bf16"] / self.cycle_flops

    def peak(self, dtype: str) -> float:
        """Operations a second for operands of an HLO type. f32 goes through as bf16, pass by pass."""
        return self.flops.get(dtype, self.flops["bf16"])


_COLUMNS = "devices bf16 int8 fp8 hbm_gib hbm_gb_s ici_gb_s vmem_mib mxu cycle_flops usable_gib"
_CHIPS = {
    "v4": (2, 275, 275, 275, 32, 1200, 300, 32, 128, 2**17, 15.25),
    "v5e": (1, 197, 393, 197, 16, 819, 400, 128, 128, 2**17, 15.75),
    "v5p": (1, 459, 918, 459, 95, 2765, 1200, 128, 128, 2**18, 95.74),
    "v6e": (1, 918, 1836, 918, 32, 1638, 800, 128, 256, 2**19, 31.25),
    "tpu7x": (2, 2307, 2307, 4614, 192, 7380, 1200, 128, 256, 2**19, 94.75),
}
"""Figures of a whole chip (TFLOP/s, GiB, GB/s, MiB), but for the last three columns, which are a device's."""


def _chip(name: str) -> Chip:
    row = dict(zip(_COLUMNS.split(), _CHIPS[name], strict=True))
    share = int(row["devices"])
    rates = {"bf16": row["bf16"], "s8": row["int8"], "u8": row["int8"], "f8e4m3fn": row["fp8"], "f8e5m2": row["fp8"]}
    return Chip(
        name,
        share,
        MappingProxyType({dtype: tera * 1e12 / share for dtype, tera in rates.items()}),
        int(row["hbm_gib"] * 2**30) // share,
        int(row["usable_gib"] * 2**30),
        row["hbm_gb_s"] * 1e9 / share,
        row["ici_gb_s"] * 1e9 / share,
        int(row["vmem_mib"] * 2**20) // share,
        int(row["mxu"]),
        int(row["cycle_flops"]),
    )


CHIPS: Mapping[str, Chip] = MappingProxyType({name: _chip(name) for name in _CHIPS})

SMALLEST = MappingProxyType({"v4": "2x2x1", "v5p": "2x2x1", "tpu7x": "2x2x1", "v5e": "1x1", "v6e": "1x1"})
"""The grid that is compiled for where only a generation is named. A program for one device does not see the others."""


def slice_name(text: str) -> str:
    """A topology's name for a generation (``v5e``) or a name that has its grid already (``v5e:2x2``)."""
    generation, colon, _ = text.partition(":")
    return text if colon or generation not in SMALLEST else f"{generation}:{SMALLEST[generation]}"


def chip(text: str) -> Chip:
    """The chip of a topology's name.

    Raises:
        ConfigError: there is no such generation in the table.
    """
    generation = text.partition(":")[0]
    if generation not in CHIPS:
        raise ConfigError(f"The table of chips has no {generation!r}.{nearest(generation, CHIPS)}")
    return CHIPS[generation]
