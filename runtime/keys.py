"""What decides a binary besides its program, as labelled text for the cache key: compiler flags, the builds of shared
libraries, the host's CPU."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import platform
import re
import secrets
from pathlib import Path

from tpu_compile.config import environment

_INERT = frozenset(
    """
    xla_dump_to xla_dump_hlo_as_text xla_dump_hlo_as_long_text xla_dump_hlo_as_proto xla_dump_hlo_as_dot
    xla_dump_hlo_as_url xla_dump_hlo_as_html xla_dump_hlo_snapshots xla_dump_hlo_module_re xla_dump_hlo_pass_re
    xla_dump_hlo_pipeline_re xla_dump_fusion_visualization xla_dump_include_timestamp xla_dump_max_hlo_modules
    xla_dump_module_metadata xla_dump_disable_metadata xla_dump_compress_protos
    xla_force_host_platform_device_count xla_gpu_cuda_data_dir xla_gpu_experimental_autotune_cache_mode
    xla_tpu_sdc_checker_streamz_metric xla_tpu_sdc_checker_enable_sdc_event_callbacks
    xla_tpu_sdc_checker_enable_coresweep_ng_callbacks xla_tpu_sdc_checker_no_logging_if_callbacks_are_present
    v vmodule logtostderr alsologtostderr stderrthreshold minloglevel log_dir
    """.split()
)
"""Flags that decide what is written about a program, not the program, or that other parts say: JAX's list, and the
logging library's own. Names that look like it are no proof: ``xla_gpu_autotune_level`` and debug flags change code."""

_CODE_FEATURES = re.compile(
    r"sse\w*|ssse3|pni|avx\w*|amx\w*|fma\w*|f16c|xop|bmi\d|adx|aes|vaes|v?pclmulqdq|sha\w*|sm[34]|gfni|popcnt|abm|lzcnt"
    r"|movbe|cx16|rdrand|rdseed|xsave\w*|lahf_lm|fsgsbase|clwb|clflushopt|mmx\w*|tbm|prfchw|3dnowprefetch|serialize"
    r"|movdir\w*|waitpkg|enqcmd|uintr|hreset|kl|widekl|rdpid|wbnoinvd|cldemote|ptwrite|rtm|hle"
)
"""x86 features that code generation looks at. Others (mitigations, virtualisation) come and go with the kernel."""

_BLOCKS, _BLOCK_SIZE = 64, 4096


def flags(text: str) -> dict[str, str]:
    """The flags of XLA_FLAGS or LIBTPU_INIT_ARGS by name, the last of each; a flag with no value reads ``true``.

    XLA takes a file's name in place of flags; what the file says is then what counts.
    """
    if text.strip() and not text.lstrip().startswith("-"):
        with contextlib.suppress(OSError):
            text = Path(text.strip()).read_text()
    pairs = (word.lstrip("-").partition("=") for word in text.split() if word.startswith("-"))
    return {name: value if equals else "true" for name, equals, value in pairs}


def flags_part(variable: str) -> str:
    """An environment variable's flags, sorted, without those that leave the binary alone."""
    kept = {name: value for name, value in flags(environment(variable)).items() if name not in _INERT}
    return " ".join(f"{name}={value}" for name, value in sorted(kept.items()))


# Libraries


@functools.cache
def library_build(path: str) -> str:
    """Which build of a shared library this process has loaded: its file's fingerprint, taken once.

    A library that was replaced on disk since it was loaded equals nothing: this process must not share its programs.
    """
    if _replaced(os.path.realpath(path)):
        return f"replaced since process {os.getpid()} loaded it ({secrets.token_hex(8)})"
    return file_fingerprint(Path(path))


def _replaced(path: str) -> bool:
    """Whether the kernel maps a deleted file of that name. What is no Linux says nothing."""
    try:
        with open("/proc/self/maps", errors="replace") as lines:
            return any(line.endswith(f"{path} (deleted)\n") for line in lines)
    except OSError:
        return False


def file_fingerprint(path: Path) -> str:
    """Size and a hash over 64 evenly spaced blocks: tells builds of a shared library apart that claim one version.

    A library of 350 MB takes about a millisecond; reading all of it would take a second. The first block holds an ELF
    file's build id.

    Raises:
        OSError: it cannot be read.
    """
    total = hashlib.sha256()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for block in range(_BLOCKS):
            file.seek(max(0, size - _BLOCK_SIZE) * block // (_BLOCKS - 1))
            total.update(file.read(_BLOCK_SIZE))
    return f"{size}-{total.hexdigest()[:16]}"


def largest_library(folder: Path) -> Path:
    """The shared library that holds a package's code; the others of its folder are stubs beside it."""
    return max((p for p in folder.iterdir() if p.suffix in (".so", ".dylib", ".pyd")), key=lambda p: p.stat().st_size)


# The host


def host_cpu() -> str:
    """The host's CPU as ``model #digest``; the digest covers the instruction set, which XLA's code depends on."""
    facts = _cpu_facts()
    model = facts.get("model name") or facts.get("CPU part") or platform.processor() or platform.machine()
    identity = [platform.machine(), *(f"{k}={v}" for k, v in sorted(facts.items()) if k in _MODEL), *_features(facts)]
    return f"{model} #{hashlib.sha256(chr(0).join(identity).encode()).hexdigest()[:16]}"


def _features(facts: dict[str, str]) -> list[str]:
    """The instruction sets, sorted: of x86's flags those that name one; an ARM kernel lists nothing else."""
    if "flags" in facts:
        return sorted(filter(_CODE_FEATURES.fullmatch, facts["flags"].split()))
    return sorted(facts.get("Features", "").split())


_MODEL = frozenset(
    ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU architecture", "CPU variant", "CPU part")
)


def _cpu_facts() -> dict[str, str]:
    try:
        with open("/proc/cpuinfo") as lines:
            # The first processor only: on a machine with hundreds the whole file takes the kernel a tenth of a second.
            block = list(itertools.takewhile(str.strip, lines))
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in block)}
