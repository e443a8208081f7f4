"""The stages between a config and a training loop, one function each."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchtune_cp.checkpointing import FullModelHFCheckpointer
from torchtune_cp.checkpointing.resume_point import ResumePoint
from torchtune_cp.config import (
    FullFinetuneConfig,
    component_callable,
    instantiate,
    resolved_dict,
)
from torchtune_cp.config.secrets import MaskingFormatter
from torchtune_cp.data import TokenDataLoader, bucketed, build_dataloader
from torchtune_cp.data.token_ids import CheckedIds
from torchtune_cp.distributed import ContextParallelOptions, Meshes, ParallelDims
from torchtune_cp.distributed.fsdp import materialize, shard_model
from torchtune_cp.distributed.process_group import is_rank_zero
from torchtune_cp.distributed.tensor_parallel import apply_tensor_parallel
from torchtune_cp.errors import UserError
from torchtune_cp.metrics.interface import LABELS
from torchtune_cp.metrics.report import RunReport
from torchtune_cp.metrics.run_notes import RunNotes
from torchtune_cp.models import LanguageModel, TransformerDecoder, TransformerEncoder
from torchtune_cp.models.depth import first_layers
from torchtune_cp.training.compile import compile_layers
from torchtune_cp.training.fp8 import convert_to_float8
from torchtune_cp.training.memory import (
    apply_activation_checkpointing,
    apply_activation_offloading,
    apply_chunked_attention,
    apply_selective_checkpointing,
    apply_tiled_mlp,
)
from torchtune_cp.training.optim_in_bwd import OptimizerInBackward, gradient_norm
from torchtune_cp.training.optim_on_host import OptimizerOnHost
from torchtune_cp.training.profiler import setup_torch_profiler
from torchtune_cp.training.resume import clear_earlier_report

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", TransformerDecoder, TransformerEncoder)

_RECIPES: dict[type, str] = {
    TransformerDecoder: "full_finetune_distributed is for causal language models",
    TransformerEncoder: "esm2_mlm_distributed is for masked language models such as ESM-2",
}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def setup_logging(level: str) -> logging.Logger:
    """Log at `level` on rank 0 and only errors on the others, so that nothing is logged twice.

    Args:
        level: A name of Python's logging levels.

    Returns:
        The package's logger.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(MaskingFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    logger = logging.getLogger("torchtune_cp")
    logger.setLevel(level if is_rank_zero() or level == "DEBUG" else "ERROR")
    return logger


def parallel_dims(cfg: FullFinetuneConfig) -> ParallelDims:
    """Read the degrees of parallelism off a config; the process group must be up.

    Raises:
        UserError: They do not fill the world.
    """
    return ParallelDims(
        dp_replicate=cfg.data_parallel_replicate_dim,
        dp_shard=cfg.data_parallel_shard_dim,
        cp=cfg.context_parallel_dim,
        tp=cfg.tensor_parallel_dim,
        world_size=dist.get_world_size(),
    )


