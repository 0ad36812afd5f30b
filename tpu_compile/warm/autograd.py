"""AOTAutograd's results kept by torch's own cache, so that a process that sees a Dynamo graph again neither traces nor
partitions nor lowers it.

torch does the work: it decides what can be cached, makes the entry, puts the wrappers around what comes back. Three
things are ours, while one of our compiles runs and for it alone: the key (torch's is made for inductor, and hashes and
imports all of it), the place (the cache directory, checked and capped like all of it), and what is refused.

torch's key covers Dynamo's graph, the arguments and torch's own settings. Ours adds what lowers and compiles it. What
torch takes on trust is refused: code of the user's that runs while AOTAutograd traces and shows in no key.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.utils import GmWrapper
from torch._dynamo.utils import counters as torch_counters
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache, AOTAutogradCacheDetails
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._inductor import config as inductor_config
from torch._inductor.codecache import AOTAUTOGRAD_CACHE_PREFIX, FxGraphCache
from torch._inductor.output_code import OutputCode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from tpu_compile import compiler
from tpu_compile.cache import CacheKey, CacheStore, open_store
from tpu_compile.cache.store import TRACED, tracing_store
from tpu_compile.config import config
from tpu_compile.stats import count, counters, event
from tpu_compile.warm import sources
from tpu_compile.warm.artifact import GraphCode, ahead_of_time, swallowed
from tpu_compile.warm.structure import NotKept

log = logging.getLogger("tpu_compile.warm")

Compiler = Callable[[GraphModule, Sequence[Any]], Any]

_MOST_CANDIDATES = 8
"""Entries of one key that differ by guards on symbolic sizes."""
_NAMESPACES = frozenset({"aten", "prims", "prim"})
_BROKEN = (pickle.UnpicklingError, AttributeError, ImportError, EOFError, KeyError, TypeError, ValueError, RuntimeError)


def keeper(graph_module: GraphModule, example_inputs: Sequence[Any], name: str, one_graph: bool) -> Keeper | None:
    """How to keep what AOTAutograd makes of a graph; None where it is not kept.

    Raises:
        NotKept: Dynamo makes an artifact of the graph, and it depends on more than that can say.
    """
    if ahead_of_time():
        if reason := refusal(graph_module, example_inputs):
            raise NotKept(reason)
        return Keeper(name, None, {})
    store = open_store()
    if store is None or not config.cache_tracing or compiler.looked_at():
        return None
    reason = refusal(graph_module, example_inputs)
    if reason:
        count("tracing_bypasses")
        event("tracing_cache/cache_bypasses", program=name, reason=reason)
        log.info("%s is traced anew in every process: %s", name, reason)
        return None
    return Keeper(name, tracing_store(store), facts(one_graph))


def facts(one_graph: bool) -> dict[str, str]:
    """What decides a compiled graph and is in no key of torch's, as key parts."""
    backends = torch.backends
    attention = (
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
    )
    return {
        **compiler.runtime.client.key_parts(compiler.options_in_force()),
        "libraries": sources.libraries(),
        "sources": sources.digest(),
        "one_graph": str(one_graph),
        "knobs": " ".join(f"{name}={value}" for name, value in sorted(config.keyed().items())),
        "foreign_rules": " ".join(sorted(sources.foreign_rules())),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()),
        "composites": f"mkldnn={backends.mkldnn.enabled} attention={attention}".replace(" ", ","),
    }


# ---- what is refused


def refusal(graph_module: GraphModule, example_inputs: Sequence[Any]) -> str:
    """Why what AOTAutograd makes of a graph depends on more than a key can say; empty if it does not."""
    reasons = (
        _foreign_code(graph_module),
        _unnamed_contents(graph_module),
        _odd_arguments(example_inputs),
        _foreign_decomposition(),
    )
    return next(filter(None, reasons), "")


