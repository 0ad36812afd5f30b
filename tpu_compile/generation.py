"""Text generation with two programs: one that reads a prompt (for each bucket of lengths), one that makes a token.

    decoder = Decoder(model.eval().to("tpu"), max_length=512, buckets=(32, 128))
    tokens = decoder(input_ids, attention_mask, max_new_tokens=200, temperature=0.8, top_p=0.95)

All that changes from token to token (the key and value cache, the last token, positions, what was generated) is state
of the decoder, overwritten in place: on the `tpu` device by donation, so that a step is one execution on buffers that
never move. Sampling is part of the program. A step has no arguments: it runs its program without asking Dynamo.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

from tpu_compile import compiler, tracing
from tpu_compile.errors import BadCall, ConfigError, TpuCompileError, plain
from tpu_compile.lowering.random import functionalize_subgraphs

_OTHERWISE = "Use the model's own generate, with model.forward = torch.compile(model.forward, backend='tpu')"
LOOK_EVERY = 16
"""Tokens between two looks at whether every sequence has ended: a look waits for the device."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from the logits. Temperature and ``top_p`` are arguments of the program; ``top_k`` and what
    is used at all are part of it."""

    sample: bool = False
    top_k: int = 0
    top_p: bool = False

    def choose(self, logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        """Logits [batch, vocabulary] to tokens int64 [batch]."""
        if not self.sample:
            return logits.argmax(-1)
        scores = logits.float() / temperature
        index = None
        if self.top_k:
            scores, index = scores.topk(min(self.top_k, scores.shape[-1]))
        elif self.top_p:
            scores, index = scores.sort(-1, descending=True)
        chances = scores.softmax(-1)
        if self.top_p:  # a token stays if those before it have not filled the share yet
            chances = torch.where(chances.cumsum(-1) - chances < top_p, chances, 0)
        drawn = (chances / torch.empty_like(chances).exponential_()).argmax(-1, keepdim=True)
        return (drawn if index is None else index.gather(-1, drawn)).squeeze(-1)


class Decoder:
    """Generates with a causal language model whose ``forward`` is that of transformers.

    Args:
        model: in eval mode, on the `tpu` device (resident) or the CPU (the cache is then copied once a token).
        max_length: places of the cache: a prompt's bucket and the new tokens must fit.
        buckets: lengths that prompts are padded to, on the left; a longer prompt gets a bucket of its own size, up to a
            power of two. Each bucket that is used is one program.
        chunk: read prompts in pieces of this many tokens instead: one program for all lengths.

    Sliding-window layers keep the whole length, so that one program serves before and after the window is full.
    """

    def __init__(
        self, model: torch.nn.Module, *, max_length: int, buckets: Sequence[int] = (), chunk: int | None = None
    ) -> None:
        self.model, self.max_length, self.chunk = model, max_length, chunk
        self.buckets = tuple(sorted(buckets))
        self._states: dict[int, _State] = {}

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
    ) -> torch.Tensor:
        """Prompts and what follows them.

        Args:
            input_ids: integers [batch, length]; shorter prompts are padded on the left.
            attention_mask: [batch, length], 0 where a prompt is padded. None: nowhere.
            temperature, top_k, top_p: None for all three takes the likeliest token; otherwise tokens are drawn with the
                generator that ``torch.manual_seed`` seeds.
            eos_token_id: ends a sequence, which is then filled with ``pad_token_id`` (default: the first of these).

        Returns:
            int64 [batch, length + new tokens] on the device of ``input_ids``; fewer new tokens than
            ``max_new_tokens`` if all sequences ended.

        Raises:
            BadCall: padding on the right, or no room in ``max_length``.
        """
        batch, length = input_ids.shape
        mask = (
            torch.ones(batch, length, dtype=torch.bool, device="cpu")
            if attention_mask is None
            else attention_mask.cpu().bool()
        )
        padded = self._bucket(length)
        _check(mask, padded, max_new_tokens, self.max_length)
        stops = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
        sampling = Sampling((temperature, top_k, top_p) != (None, None, None), top_k or 0, top_p is not None)
        with torch.no_grad():
            if batch not in self._states:
                self._states[batch] = _State(self.model, batch, self.max_length)
            state = self._states[batch]
            state.start(mask, padded, stops, pad_token_id, (temperature or 1.0, 1.0 if top_p is None else top_p))
            state.read(input_ids.cpu(), mask, padded, self.chunk or padded, sampling)
            new = state.extend(max_new_tokens, sampling, bool(stops))
        return torch.cat([input_ids, new.to(input_ids)], 1)

    def _bucket(self, length: int) -> int:
        if self.chunk:
            return -(-length // self.chunk) * self.chunk
        fitting = next((b for b in self.buckets if b >= length), None)
        return fitting or min(1 << (length - 1).bit_length(), max(self.max_length, length))


def _check(mask: torch.Tensor, padded: int, new: int, room: int) -> None:
    if not bool(mask[:, -1].all()) or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise BadCall(
            "attention_mask pads on the right or in the middle. Generation continues a prompt from its last token: "
            'pad on the left (tokenizer.padding_side = "left").',
            "INVALID_ARGUMENT",
        )
    if new < 1 or padded + new - 1 > room:
        raise BadCall(
            f"a prompt of {mask.shape[1]} tokens, padded to {padded}, and {new} new ones do not fit max_length={room}. "
            "Make the Decoder with a larger max_length, or with a bucket nearer to the prompt's length.",
            "INVALID_ARGUMENT",
        )


class _State:
    """Everything that generation overwrites, for one batch size, and the programs that do it."""

    def __init__(self, model: torch.nn.Module, batch: int, length: int) -> None:
        self.model = model
        self.cache = static_cache(model, batch, length)
        device = next(model.parameters()).device

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.mask = zeros(batch, length, dtype=torch.bool)
        self.token, self.position, self.finished = zeros(batch), zeros(batch), zeros(batch, dtype=torch.bool)
        self.tokens, self.cursor = zeros(batch, length), zeros(1)
        self.pad, self.stops = zeros(), zeros(1)
        self.temperature, self.top_p = zeros(dtype=torch.float32), zeros(dtype=torch.float32)
        self._pieces: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._programs: dict[Any, Callable[[int], None]] = {}
        self._zeros = zeros

    def start(
        self, mask: torch.Tensor, padded: int, stops: Sequence[int], pad: int | None, scalars: tuple[float, float]
    ) -> None:
        """Forget the last call's text, and take in this call's settings."""
        for number in _lengths(self.cache):
            number.zero_()
        whole = torch.ones(self.mask.shape, dtype=torch.bool, device="cpu")
        whole[:, :padded] = False
        whole[:, padded - mask.shape[1] : padded] = mask
        self.mask.copy_(whole)
        self.temperature.fill_(scalars[0])
        self.top_p.fill_(scalars[1])
        if len(stops) > self.stops.numel():
            self.stops = self._zeros(len(stops))
            self._programs.clear()
        ends = [*stops, *[-1] * (self.stops.numel() - len(stops))]
        self.stops.copy_(torch.tensor(ends, device="cpu"))
        self.pad.fill_(pad if pad is not None else (stops[0] if stops else 0))

    def read(self, ids: torch.Tensor, mask: torch.Tensor, padded: int, piece: int, sampling: Sampling) -> None:
        """Run the prompt through the model, ``piece`` tokens at a time, and choose the first new token."""
        gap = padded - ids.shape[1]
        ids = torch.nn.functional.pad(ids.where(mask, 0), (gap, 0))
        places = torch.nn.functional.pad((mask.cumsum(1) - 1).clamp(min=0), (gap, 0))
        if piece not in self._pieces:
            self._pieces[piece] = self._zeros(ids.shape[0], piece), self._zeros(ids.shape[0], piece)
        run = self._program(("read", piece, sampling), lambda: self._read_piece(piece, sampling))
        for start in range(0, padded, piece):
            for held, given in zip(self._pieces[piece], (ids, places), strict=True):
                held.copy_(given[:, start : start + piece])
            run(1)

    def extend(self, count: int, sampling: Sampling, may_end: bool) -> torch.Tensor:
        """Make tokens until there are ``count`` or all sequences have ended; int64 [batch, tokens] on the CPU."""
        made = 1
        run = self._program(("extend", sampling), lambda: self._step(sampling)) if count > 1 else None
        while run is not None and made < count:
            if may_end and bool(self.finished.all()):
                break
            turns = min(LOOK_EVERY, count - made)
            run(turns)
            made += turns
        tokens = self.tokens.cpu()[:, :made]
        return tokens[:, : _used(tokens, self.stops.cpu())] if may_end else tokens

    def _read_piece(self, piece: int, sampling: Sampling) -> None:
        ids, places = self._pieces[piece]
        next_token = sampling.choose(self._logits(ids, places), self.temperature, self.top_p)
        self.token.copy_(next_token)
        self.finished.copy_(torch.isin(next_token, self.stops))
        self.position.copy_(places[:, -1] + 1)
        self.tokens[:, 0] = next_token
        self.cursor.fill_(1)

    def _step(self, sampling: Sampling) -> None:
        next_token = sampling.choose(
            self._logits(self.token[:, None], self.position[:, None]), self.temperature, self.top_p
        )
        next_token = torch.where(self.finished, self.pad, next_token)
        self.token.copy_(next_token)
        self.finished.logical_or_(torch.isin(next_token, self.stops))
        self.position.add_(1)
        self.tokens.index_copy_(1, self.cursor, next_token[:, None])
        self.cursor.add_(1)

    def _logits(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        result = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=places,
            use_cache=True,
            logits_to_keep=1,
            **{_cache_name(self.model): self.cache},
        )
        logits: torch.Tensor = result.logits[:, -1]
        return logits

    def _program(self, key: Any, step: Callable[[], None]) -> Callable[[int], None]:
        if key not in self._programs:
            self._programs[key] = compiled_step(step, f"{type(self.model).__name__}_{key[0]}")
        return self._programs[key]


def compiled_step(step: Callable[[], None], name: str) -> Callable[[int], None]:
    """A function that overwrites tensors that stay, as one program. The result takes how often to run it: each time is
    one execution on those very tensors, without guards."""
    try:
        found = tracing.capture_call(step, (), {})
    except TorchDynamoException as error:
        if isinstance(error, TpuCompileError):
            raise
        raise BadCall(
            f"{name} cannot be one program, with a cache of a fixed size and lengths that are tensors (MPT wants "
            f"numbers). {_OTHERWISE}: that is a program for each length.\n{plain(error)}",
            "UNIMPLEMENTED",
        ) from error
    functionalize_subgraphs(found.graph)
    run = compiler.compile_graph(found.graph, name, kept=found.kept, one_graph=True)
    held: list[Any] = []

    def hold(arguments: list[Any]) -> list[Any]:
        held.extend(arguments)
        return [None] * len(found.graph.graph.output_node().args[0])  # type: ignore[arg-type]

    with tracing.running(hold):
        found.function()
    return lambda times: run.repeat(held, times)


def static_cache(model: Any, batch: int, length: int) -> Any:
    """transformers' StaticCache, its layers all of the whole length, allocated.

    Raises:
        BadCall: the model keeps something else than keys and values (Mamba).
    """
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    cache: Any = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=length)
    cache.layers = [StaticLayer(length) if _slides(layer) else layer for layer in cache.layers]
    for layer, pair in zip(cache.layers, _keys_and_values(model), strict=True):
        # no places: only the other sizes, dtype and device count
        empty = [torch.zeros((batch, t.shape[1], 0, t.shape[3]), dtype=t.dtype, device=t.device) for t in pair]
        layer.lazy_initialization(*empty)
    return cache


def _keys_and_values(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each layer keeps of one token, [1, heads, 1, width] without memory: configurations say it in many ways."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
    device = next(model.parameters()).device
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
        token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        model(input_ids=token, use_cache=True, **{_cache_name(model): cache})
    other = next((type(layer).__name__ for layer in cache.layers if getattr(layer, "keys", None) is None), None)
    if other:
        raise BadCall(
            f"a layer of {type(model).__name__} keeps a {other} where Decoder has a place for keys and values. "
            f"{_OTHERWISE}.",
            "UNIMPLEMENTED",
        )
    return [(layer.keys, layer.values) for layer in cache.layers]


def _slides(layer: Any) -> bool:
    return bool(getattr(layer, "is_sliding", False))


def _lengths(cache: Any) -> list[torch.Tensor]:
    numbers = (getattr(layer, "cumulative_length", None) for layer in cache.layers)
    return [n for n in numbers if isinstance(n, torch.Tensor)]


def _cache_name(model: Any) -> str:
    """``cache`` in transformers from 5.24 on, ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _used(tokens: torch.Tensor, stops: torch.Tensor) -> int:
    """Columns up to the last sequence's end."""
    ended = torch.isin(tokens, stops)
    first = torch.where(ended.any(1), ended.int().argmax(1), tokens.shape[1] - 1)
    return int(first.max()) + 1