def build_model(
    cfg: FullFinetuneConfig,
    checkpointer: FullModelHFCheckpointer,
    meshes: Meshes,
    device: torch.device,
    seed: int,
    resumed: ResumePoint | None = None,
    *,
    kind: type[ModelT] = TransformerDecoder,  # type: ignore[assignment]
    num_layers: int | None = None,
) -> ModelT:
    """Build the model on the meta device, shard it, and read into each rank what it holds.

    Args:
        cfg: The run's config.
        checkpointer: Where the weights come from.
        meshes: Parameters are sharded over `meshes.tp` and `meshes.fsdp`.
        device: Where the shards live.
        seed: Of the weights when they are random.
        resumed: What the run continues from. The weights of a training checkpoint are read with the
            rest of its state later on, and here only memory is allocated; a Hugging Face folder takes
            the place of the checkpointer's.
        kind: The models that the recipe trains.
        num_layers: Keep only this number of layers of a decoder, for a plan.

    Raises:
        UserError: The config names something that is not such a model, or weights of another model,
            or sizes do not divide by `tensor_parallel_dim` or `attention_head_chunks`.
    """
    with torch.device("meta"):
        model = instantiate(cfg.model)
    if not isinstance(model, kind):
        raise UserError(
            f"model._component_={cfg.model['_component_']} builds a {type(model).__name__};"
            f" this recipe trains a {kind.__name__}: {_RECIPES[kind]}"
        )
    if num_layers is not None:
        assert isinstance(model, TransformerDecoder)
        first_layers(model, num_layers)
    weights = checkpointer
    if resumed is not None and resumed.manifest is None:
        weights = FullModelHFCheckpointer(str(resumed.path))
    weights.keep_stored_output(model)
    if cfg.enable_fp8_training:
        assert isinstance(model, TransformerDecoder)  # refused for others
        convert_to_float8(
            model,
            cfg.fp8_recipe_name,
            device,
            emulate=cfg.fp8_emulate,
            tp=meshes.tp.size(),
            float8_all_gather=not cfg.fsdp_cpu_offload,
        )
    if meshes.tp.size() > 1:
        plan = cfg.tensor_parallel_plan
        apply_tensor_parallel(model, meshes.tp, None if plan is None else instantiate(plan, model))
    if cfg.mlp_tile_tokens is not None:
        apply_tiled_mlp(model, cfg.mlp_tile_tokens)
    chunks = ContextParallelOptions.of_run(cfg, model.config).head_chunks
    if chunks is not None:
        assert isinstance(model, TransformerDecoder)  # refused for others
        apply_chunked_attention(model, chunks, cfg.mlp_tile_tokens)
    compiled = _compiles(cfg.compile, "model")
    if compiled and checkpoint_around_compiled(cfg):
        compile_layers(model)
        compiled = False
    if cfg.enable_activation_checkpointing or cfg.ac_mode == "full":
        apply_activation_checkpointing(model)
    elif cfg.ac_mode == "selective" and str(cfg.ac_option).isdigit():
        apply_activation_checkpointing(model, int(str(cfg.ac_option)))
    elif cfg.ac_mode == "selective":
        apply_selective_checkpointing(model, keep_kv=cfg.ac_option == "op_kv")
    if compiled:
        compile_layers(model)
    if cfg.enable_activation_offloading:
        apply_activation_offloading(model, device)
    shard_model(
        model,
        meshes.fsdp,
        dtype=DTYPES[cfg.dtype],
        reshard_after_forward=cfg.fsdp_reshard_after_forward,
        custom_sharded_layers=cfg.custom_sharded_layers,
        offload=cfg.fsdp_cpu_offload,
    )
    shards_on = torch.device("cpu") if cfg.fsdp_cpu_offload else device
    if resumed is None or resumed.manifest is None:
        materialize(model, weights.source(model, seed), shards_on)
    else:
        if isinstance(model, TransformerEncoder):
            checkpointer.source(model, seed)  # for its rotary frequencies, which are no parameters
        model.to_empty(device=shards_on)
    return model


def checkpoint_around_compiled(cfg: FullFinetuneConfig) -> bool:
    """Whether a checkpointed layer is compiled first: under tensor parallelism alone.

    torch 2.13 cannot compile a checkpoint over tensors that a mesh holds; see `compile_layers` for why
    the checkpoint is inside otherwise.
    """
    return cfg.tensor_parallel_dim > 1 and cfg.context_parallel_dim == 1


def _compiles(setting: bool | DictConfig, part: str) -> bool:
    return bool(setting.get(part, False)) if isinstance(setting, DictConfig) else setting


def build_optimizer(
    cfg: FullFinetuneConfig, model: LanguageModel, total_steps: int
) -> tuple[Optimizer, LRScheduler | None, Callable[[], torch.Tensor]]:
    """Build the optimizer and, where the config names one, the schedule of its learning rate.

    With `optimizer_in_bwd` it steps in backward, with `optimizer_on_host` on the host during backward; it and
    its schedule are used as usual.

    Args:
        cfg: The run's config.
        model: The sharded model.
        total_steps: Optimizer steps of the whole run.

    Returns:
        The optimizer, the schedule (stepped once per optimizer step) or None, and what gives the norm
        of the last backward's gradient on every rank (to be called once, before the next step).
    """
    optimizer = instantiate(cfg.optimizer, model.parameters())
    norm: Callable[[], torch.Tensor] = partial(gradient_norm, model)
    if cfg.optimizer_in_bwd:
        norm = OptimizerInBackward(optimizer).gradient_norm
    elif cfg.optimizer_on_host:
        norm = OptimizerOnHost(
            optimizer, torch.device(cfg.device), shards_on_host=cfg.fsdp_cpu_offload
        ).gradient_norm
    if cfg.lr_scheduler is None:
        return optimizer, None, norm
    for name, value in cfg.lr_scheduler.items():
        if "warmup" in str(name) and type(value) is int and value >= total_steps:
            logger.warning(
                "lr_scheduler.%s=%d is not shorter than the run of %d steps: the learning rate never"
                " reaches the optimizer's lr",
                name,
                value,
                total_steps,
            )
    scheduler = instantiate(cfg.lr_scheduler, optimizer, num_training_steps=total_steps)
    return optimizer, scheduler, norm