def _foreign_code(graph_module: GraphModule) -> str:
    """An operator of another package: its autograd formula and its decomposition are the package's Python."""
    for module in graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            if node.op == "call_module" and not isinstance(_attribute(module, node.target), GraphModule):
                return f"it calls the module {node.target}"
            if _namespace(node.target) not in _NAMESPACES:
                return f"it calls {node.target}, an operator of another package"
    return ""


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _namespace(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name.partition("::")[0])
    return "aten"


def _unnamed_contents(graph_module: GraphModule) -> str:
    """A tensor in the graph itself: torch's key has its type alone, and its values become constants of a program."""
    for module in graph_module.modules():
        held = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
        if any(isinstance(value, torch.Tensor) for value in held):
            return "it holds a tensor"
    return ""


def _odd_arguments(example_inputs: Sequence[Any]) -> str:
    """Subclasses run their own code; of arguments that share memory, AOTAutograd's guards would be missing after a
    hit."""
    plain = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool, type(None))
    strange = next((type(value).__name__ for value in example_inputs if not isinstance(value, plain)), "")
    if strange:
        return f"an argument is a {strange}"
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    kinds = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
    odd = next((type(t).__name__ for t in tensors if type(t) not in kinds), "")
    if odd:
        return f"an argument is a {odd}"
    if any(t.layout is not torch.strided for t in tensors):
        return "an argument is sparse"
    memory = [t.untyped_storage()._cdata for t in tensors]
    return "" if len(set(memory)) == len(memory) else "two arguments share memory"


def _foreign_decomposition() -> str:
    for table in torch._decomp.global_decomposition_table.values():
        for op, function in table.items():
            if not str(getattr(function, "__module__", "")).startswith(("torch.", "torchvision.")):
                return f"{op} has a decomposition of the user's"
    return ""


# ---- what is kept


class _Details(AOTAutogradCacheDetails):
    """What torch's key is made of, without inductor."""

    def _init_fx_graph_hash_details(self, gm: GraphModule, example_inputs: Sequence[Any], fx_config: Any) -> None:
        FxGraphCache._check_can_cache(gm, example_inputs, fx_config)
        self.gm, self.example_inputs = gm, list(example_inputs)


@dataclass
class Keeper:
    """Where the results of one run of AOTAutograd go: into the cache, or (``store`` is None) only into the artifact
    that Dynamo makes of them."""

    name: str
    store: CacheStore | None
    facts: Mapping[str, str]
    found: int = 0
    started: float = field(default_factory=time.perf_counter)
    other_work: float = field(default_factory=lambda: _other_work())

    @property
    def ahead_of_time(self) -> bool:
        """Whether executables go into what is kept."""
        return self.store is None

    def keeping(self, compiler: Compiler, around: Callable[[Compiler], Compiler] = lambda given: given) -> Compiler:
        """A compiler whose results AOTAutograd can keep; ``around`` wraps it, results included."""
        made = around(lambda graph, inputs: GraphCode(compiler(graph, inputs)))
        return SerializableAOTDispatchCompiler(OutputCode, made)  # type: ignore[no-any-return, unused-ignore]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let AOTAutograd keep, and find, what it makes inside the block.

        Raises:
            CacheError: something in the cache is damaged, and the knob ``raise_cache_errors`` is on.
        """
        before = dict(torch_counters["aot_autograd"])
        token = _active.set(self)
        swallowed.set(None)
        try:
            with _one_at_a_time, ExitStack() as stack:
                for context in _settings(self.store is None):
                    stack.enter_context(context)
                yield
        finally:
            _active.reset(token)
        self._report(before)
        if (fault := swallowed.get()) is not None:
            raise fault

    def _report(self, before: Mapping[str, int]) -> None:
        if self.store is None:
            return
        for theirs, ours in _COUNTED.items():
            times = torch_counters["aot_autograd"][theirs] - before.get(theirs, 0)
            if times:
                count(f"tracing_{ours}", times)
                event(f"tracing_cache/cache_{ours}", program=self.name)

    def key(self, module: Any, arguments: list[Any], aot_config: Any) -> str:
        """torch's key for a Dynamo graph. Raises what torch takes for "not cacheable"."""
        if self.store is None:
            return f"artifact of {self.name}"
        graph_module = module.gm if isinstance(module, GmWrapper) else module
        with autograd_cache.sanitize_gm_for_cache(graph_module):
            autograd_cache.check_cacheable(graph_module)
            details = _Details(graph_module, arguments, aot_config, autograd_cache.create_fx_config())
            return str(
                AOTAUTOGRAD_CACHE_PREFIX + autograd_cache.AOTAutogradCachePickler(graph_module).get_hash(details)
            )

    def candidates(self, key: str) -> Iterator[tuple[Any, bytes, bool]]:
        """What is kept under a key, in torch's terms."""
        for number in range(_MOST_CANDIDATES if self.store else 0):
            place = self._place(key, number)
            entry = self.store.look(place)  # type: ignore[union-attr]
            if entry is None:
                return
            self.found = number + 1
            try:
                result = pickle.loads(entry.payload)
            except _BROKEN as fault:
                self.store.discard(place, f"it cannot be unpickled: {fault}")  # type: ignore[union-attr]
                continue
            yield result, entry.payload, True

    def keep(self, key: str, content: bytes) -> None:
        """Keep a result that torch has pickled."""
        if self.store is None or not sources.unchanged():
            return
        seconds = max(0.0, time.perf_counter() - self.started - (_other_work() - self.other_work))
        place = self._place(key, self.found % _MOST_CANDIDATES)
        self.store.put(place, content, compile_seconds=seconds, metadata={}, even_if_quick=True)

    def _place(self, key: str, number: int) -> CacheKey:
        return CacheKey.of(self.name, {TRACED: key, "candidate": str(number), **self.facts})


