"""Which config values cannot stand together.

The one place for these rules. They look at checked values of the right type (see
:mod:`torchtune_cp.config.schema`) and return one line a problem, naming the key to change.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from torchtune_cp.config.context_parallel_rules import ulysses_problems


def _validation(values: Mapping[str, Any]) -> Iterator[str]:
    if values.get("run_val_every_n_steps") is not None and values.get("dataset_val") is None:
        yield (
            "run_val_every_n_steps: is set but dataset_val is not:"
            " give a dataset_val or set run_val_every_n_steps=null"
        )
    if values.get("keep_best") and values.get("run_val_every_n_steps") is None:
        yield (
            "run_val_every_n_steps: must be set, with a dataset_val, for keep_best=true, which goes by"
            " the validation loss"
        )


def _compiles(values: Mapping[str, Any]) -> bool:
    compiled = values.get("compile")
    return bool(compiled.get("model") if isinstance(compiled, Mapping) else compiled)


_AC_OPTIONS = (
    "N (checkpoint every N-th layer), op (keep the attention outputs), op_kv (and the gathered KV)"
)


def _activation_checkpointing(values: Mapping[str, Any]) -> Iterator[str]:
    mode, option = values.get("ac_mode"), values.get("ac_option")
    if values.get("enable_activation_checkpointing") and mode not in (None, "none", "full"):
        yield (
            f"ac_mode: {mode!r} contradicts enable_activation_checkpointing=true, which"
            " checkpoints every layer: set one of them"
        )
    if mode == "selective" and option is None:
        yield f"ac_option: ac_mode=selective needs one of {_AC_OPTIONS}"
    if mode != "selective" or option is None:
        return
    if not str(option).isdigit() and option not in ("op", "op_kv"):
        yield f"ac_option: expected one of {_AC_OPTIONS}, got {option!r}"
    passed_on = values.get("context_parallel_rotate_method") == "alltoall"
    if option == "op_kv" and passed_on and values.get("context_parallel_method") != "allgather":
        # Passed round the ring, the keys and values are never all there to be kept.
        yield "context_parallel_rotate_method: must be allgather with ac_option=op_kv"
    if option == "op_kv" and _compiles(values):
        # The buffer is handed from forward to backward outside of the compiled graph.
        yield "compile: must be false with ac_option=op_kv; ac_option=op can be compiled"


def _ulysses(values: Mapping[str, Any]) -> Iterator[str]:
    yield from ulysses_problems(
        values.get("context_parallel_ulysses_dim"),
        values.get("context_parallel_dim"),
        values.get("context_parallel_method"),
    )


def _ignored_labels(values: Mapping[str, Any]) -> Iterator[str]:
    loss = values.get("loss")
    if isinstance(loss, Mapping) and loss.get("ignore_index", -100) != -100:
        yield (
            f"loss.ignore_index: {loss['ignore_index']!r} is not the label that datasets, collation and"
            " padding give to tokens that do not count: set loss.ignore_index=-100"
        )


def _optimizer_in_backward(values: Mapping[str, Any]) -> Iterator[str]:
    inside = [key for key in ("optimizer_in_bwd", "optimizer_on_host") if values.get(key)]
    if len(inside) > 1:
        yield "optimizer_in_bwd: must be false with optimizer_on_host=true, which is in backward too"
    for key in inside[-1:]:
        if values.get("gradient_accumulation_steps", 1) > 1:
            # It would step, and free the gradient, at every micro-batch.
            yield f"gradient_accumulation_steps: must be 1 with {key}=true"
        if values.get("clip_grad_norm") is not None:
            # The norm is known only when the last gradient is, and then the others have been used.
            yield f"clip_grad_norm: must be null with {key}=true"
        if values.get("on_nonfinite") == "skip":
            # Weights have been stepped before the whole gradient is known.
            yield f"on_nonfinite: must be raise with {key}=true"


_PART_OF_AN_MLP = re.compile(r"layers\.\d+\.(mlp|mlp_norm)(\.|$)")


def _tiled_mlp(values: Mapping[str, Any]) -> Iterator[str]:
    if values.get("mlp_tile_tokens") is None:
        return
    for name in values.get("custom_sharded_layers") or ():
        if _PART_OF_AN_MLP.match(str(name)):
            # It would be gathered, and its gradient reduced, once a tile.
            yield (
                f"custom_sharded_layers: {name!r} is computed a tile at a time with mlp_tile_tokens set,"
                " and cannot have a sharding group of its own"
            )


_PART_OF_ATTENTION = re.compile(r"layers\.\d+\.(attn|sa_norm)(\.|$)")


def _head_chunks(values: Mapping[str, Any]) -> Iterator[str]:
    if values.get("attention_head_chunks") in (None, 1):
        return
    if values.get("tensor_parallel_dim", 1) > 1:
        yield (
            "attention_head_chunks: must be null with tensor_parallel_dim above 1, whose ranks divide the"
            " heads already"
        )
    if values.get("enable_fp8_training"):
        # A float8 weight has one scale, and a layout, of its whole.
        yield (
            "attention_head_chunks: must be null with enable_fp8_training=true, whose weights cannot be"
            " used a few heads at a time"
        )
    option = values.get("ac_option")
    if values.get("ac_mode") == "selective" and option in ("op", "op_kv"):
        yield (
            f"ac_option: must be a number with attention_head_chunks set, or ac_mode=full: {option} keeps"
            " what chunks are to keep small"
        )
    for name in values.get("custom_sharded_layers") or ():
        if _PART_OF_ATTENTION.match(str(name)):
            yield (
                f"custom_sharded_layers: {name!r} is used a few heads at a time with"
                " attention_head_chunks set, and cannot have a sharding group of its own"
            )


def _float8(values: Mapping[str, Any]) -> Iterator[str]:
    if not values.get("enable_fp8_training"):
        return
    if values.get("tensor_parallel_dim", 1) > 1 and _compiles(values):
        # Nothing shows yet that a compiled layer reduces the scales of cut operands over the ranks.
        yield "compile: must be false with enable_fp8_training=true and tensor_parallel_dim above 1"
    recipe = values.get("fp8_recipe_name")
    on_tensor_cores = values.get("device") == "cuda" and not values.get("fp8_emulate")
    rowwise = recipe in ("rowwise", "rowwise_with_gw_hp")
    if rowwise and on_tensor_cores and values.get("dtype") == "fp32":
        # torch's row-wise products give bfloat16 on all devices, float32 only on some.
        yield (
            f"dtype: must be bf16 with fp8_recipe_name={recipe}; or set fp8_recipe_name=tensorwise"
        )


def _tensor_parallelism(values: Mapping[str, Any]) -> Iterator[str]:
    if values.get("tensor_parallel_dim", 1) == 1 or not _compiles(values):
        return
    # torch 2.13 puts the mesh among the tensors that a compiled checkpoint saves for backward, and
    # stops. A checkpoint around what was compiled works, but not under context parallelism, and sees
    # no operators.
    mode, option = values.get("ac_mode"), values.get("ac_option")
    every_layer = values.get("enable_activation_checkpointing") or mode == "full"
    if mode == "selective" and option == "op":
        yield (
            "compile: must be false with tensor_parallel_dim above 1 and ac_option=op; with"
            " checkpointing by layer it can be true"
        )
    elif (every_layer or mode == "selective") and values.get("context_parallel_dim", 1) > 1:
        yield (
            "compile: must be false with tensor_parallel_dim and context_parallel_dim above 1 and"
            " activation checkpointing; without checkpointing it can be true"
        )


def _set_in_datasets(values: Mapping[str, Any], key: str, argument: str) -> list[bool]:
    """Of each data set under a key, a single one or a list, whether an argument is set to something."""
    node = values.get(key)
    parts = node if isinstance(node, list) else [node]
    return [bool(isinstance(part, Mapping) and part.get(argument)) for part in parts]


def _masked_lm(values: Mapping[str, Any]) -> Iterator[str]:
    if "sequence_format" not in values:
        return  # another recipe's config
    if values.get("collate_fn") not in (None, "torchtune_cp.data.collate"):
        yield "collate_fn: must be left out: sequence_format says how masked samples become batches"
    if values.get("enable_fp8_training"):
        yield "enable_fp8_training: must be false: there is no float8 training of masked language models"
    if values.get("attention_head_chunks") not in (None, 1):
        yield (
            "attention_head_chunks: must be null: the heads of masked language models are done together"
        )
    if values.get("tensor_parallel_dim", 1) > 1:
        yield (
            "tensor_parallel_dim: must be 1: there is no plan for masked language models; context"
            " parallelism cuts their sequences, FSDP their weights"
        )
    for key in ("dataset", "dataset_val"):
        if any(_set_in_datasets(values, key, "packed")):
            yield f"{key}.packed: must be false: sequence_format=thd packs, after masking"
    if values.get("token_micro_batch_size") is not None:
        if values["sequence_format"] != "thd":
            yield "sequence_format: must be thd with token_micro_batch_size"
        if values.get("batch_size", 1) != 1 or values.get("batch_size_val") not in (None, 1):
            yield "batch_size: must be 1 with token_micro_batch_size, which says how large a batch is"


def _streaming(values: Mapping[str, Any]) -> Iterator[str]:
    if any(_set_in_datasets(values, "dataset_val", "streaming")):
        yield "dataset_val.streaming: must be false: validation reads every sample exactly once"
    streamed = _set_in_datasets(values, "dataset", "streaming")
    if not any(streamed):
        return
    if "sequence_format" not in values:
        yield "dataset.streaming: must be false; esm2_mlm_distributed can stream proteins"
        return
    if len(streamed) > 1:
        yield "dataset: must be a single one with streaming=true"
    if values.get("max_steps_per_epoch") is None:
        yield "max_steps_per_epoch: must be set with dataset.streaming=true: the data never end"
    if values.get("num_workers"):
        yield "num_workers: must be 0 with dataset.streaming=true: each worker would read all the data"


def _whole_replicas(values: Mapping[str, Any]) -> Iterator[str]:
    if values.get("data_parallel") != "ddp":
        return
    if values.get("fsdp_cpu_offload"):
        yield "fsdp_cpu_offload: must be false with data_parallel=ddp: nothing is sharded"
    if values.get("custom_sharded_layers") is not None:
        yield "custom_sharded_layers: must be null with data_parallel=ddp: nothing is sharded"
    if values.get("data_parallel_shard_dim", -1) > 1:
        yield (
            "data_parallel_shard_dim: must be -1 or 1 with data_parallel=ddp: nothing is sharded;"
            " data_parallel_replicate_dim says how many groups read different samples"
        )


COMBINATIONS: tuple[Callable[[Mapping[str, Any]], Iterator[str]], ...] = (
    _validation,
    _activation_checkpointing,
    _ulysses,
    _ignored_labels,
    _optimizer_in_backward,
    _tiled_mlp,
    _head_chunks,
    _float8,
    _tensor_parallelism,
    _masked_lm,
    _streaming,
    _whole_replicas,
)

_DEGREES = (
    "data_parallel_replicate_dim",
    "data_parallel_shard_dim",
    "context_parallel_dim",
    "tensor_parallel_dim",
)


def degrees_problem(degrees: Mapping[str, int], world_size: int) -> str | None:
    """Check that the parallel degrees fill the world exactly.

    Args:
        degrees: The four degrees under their config keys; a ``data_parallel_shard_dim`` of -1 takes
            what the others leave.
        world_size: The number of processes.

    Returns:
        The problem, naming every degree and the world size; None when they fit.
    """
    product = math.prod(degrees[key] for key in _DEGREES if degrees[key] != -1)
    infer = degrees["data_parallel_shard_dim"] == -1
    if product == world_size or (infer and world_size % product == 0):
        return None
    listed = " x ".join(f"{key}={degrees[key]}" for key in _DEGREES)
    wanted = f"a multiple of {product}" if infer else str(product)
    return (
        f"{listed} need {wanted} processes, but the run has {world_size}:"
        " change a degree or --nnodes / --nproc_per_node"
    )


_CUT_BY_TENSOR_PARALLELISM = ("num_heads", "num_kv_heads", "intermediate_dim", "vocab_size")


def tensor_parallel_problems(sizes: Mapping[str, Any], degree: int) -> list[str]:
    """Check that what tensor parallelism gives out to the ranks can be given out evenly.

    Args:
        sizes: A model's sizes by name, further entries are not looked at.
        degree: ``tensor_parallel_dim``.

    Returns:
        One line for each size that does not divide, naming it and its value.
    """
    return [
        f"tensor_parallel_dim: {degree} does not divide the model's {name} of {sizes[name]}:"
        " each rank takes as many of them; choose a divisor"
        for name in _CUT_BY_TENSOR_PARALLELISM
        if sizes[name] % degree
    ]


def vocabulary_problem(model_size: int, tokenizer_size: int) -> str | None:
    """Check that every token of a tokenizer has a row in the model's embedding.

    Args:
        model_size: The model's ``vocab_size``; may be larger, models are padded to round numbers.
        tokenizer_size: The largest token id + 1.

    Returns:
        One line with both sizes; None where all is well.
    """
    if tokenizer_size <= model_size:
        return None
    return (
        f"tokenizer: its token ids go up to {tokenizer_size - 1} (vocabulary of {tokenizer_size}), but the"
        f" model's vocab_size is {model_size}: use the model's own tokenizer, or a model with"
        f" vocab_size={tokenizer_size} or more (embeddings are not resized)"
    )


def module_problems(names: Iterable[str], modules: Collection[str]) -> list[str]:
    """Check that a model has the modules that ``custom_sharded_layers`` names.

    Args:
        names: As the config gives them.
        modules: The names of all of the model's modules.

    Returns:
        One line for each that is not there.
    """
    top = ", ".join(name for name in modules if name and "." not in name)
    return [
        f"custom_sharded_layers: {name!r} is no module of this model; its top-level modules are {top}"
        for name in names
        if name not in modules
    ]


def combination_problems(values: Mapping[str, Any], world_size: int | None = None) -> list[str]:
    """Return everything that is wrong with values that are each right alone.

    Args:
        values: Config keys and values as plain containers, defaults filled in. Keys with a problem
            of their own may be missing: the rules that need them are then skipped.
        world_size: The number of processes of the run, None while it is not known.
    """
    problems: list[str] = []
    for combination in COMBINATIONS:
        problems += combination(values)
    if world_size is not None and all(key in values for key in _DEGREES):
        problem = degrees_problem({key: values[key] for key in _DEGREES}, world_size)
        if problem:
            problems.append(problem)
    return problems
