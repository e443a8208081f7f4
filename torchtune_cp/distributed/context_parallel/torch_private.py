"""Everything that attention uses of torch and torch has not made public.

What meshes and sharding use is in `torchtune_cp.distributed.torch_private`, what plans use in the planner's;
no other file imports a private torch name. Each use names the versions it was checked with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

# 2.13.0: the ring template, its options and the table of DTensor handlers live here.
from torch.distributed.tensor.experimental._context_parallel import _attention as cp_impl
from torch.multiprocessing.reductions import StorageWeakRef

from torchtune_cp.attention import active_region, other_kind

aten = torch.ops.aten

#: Along which dimension of q, k, v `[batch, heads, seq, head_dim]` context parallelism cuts.
SEQ_DIM = 2


# --- the CPU kernel in torch's ring template (2.13.0) ---------------------------------------------
#
# torch registers ring attention for the CUDA kernels only. DTensor's dispatcher takes a handler per
# operator, and the ring template takes any local kernel that returns the output and its logsumexp:
# the CPU flash kernel does. It also knows grouped-query attention, so the few KV heads travel alone.


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


@contextlib.contextmanager
def _merge_precision(dtype: torch.dtype) -> Generator[None, None, None]:
    # The template merges partial results in float32; for float64 inputs that would lose them half
    # their digits, so it then merges in the inputs' own precision.
    options = cp_impl._cp_options
    saved = options.convert_to_f32
    options.convert_to_f32 = dtype != torch.float64
    try:
        yield
    finally:
        options.convert_to_f32 = saved


def _like(reference: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, reference.device_mesh, reference.placements, run_check=False)


def _cpu_forward_handler(
    op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor, DTensor]:
    query, key, value, *rest = args
    is_causal = rest[1] if len(rest) > 1 else kwargs.get("is_causal", False)
    group = query.device_mesh.get_group()
    with _merge_precision(query.dtype):
        out, logsumexp = cp_impl._templated_ring_attention(
            group,
            SEQ_DIM,
            op_call,
            _local(query),
            _local(key),
            _local(value),
            is_causal=is_causal,
            scale=kwargs.get("scale"),
        )
    return _like(query, out), _like(query, logsumexp)


def _cpu_backward_handler(
    op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor, DTensor, DTensor]:
    grad_out, query, key, value, out, logsumexp, _dropout_p, is_causal = args
    group = query.device_mesh.get_group()

    def backward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **rest: Any
    ) -> tuple[torch.Tensor, ...]:
        grad_out, out, logsumexp = rest["grad_out"], rest["out"], rest["logsumexp"]
        return op_call(
            grad_out, query, key, value, out, logsumexp, 0.0, rest["is_causal"], scale=rest["scale"]
        )

    with _merge_precision(query.dtype):
        grads = cp_impl._templated_ring_attention_backward(
            group,
            SEQ_DIM,
            backward,
            grad_out=_local(grad_out),
            grad_out_name="grad_out",
            query=_local(query),
            key=_local(key),
            value=_local(value),
            out=_local(out),
            logsumexp=_local(logsumexp),
            is_causal=is_causal,
            scale=kwargs.get("scale"),
        )
    return _like(query, grads[0]), _like(key, grads[1]), _like(value, grads[2])


#: torch's own table plus the CPU kernel; torch installs what this table holds while CP is active.
cp_impl.custom_ops[aten._scaled_dot_product_flash_attention_for_cpu.default] = _cpu_forward_handler
cp_impl.custom_ops[aten._scaled_dot_product_flash_attention_for_cpu_backward.default] = (
    _cpu_backward_handler
)

# --- attention kernels that also give the logsumexp (2.13.0) --------------------------------------
#
# What is public gives the output alone, or has no backward that takes a logsumexp from elsewhere. The
# variable-length operators are those that torch.nn.attention.varlen calls.


class Backward(NamedTuple):
    """What the backward pass of attention starts from; shapes as its forward pass takes and gives them.

    Attributes:
        grad_out: Gradient of the output.
        query: As given to forward.
        key: Likewise.
        value: Likewise.
        out: The output over all keys.
        logsumexp: Of the scores of each query, over all keys.
        scale: Of the scores.
    """

    grad_out: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    logsumexp: torch.Tensor
    scale: float


def flash_for_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    bias: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU kernel; few KV heads are fine, causal is aligned at the first query and key.

    Args:
        query: `[1, heads, nq, head_dim]`, any strides.
        key: `[1, kv_heads, nk, head_dim]`.
        value: As `key`.
        is_causal: Give no bias then.
        bias: `[nq, nk]` in the dtype of `query`, added to the scores; -inf masks.
        scale: Of the scores.

    Returns:
        The output, like `query`, and the logsumexp `[1, heads, nq]` (float64 for it, else float32).
    """
    out: tuple[torch.Tensor, torch.Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return out


def flash_for_cpu_backward(
    given: Backward, is_causal: bool, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Backward of `flash_for_cpu`; output and logsumexp may be those over more keys."""
    *tensors, scale = given
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
        aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    )
    return grads


def flash_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    left: int | None,
    right: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flash attention on CUDA over many segments; masks are aligned at the last query and key.

    Args:
        query: `[queries, heads, head_dim]`, float16 or bfloat16.
        key: `[keys, kv_heads, head_dim]`.
        value: As `key`.
        cu_q: Where the segments' queries begin, and their end, int32.
        cu_k: Likewise for keys.
        max_q: Most queries in a segment.
        max_k: Most keys in a segment.
        left: How far before the aligned key a query sees, None without limit.
        right: How far behind.
        scale: Of the scores.

    Returns:
        The output and the logsumexp `[heads, queries]`, float32.
    """
    out, logsumexp, *_ = aten._flash_attention_forward(
        query,
        key,
        value,
        cu_q,
        cu_k,
        max_q,
        max_k,
        0.0,
        left is None and right == 0,
        False,
        scale=scale,
        window_size_left=-1 if left is None else left,
        window_size_right=-1 if right is None else right,
    )
    return out, logsumexp


def flash_varlen_backward(
    given: Backward,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    left: int | None,
    right: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Backward of `flash_varlen`; output and logsumexp may be those over more keys."""
    *tensors, scale = given
    # Without dropout no random state is read, but the operator wants the tensors.
    no_state = torch.zeros(2, dtype=torch.uint64, device=given.query.device)
    unused = torch.empty(0, device=given.query.device)
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = aten._flash_attention_backward(
        *tensors,
        cu_q,
        cu_k,
        max_q,
        max_k,
        0.0,
        left is None and right == 0,
        no_state,
        unused,
        scale=scale,
        window_size_left=-1 if left is None else left,
        window_size_right=-1 if right is None else right,
    )
    return grads


# --- keys and values kept from forward to backward (2.13.0) --------------------------------------
#
# The template gathers all ranks' keys and values in forward, drops them, and gathers the same bytes
# again in backward. Its rotaters, which do that, come from one function of its module; one that is
# given its buffer gathers nothing. The buffer is found again through the storage of the logsumexp,
# which autograd saves, and dies with it.


@dataclass
class _KeptKV:
    """Gathered keys and values, by the storage of the logsumexp that their backward takes.

    Attributes:
        wanted: Whether forward passes keep theirs now.
        buffers: What was kept and not yet taken.
    """

    wanted: bool = False
    buffers: dict[StorageWeakRef, torch.Tensor] = field(default_factory=dict)

    def keep(self, logsumexp: torch.Tensor, gathered: torch.Tensor) -> None:
        for dead in [key for key in self.buffers if key.expired()]:
            del self.buffers[dead]
        self.buffers[_storage_of(logsumexp)] = gathered

    def take(self, logsumexp: torch.Tensor) -> torch.Tensor | None:
        return self.buffers.pop(_storage_of(logsumexp), None) if self.buffers else None


#: Module-level state: an operator's forward and backward share nothing but the tensors that autograd saves.
_kept_kv = _KeptKV()

#: Where each backward operator takes the logsumexp.
_LOGSUMEXP_ARG = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 5,
    aten._scaled_dot_product_flash_attention_backward.default: 5,
    aten._scaled_dot_product_efficient_attention_backward.default: 6,
    aten._scaled_dot_product_cudnn_attention_backward.default: 5,
}


def _storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    with torch.no_grad():
        return StorageWeakRef(_local(tensor).untyped_storage())


@contextlib.contextmanager
def _seeing_kv_rotaters(see: Callable[[Any], None]) -> Generator[None, None, None]:
    module: Any = cp_impl  # whose function is replaced for a while
    original = module._create_rotater

    def create(group: Any, seq_dim: int, method: Any = None) -> Any:
        rotater = original(group, seq_dim, method)
        # Gradients are always rotated all-to-all, by a rotater that is asked for by name.
        if method is None and isinstance(rotater, cp_impl._AllGatherRotater):
            see(rotater)
        return rotater

    module._create_rotater = create
    try:
        yield
    finally:
        module._create_rotater = original


def _keeping(handler: Callable[..., Any]) -> Callable[..., Any]:
    def forward(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _kept_kv.wanted:
            return handler(op_call, args, kwargs)
        rotaters: list[Any] = []
        with _seeing_kv_rotaters(rotaters.append):
            out = handler(op_call, args, kwargs)
        for rotater in rotaters:
            _kept_kv.keep(out[1], rotater._aggregated_buffer)
        return out

    return forward


def keep_kv(logsumexp: torch.Tensor, gathered: torch.Tensor) -> None:
    """Keep gathered keys and values for the backward that takes this logsumexp, where that is asked for.

    Args:
        logsumexp: Of the attention; autograd saves it, and what is kept dies with it.
        gathered: Of all ranks.
    """
    if _kept_kv.wanted:
        _kept_kv.keep(logsumexp, gathered)


def take_kept_kv(logsumexp: torch.Tensor) -> torch.Tensor | None:
    """Give what `keep_kv` kept, once; None if it kept nothing."""
    return _kept_kv.take(logsumexp)


def _is_traced() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


@torch.library.custom_op(
    "torchtune_cp::after", mutates_args=(), schema="(Tensor tensor, Tensor earlier) -> Tensor"
)
def _copy_after(tensor: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


@_copy_after.register_fake
def _(tensor: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _after(tensor: DTensor, gradient: DTensor) -> DTensor:
    """The same values, as the result of an operator that also takes the gradient.

    To the compiler, gathering the keys and values for backward needs nothing of backward: it would move
    the second gather into forward and keep what it brings, the whole sequence's KV of every layer, even
    where all is to be recomputed. An operator that it cannot look into holds it back.
    """
    return _like(tensor, _copy_after(_local(tensor), _local(gradient)))


def _using_kept(handler: Callable[..., Any]) -> Callable[..., Any]:
    def backward(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_traced():
            gradient, query, key, value, *rest = args
            args = (gradient, query, _after(key, gradient), _after(value, gradient), *rest)
        kept = _kept_kv.take(args[_LOGSUMEXP_ARG[op_call]])
        if kept is None:
            return handler(op_call, args, kwargs)
        with _seeing_kv_rotaters(lambda r: setattr(r, "_aggregated_buffer", kept)):
            return handler(op_call, args, kwargs)

    return backward


for _op, _handler in list(cp_impl.custom_ops.items()):
    cp_impl.custom_ops[_op] = (_using_kept if _op in _LOGSUMEXP_ARG else _keeping)(_handler)


def keep_gathered_kv(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let attention inside `forward` keep the gathered keys and values for its backward.

    Costs the memory of the whole sequence's KV until then, saves gathering it again. Has an effect
    under context parallelism with the rotate method `allgather`, in eager mode.

    Args:
        forward: Called with gradients on; what backward calls of it again keeps nothing.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        saved, _kept_kv.wanted = _kept_kv.wanted, torch.is_grad_enabled()
        try:
            return forward(*args, **kwargs)
        finally:
            _kept_kv.wanted = saved

    return run


#: Attribute of a mesh: its ring's attention, by layout, and torch's function that it calls. torch makes a new
#: closure each time its context manager is entered: torch.compile would then recompile every step. On the
#: mesh, for it dies with it; an equal mesh of a process group that was destroyed is another one.
_RING = "_torchtune_cp_ring"


def _ring(torch_sdpa: Callable[..., torch.Tensor], causal_layout: bool) -> Callable[..., Any]:
    """Refuse in words what torch's ring attention cannot do, or would do wrongly without a word."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_causal: bool,
        window: int | None,
        chunk: int | None,
        mask_mod: Any,
        scale: float | None,
    ) -> torch.Tensor:
        if is_causal != causal_layout:
            raise other_kind(is_causal, causal_layout)
        region = active_region()
        for name, given, expected in (
            ("window", window, region.window),
            ("chunk", chunk, region.chunk),
        ):
            # A limit that the context was told of was found to cut nothing, and so does a larger one.
            if given is not None and (expected is None or given < expected):
                raise NotImplementedError(
                    f"attention with {name}={given} inside context_parallel(...) with {name}={expected}:"
                    f" give it options=ContextParallelOptions({name}={given})"
                )
        if mask_mod is not None:
            raise NotImplementedError(
                "attention with a mask_mod inside context_parallel(...) without one: give it method="
                '"allgather" and options=ContextParallelOptions(mask_mod=...)'
            )
        gqa = key.size(1) != query.size(1)
        if query.is_cuda and query.dtype == torch.float32 and gqa:
            raise NotImplementedError(
                "grouped-query attention in float32 under context parallelism on CUDA: torch has no"
                " fused kernel for it to put into the ring; set dtype=bf16"
            )
        return torch_sdpa(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=gqa)

    return attend


@contextlib.contextmanager
def ring_attention(
    mesh: DeviceMesh, device: torch.device, *, load_balance: bool, rotate_method: str
) -> Generator[Callable[..., torch.Tensor], None, None]:
    """Enter torch's `context_parallel` with its module-level options set, and put back afterwards.

    Args:
        mesh: One-dimensional context-parallel mesh.
        device: Where the batch is.
        load_balance: Head-tail order (causal attention) or consecutive slices (bidirectional).
        rotate_method: `"allgather"` or `"alltoall"`.

    Yields:
        The attention of `torchtune_cp.attention.Region`, the same for every batch of a mesh.

    Raises:
        RuntimeError: Entered inside torch's own context manager.
    """
    options = cp_impl._cp_options
    original = F.scaled_dot_product_attention
    if original in cp_impl._replaced_functions:
        raise RuntimeError(
            "context_parallel cannot be entered inside torch's own context_parallel of the same name"
        )
    saved = (options.enable_load_balance, options.rotate_method, cp_impl._dispatch_mode)
    options.enable_load_balance = load_balance
    options.rotate_method = {
        "allgather": cp_impl._RotateMethod.ALL_GATHER,
        "alltoall": cp_impl._RotateMethod.ALL_TO_ALL,
    }[rotate_method]
    replaced_before = dict(cp_impl._replaced_functions)
    rings = mesh.__dict__.setdefault(_RING, {})
    if load_balance in rings:
        # torch leaves a function alone that it knows as its own replacement.
        _, torch_sdpa = rings[load_balance]
        cp_impl._replaced_functions[torch_sdpa] = (original.__name__, original)
        F.scaled_dot_product_attention = torch_sdpa
    # The batch is cut already; torch wants something to cut.
    cut_by_torch = torch.empty(2 * mesh.size(), device=device)
    try:
        with torch_context_parallel(
            mesh,
            buffers=[cut_by_torch],
            buffer_seq_dims=[0],
            no_restore_buffers={cut_by_torch},
        ):
            if load_balance not in rings:
                torch_sdpa = F.scaled_dot_product_attention
                rings[load_balance] = _ring(torch_sdpa, load_balance), torch_sdpa
            yield rings[load_balance][0]
    finally:
        F.scaled_dot_product_attention = original
        # torch never takes anything out of its table, one closure with its mesh per entrance.
        cp_impl._replaced_functions.clear()
        cp_impl._replaced_functions.update(replaced_before)
        options.enable_load_balance, options.rotate_method, cp_impl._dispatch_mode = saved