def _other_work() -> float:
    """Seconds that other counters have."""
    return sum(counters[f"{stage}_seconds"] for stage in ("lowering", "xla", "load", "cache"))


_COUNTED = {
    "autograd_cache_hit": "hits",
    "autograd_cache_miss": "misses",
    "autograd_cache_bypass": "bypasses",
}


# ---- how torch is told


_active: ContextVar[Keeper | None] = ContextVar("tpu_compile_keeper", default=None)
"""Whose compile this is: other threads, and other backends, meet torch's own functions."""

_one_at_a_time = threading.RLock()
"""torch's functions are exchanged for the whole process. Dynamo compiles in one thread at a time anyway."""

_true_key = autograd_cache.autograd_cache_key
_true_candidates = AOTAutogradCache.iterate_over_candidates
_true_write = AOTAutogradCache._write_to_local_cache


def _key(module: Any, arguments: Any, config: Any, extra: Any = None) -> tuple[str, list[str]]:
    ours = _active.get()
    return (ours.key(module, arguments, config), []) if ours else _true_key(module, arguments, config, extra)


def _candidates(local: bool, remote_cache: Any, key: str) -> Iterator[tuple[Any, bytes, bool]]:
    ours = _active.get()
    return ours.candidates(key) if ours else _true_candidates(local, remote_cache, key)


def _write(key: str, content: bytes) -> None:
    ours = _active.get()
    return ours.keep(key, content) if ours else _true_write(key, content)


def _settings(artifact: bool) -> Iterator[Any]:
    """What has to be in force while AOTAutograd runs for its cache to serve a backend that is not inductor."""
    yield patch.object(autograd_cache, "autograd_cache_key", _key)
    yield patch.object(AOTAutogradCache, "iterate_over_candidates", staticmethod(_candidates))
    yield patch.object(AOTAutogradCache, "_write_to_local_cache", staticmethod(_write))
    yield functorch_config.patch(
        enable_autograd_cache=True,
        enable_remote_autograd_cache=False,
        bundled_autograd_cache=True,
        autograd_cache_allow_custom_autograd_functions=True,  # both of their graphs are in the key
        force_non_lazy_backward_lowering=True,  # an entry is saved once, with its backward
        strict_autograd_cache=artifact,
    )
    yield inductor_config.patch(fx_graph_cache=True)