_WARPERS = {"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"}


@functools.lru_cache(maxsize=4)
def _decoder(model: Any, room: int) -> Decoder:
    return Decoder(model, max_length=room)


def custom_generate(
    model: Any, input_ids: torch.Tensor, logits_processor: Any, generation_config: Any, **model_kwargs: Any
) -> torch.Tensor:
    """The decoding loop of transformers' ``generate``: ``model.generate(ids, custom_generate=custom_generate, ...)``.

    Greedy or sampled, with temperature, ``top_k`` and ``top_p``. The Decoders of the last four models, or powers of two
    that a model's texts fit into, are kept, and their models with them.

    Raises:
        ConfigError: a setting of ``generate`` that the loop does not have (beams, penalties, returned scores).
    """
    config = generation_config
    others = [name for each in logits_processor if (name := type(each).__name__) not in _WARPERS]
    others += [name for name in ("return_dict_in_generate", "output_scores") if getattr(config, name, None)]
    if others or (config.num_beams or 1) > 1:
        raise ConfigError(
            f"tpu_compile.generation does not have {', '.join(others) or 'beams'}: leave custom_generate out, and use "
            'generate(cache_implementation="static") with a compiled model.forward.'
        )
    room = 1 << (2 * config.max_length - 1).bit_length()
    decoder = _decoder(model, room)
    drawn = {name: getattr(config, name) or None for name in ("temperature", "top_k", "top_p")}
    return decoder(
        input_ids,
        model_kwargs.get("attention_mask"),
        max_new_tokens=config.max_length - input_ids.shape[1],
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        **(drawn if config.do_sample else {}),
    )


__all__ = ["Decoder", "Sampling", "custom_generate"]
