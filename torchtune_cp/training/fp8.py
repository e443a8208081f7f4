"""Training with float8 matrix products (torchao), scaled dynamically."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchtune_cp.errors import UserError

# torchao is imported where it is needed: it takes a second, and most runs do without.
if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

    from torchtune_cp.models.transformer import TransformerDecoder

#: What torchtune uses when a config names no recipe.
DEFAULT_RECIPE = "tensorwise"
#: Tensor cores take float8 operands whose dimensions are multiples of this.
ALIGNMENT = 16
#: The first CUDA capability with float8 tensor cores (Ada).
MIN_CAPABILITY = (8, 9)

_log = logging.getLogger(__name__)


def float8_config(recipe: str, *, emulate: bool, float8_all_gather: bool) -> Float8LinearConfig:
    """Describe how linear layers compute in float8.

    Args:
        recipe: `tensorwise` (a scale a tensor), `rowwise` (a scale a row, powers of two), or
            `rowwise_with_gw_hp` (as rowwise, weight gradients in high precision).
        emulate: Round operands to float8 but multiply in float32: any hardware, no speed.
        float8_all_gather: Let FSDP send weights as float8. Only with `tensorwise`: a shard does not
            know the scales of whole rows and columns.
    """
    from torchao.float8 import Float8LinearConfig

    return dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe),
        emulate=emulate,
        enable_fsdp_float8_all_gather=float8_all_gather and recipe == "tensorwise",
        # The product for a weight's gradient sums over tokens, of which there can be any number.
        pad_inner_dim=not emulate,
    )


def check_hardware(device: torch.device, *, emulate: bool) -> None:
    """Refuse a device without float8 products.

    Args:
        device: Where the model trains.
        emulate: Emulation runs everywhere.

    Raises:
        UserError: The device has no float8 tensor cores and emulation is off.
    """
    if emulate:
        return
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= MIN_CAPABILITY:
            return
        found = f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}"
    else:
        found = f"the device is {device.type}"
    raise UserError(
        f"enable_fp8_training=true: float8 needs CUDA capability"
        f" {'.'.join(map(str, MIN_CAPABILITY))} or later, and {found};"
        " set enable_fp8_training=false, or fp8_emulate=true to try it slowly"
    )


def _fits(linear: nn.Linear, divisor: int) -> bool:
    return linear.in_features % divisor == 0 and linear.out_features % divisor == 0


def convert_to_float8(
    model: TransformerDecoder,
    recipe: str | None,
    device: torch.device,
    *,
    emulate: bool,
    tp: int = 1,
    float8_all_gather: bool = True,
) -> None:
    """Make the linear layers of the model's blocks compute in float8, in place.

    The embedding and the output projection stay as they are, and so do linear layers with a dimension
    that is not divisible by 16 (or, cut by tensor parallelism, might not be); a line of the log counts
    them. Call it first, before tensor parallelism, activation checkpointing, compilation and sharding.
    The names of parameters do not change.

    Args:
        model: May be on the meta device.
        recipe: See `float8_config`; None means `tensorwise`.
        device: Where the model will train. On `cpu` float8 is always emulated.
        emulate: Emulate also elsewhere.
        tp: Ranks that will share each matrix.
        float8_all_gather: See `float8_config`; False if shards are on the host, whose scales
            would have to be reduced there. Never with tensor parallelism: FSDP would scale each rank's
            part of a matrix by itself, and results would depend on the mesh.

    Raises:
        UserError: The device has no float8, or no linear layer could be converted.
    """
    emulate = emulate or device.type == "cpu"
    check_hardware(device, emulate=emulate)
    recipe = recipe or DEFAULT_RECIPE
    linears = [m for layer in model.layers for m in layer.modules() if isinstance(m, nn.Linear)]
    divisor = ALIGNMENT * tp
    count = sum(_fits(linear, divisor) for linear in linears)
    if count == 0:
        raise UserError(
            f"enable_fp8_training=true: none of the {len(linears)} linear layers has dimensions"
            f" that are all divisible by {divisor}; set enable_fp8_training=false"
        )
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(
        model.layers,
        module_filter_fn=lambda module, _: isinstance(module, nn.Linear) and _fits(module, divisor),
        config=float8_config(
            recipe, emulate=emulate, float8_all_gather=float8_all_gather and tp == 1
        ),
    )
    _log.info(
        "float8 (%s%s): %d of %d linear layers; %d have a dimension not divisible by %d and stay"
        " in high precision",
        recipe,
        ", emulated" if emulate else "",
        count,
        len(linears),
        len(linears) - count,
        divisor,
    )


def precompute_float8_scales(model: nn.Module) -> None:
    """Compute the scales of all weights that FSDP sends as float8, in one all-reduce.

    Call it after each optimizer step. Without it each weight's scale costs a separate all-reduce
    when it is gathered. Does nothing for a model without such weights.

    Args:
        model: The sharded model; every rank must call it.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