def build_profiler(cfg: FullFinetuneConfig) -> Any:
    """Build the profiler that the config names; without one, a placeholder without effect."""
    return setup_torch_profiler() if cfg.profiler is None else instantiate(cfg.profiler)


def build_report(
    cfg: FullFinetuneConfig, total_steps: int, world_size: int, resumed: ResumePoint | None
) -> RunReport:
    """Build what the run reports through; the configured logger exists on rank 0 only.

    Args:
        cfg: The run's config.
        total_steps: Optimizer steps of the whole run.
        world_size: Number of processes.
        resumed: What the run continues from.

    Raises:
        UserError: A file cannot be written.
    """
    resume_step = None if resumed is None or resumed.state is None else resumed.state["step"]
    if is_rank_zero() and (resumed is None or not resumed.is_own):
        clear_earlier_report(cfg)
    logger = None
    if is_rank_zero() and cfg.metric_logger is not None:
        given: dict[str, Any] = {}
        if "run_notes" in inspect.signature(component_callable(cfg.metric_logger)).parameters:
            given["run_notes"] = RunNotes(cfg.output_dir, resume_step)
        logger = instantiate(cfg.metric_logger, **given, **_masked_labels(cfg))
        logger.log_config(cfg)
    return RunReport(
        cfg.output_dir,
        logger,
        total_steps,
        world_size=world_size,
        enabled=is_rank_zero(),
        log_every_n_steps=cfg.log_every_n_steps,
        log_memory=cfg.log_peak_memory_stats,
        resume_step=resume_step,
    )


def _masked_labels(cfg: FullFinetuneConfig) -> dict[str, Any]:
    """What the config's logger may publish about the run: the labels among its arguments, without secrets."""
    node, masked = cfg.metric_logger, resolved_dict(cfg)["metric_logger"]
    if node is None or not isinstance(masked, dict):
        return {}  # all of it is from the environment: the logger's own masking must suffice
    labels = {}
    for name in LABELS:
        if name in masked:
            real, shown = node[name], masked[name]
            if OmegaConf.is_list(real) and isinstance(shown, str):
                shown = [shown]
            elif OmegaConf.is_dict(real) and isinstance(shown, str):
                shown = {name: shown}
            labels[name] = shown
    return labels


def build_tokenizer(cfg: FullFinetuneConfig) -> Any:
    """Build the tokenizer that the config names."""
    return instantiate(cfg.tokenizer)


def build_loader(
    cfg: FullFinetuneConfig,
    dataset: DictConfig | ListConfig,
    tokenizer: Any,
    meshes: Meshes,
    seed: int,
    *,
    vocab_size: int | None = None,
    validation: bool = False,
) -> TokenDataLoader:
    """Build the loader of this rank's data-parallel group; its context-parallel peers read the same.

    Args:
        cfg: The run's config.
        dataset: `cfg.dataset` or `cfg.dataset_val`; a list is concatenated.
        tokenizer: Handed to the datasets.
        meshes: `meshes.dp` determines which samples this rank reads.
        seed: Of the order of samples.
        vocab_size: The model's; data with other token ids are refused when they are read. None does not
            look.
        validation: Read every sample exactly once, in order; training instead leaves out an
            incomplete last global batch.

    Raises:
        UserError: A dataset that cannot be read, or holds less than one global batch.
    """
    nodes = list(dataset) if isinstance(dataset, ListConfig) else [dataset]
    parts = [instantiate(node, tokenizer) for node in nodes]
    collate = component_callable(cfg.collate_fn, "collate_fn")
    if _compiles(cfg.compile, "model"):
        collate = bucketed(collate, longest=getattr(tokenizer, "max_seq_len", None))
    if vocab_size is not None:
        collate = CheckedIds(collate, vocab_size)
    return build_dataloader(
        parts[0] if len(parts) == 1 else torch.utils.data.ConcatDataset(parts),
        batch_size=(cfg.batch_size_val or cfg.batch_size) if validation else cfg.batch_size,
        dp_rank=meshes.dp.get_local_rank(),
        dp_degree=meshes.dp.size(),
        shuffle=cfg.shuffle and not validation,
        seed=seed,
        drop_last=not validation,
        collate_fn=collate,
    )
