"""``torch.autocast("tpu")``: torch has the policy for other devices in C++; this is the same policy, by op name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tpu_compile.device.untraced import implement

_KEY = "AutocastPrivateUse1"
_DISPATCH_KEY: Any = torch._C._parse_dispatch_key(_KEY)
_EXCLUDED = torch._C.DispatchKeySet(_DISPATCH_KEY)

LOWER = """
_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu addmm
addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
scaled_dot_product_attention lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell _thnn_fused_gru_cell
""".split()
FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm native_layer_norm
group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
upsample_bicubic2d _upsample_bicubic2d_aa norm prod softmax log_softmax cumprod cumsum linalg_vector_norm
linalg_matrix_norm sum
""".split()
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()
_REFUSED = "binary_cross_entropy"


class Autocast:
    """The kernels of the autocast key. Every other op falls through it."""

    def __init__(self) -> None:
        self._everything = torch.library.Library("_", "IMPL")
        self._library = torch.library.Library("aten", "IMPL")

    def register(self) -> None:
        self._everything.fallback(torch.library.fallthrough_kernel, _KEY)
        for names, make in ((LOWER, _lower), (FLOAT32, _float32), (WIDEST, _widest)):
            for name in names:
                for op in _overloads(name):
                    implement(self._library, _full_name(op), make(op), _KEY)
        for op in _overloads(_REFUSED):
            implement(self._library, _full_name(op), _refuse, _KEY)


def _overloads(name: str) -> Iterator[OpOverload]:
    packet = getattr(torch.ops.aten, name)
    for overload in packet.overloads():
        op = getattr(packet, overload)
        if not op._schema.is_mutable:
            yield op


def _full_name(op: OpOverload) -> str:
    overload = op._schema.overload_name
    return op._schema.name.removeprefix("aten::") + (f".{overload}" if overload else "")


def _cast(value: Any, wanted: Callable[[torch.Tensor], torch.dtype]) -> Any:
    if isinstance(value, torch.Tensor):
        eligible = value.is_floating_point() and value.dtype != torch.float64 and value.device.type == "tpu"
        return value.to(wanted(value)) if eligible else value
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(item, wanted) for item in value])
    return value


def _kernel(op: OpOverload, choose: Callable[[Sequence[Any]], Callable[[torch.Tensor], torch.dtype]]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            wanted = choose(args)
            return op(*(_cast(a, wanted) for a in args), **{k: _cast(v, wanted) for k, v in kwargs.items()})

    return run


def _lower(op: OpOverload) -> Any:
    """Matrix products and their like, in autocast's dtype."""
    return _kernel(op, lambda args: lambda t: torch.get_autocast_dtype("tpu"))


def _float32(op: OpOverload) -> Any:
    """What loses too much in 16 bits, in float32; a dtype that the caller names is his."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            if kwargs.get("dtype") is not None:
                return op(*args, **kwargs)
            return op(
                *(_cast(a, lambda t: torch.float32) for a in args),
                **{k: _cast(v, lambda t: torch.float32) for k, v in kwargs.items()},
            )

    return run


def _widest(op: OpOverload) -> Any:
    """Operands of several dtypes, in the widest of them."""

    def choose(args: Sequence[Any]) -> Callable[[torch.Tensor], torch.dtype]:
        flat = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a])]
        kinds = [t.dtype for t in flat if isinstance(t, torch.Tensor) and t.is_floating_point()]
        low = torch.get_autocast_dtype("tpu")
        widest = torch.float32 if torch.float32 in kinds else low
        return lambda t: widest

    return _kernel(op, choose)


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: use "
        "binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss."
    )
