"""Tensor parallelism: every weight matrix cut over several ranks, the residual stream cut between them.

All families here are one decoder, so one plan serves them all. Within a layer the classic pair of cuts
(Megatron-LM, arXiv 1909.08053): projections into heads or the MLP's hidden width by output, those out of
them by input. Between them each rank keeps only its part of the sequence (sequence parallelism, arXiv
2205.05198): norms and residual additions are done once, not `tp` times.

Attention, rotation, norms and SwiGLU see plain local tensors: their own heads, columns or tokens. Under
context parallelism "the sequence" is the rank's slice, cut once more.

Shape legend: b batch, n tokens of this context-parallel rank, d embedding, v vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from torchtune_cp.config import tensor_parallel_problems
from torchtune_cp.errors import UserError

if TYPE_CHECKING:
    from torchtune_cp.models import LanguageModel, TransformerDecoder

#: Dimension 1 of `[b, n, d]`: along it the residual stream is cut.
_SEQUENCE = Shard(1)


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    # Without communication (src_data_rank=None): on the meta device there is nothing to send, and
    # otherwise every rank has the same weights.
    for name, parameter in list(module.named_parameters(recurse=False)):
        sharded = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(
            name, nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        )


class LocalNorm(ParallelStyle):
    """A norm over the last dimension whose input is this rank's tokens or heads.

    Its scale is whole on every rank, and what the ranks' inputs contribute to its gradient adds up. torch's
    `SequenceParallel` would hand the module DTensors; here the local computation stays as it is.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate())
        norm: Any = module

        def forward(x: Tensor) -> Tensor:
            scale = norm.scale.to_local(grad_placements=[Partial()])
            normed: Tensor = norm.normalise(x, scale)
            return normed

        norm.forward = forward
        return module


class VocabParallelEmbedding(ParallelStyle):
    """An embedding of which each rank holds a range of token ids; its output is cut along the sequence.

    torch's `RowwiseParallel` gives the same result, but in backward it builds the gradient of the whole
    table on every rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Shard(0))
        embedding: Any = module
        vocab_size, tp = embedding.num_embeddings, device_mesh.size()

        def forward(tokens: Tensor) -> Tensor:
            if tokens.size(1) % tp:
                raise UserError(
                    f"a sequence of {tokens.size(1)} tokens with tensor_parallel_dim={tp}: the residual"
                    " stream is cut along the sequence, whose length must divide; use"
                    " options=ContextParallelOptions(pad_to_multiple_of=dims.min_seq_len_divisor)"
                )
            weight = embedding.weight.to_local()
            rows = weight.size(0)
            index = tokens - device_mesh.get_local_rank() * rows
            # Ids of no rank stay out of range, so that the lookup refuses them as it does elsewhere.
            known = (tokens >= 0) & (tokens < vocab_size)
            elsewhere = known & ((index < 0) | (index >= rows))
            found = F.embedding(index.masked_fill(elsewhere, 0), weight)
            found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
            whole = DTensor.from_local(found, device_mesh, [Partial()], run_check=False)
            hidden = whole.redistribute(placements=[_SEQUENCE]).to_local()
            # The copy waits for the collective: a compiled layer that was handed a tensor still in flight
            # was seen to give the embedding a gradient of exactly 0 (torch 2.13). Nor is it a view, on
            # which FSDP's hooks could be lost.
            return hidden.clone()

        embedding.forward = forward
        return module


class VocabParallelOutput(ParallelStyle):
    """An output projection of which each rank holds a range of token ids.

    Its input is gathered along the sequence. Hidden states (replicated) and weight (cut along the
    vocabulary) reach the module's function as DTensors, which tell a loss how to combine the ranks'
    logits. Tied to the embedding, it has no weight of its own and takes the embedding's.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Shard(0))

        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, *rest = args
            if not isinstance(hidden, DTensor):
                hidden = DTensor.from_local(hidden, device_mesh, [_SEQUENCE], run_check=False)
            return hidden.redistribute(placements=[Replicate()]), *rest

        module.register_forward_pre_hook(gather)
        return module


def tensor_parallel_plan(model: TransformerDecoder) -> dict[str, ParallelStyle]:
    """Say how each module of a decoder is cut.

    Args:
        model: Any decoder of this package, of any family.

    Returns:
        A style for each module with parameters and for those whose input is gathered, by name (`*`
        stands for every layer): what torch's `parallelize_module` takes.
    """
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": VocabParallelEmbedding(),
        "norm": LocalNorm(),
        "output": VocabParallelOutput(),
    }
    layer: dict[str, ParallelStyle] = {
        "sa_norm": LocalNorm(),
        # One gather for all three projections. The second argument is the rotation: no tensor to cut.
        "attn": PrepareModuleInput(
            input_layouts=(_SEQUENCE, None), desired_input_layouts=(Replicate(), None)
        ),
        "attn.q_proj": ColwiseParallel(),
        "attn.k_proj": ColwiseParallel(),
        "attn.v_proj": ColwiseParallel(),
        "attn.output_proj": RowwiseParallel(output_layouts=_SEQUENCE),
        "mlp_norm": LocalNorm(),
        "mlp": PrepareModuleInput(input_layouts=_SEQUENCE, desired_input_layouts=Replicate()),
        "mlp.w1": ColwiseParallel(),
        "mlp.w3": ColwiseParallel(),
        "mlp.w2": RowwiseParallel(output_layouts=_SEQUENCE),
    }
    if model.config.qk_norm:
        layer |= {"attn.q_norm": LocalNorm(), "attn.k_norm": LocalNorm()}
    return plan | {f"layers.*.{name}": style for name, style in layer.items()}


def apply_tensor_parallel(
    model: LanguageModel,
    mesh: DeviceMesh,
    plan: dict[str, ParallelStyle] | None = None,
) -> None:
    """Cut a model's weights over a mesh, in place; does nothing on a mesh of one rank.

    Comes first: before activation checkpointing, compilation and FSDP.

    Args:
        model: On the meta device, or with the same weights on every rank.
        mesh: One-dimensional; of the same root as the one that FSDP gets.
        plan: In place of `tensor_parallel_plan`'s.

    Raises:
        UserError: The model is no decoder, its sizes do not divide by the mesh's, or `plan` leaves a
            parameter out.
    """
    tp = mesh.size()
    if tp == 1:
        return
    if model.config.family == "esm":
        raise UserError(
            f"tensor_parallel_dim={tp}: there is no plan for model_type esm, whose vocabulary of"
            f" {model.config.vocab_size} is its tied output projection; set it to 1 (FSDP shards every"
            " weight, context parallelism every sequence)"
        )
    problems = tensor_parallel_problems(vars(model.config), tp)
    if problems:
        raise UserError("\n".join(problems))
    if plan is None:
        plan = tensor_parallel_plan(cast("TransformerDecoder", model))
    parallelize_module(model, mesh, plan, src_data_rank=None)
    left_out = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    if left_out:
        # Gradients of parameters on different meshes have no common norm.
        raise UserError(
            f"tensor_parallel_plan leaves out {len(left_out)} parameters, the first {left_out[0]}:"
            " every parameter needs a style; null takes the model's own plan"
        )
