"""Fine-tune all weights of a causal language model, every sequence cut over several ranks.

    tune run --nproc_per_node 2 full_finetune_distributed --config tiny/llama_cpu context_parallel_dim=2

The run, top to bottom: config -> mesh -> model -> data -> step -> metrics -> checkpoint.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from torchtune_cp import config
from torchtune_cp.config import FullFinetuneConfig
from torchtune_cp.distributed import Meshes
from torchtune_cp.distributed.process_group import init_distributed, is_rank_zero
from torchtune_cp.metrics import memory_stats, peak_memory_bytes
from torchtune_cp.metrics.throughput import StepTimer
from torchtune_cp.training.seed import set_seed, shared_seed
from torchtune_cp.training.setup import (
    build_loader,
    build_model,
    build_optimizer,
    build_profiler,
    build_report,
    build_tokenizer,
    parallel_dims,
    setup_logging,
)
from torchtune_cp.training.step import (
    count_label_tokens,
    max_over,
    micro_batches,
    sum_over,
    to_device,
)
from torchtune_cp.training.train_step import TrainStep


@config.parse(schema=FullFinetuneConfig)
def main(cfg: FullFinetuneConfig) -> None:
    """Train, validate, save: see the module's docstring."""
    # --- mesh: every rank learns its place ----------------------------------------------------
    device = init_distributed(cfg.device)
    log = setup_logging(cfg.log_level)
    dims = parallel_dims(cfg)
    meshes = Meshes.build(dims, device.type)
    seed = shared_seed(cfg.seed)
    set_seed(seed)
    output_dir = Path(cfg.output_dir).expanduser()
    if is_rank_zero():
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "config.yaml").write_text(config.resolved_yaml(cfg), encoding="utf-8")

    # --- model: built without memory, sharded over dp_shard x cp, each rank reads its shards --
    checkpointer = config.instantiate(cfg.checkpointer)
    model = build_model(cfg, checkpointer, meshes, device, seed)
    loss_fn = config.instantiate(cfg.loss)

    # --- data: whole sequences; context-parallel peers read the same ones ---------------------
    tokenizer = build_tokenizer(cfg)
    build = partial(
        build_loader,
        cfg,
        tokenizer=tokenizer,
        meshes=meshes,
        seed=seed,
        max_tokens=model.config.sliding_window,
    )
    loader = build(cfg.dataset)
    val_loader = None if cfg.dataset_val is None else build(cfg.dataset_val, validation=True)
    steps_per_epoch = -(-len(loader) // cfg.gradient_accumulation_steps)
    if cfg.max_steps_per_epoch is not None:
        steps_per_epoch = min(steps_per_epoch, cfg.max_steps_per_epoch)
    total_steps = cfg.epochs * steps_per_epoch
    optimizer, scheduler, gradient_norm = build_optimizer(cfg, model, total_steps)
    log.info(
        "%d parameters on %s, %d steps",
        sum(p.numel() for p in model.parameters()),
        dims.describe(),
        total_steps,
    )
    report = build_report(cfg, total_steps, dims.world_size)
    timer = StepTimer(device)

    # --- the step; validation cuts its sequences through the same door as training ------------
    train = TrainStep(
        cfg, model, optimizer, gradient_norm, loss_fn, meshes=meshes, dims=dims, device=device
    )

    def validate(step: int) -> None:
        """Mean token loss over the whole validation set: every sample once, whatever the mesh."""
        if val_loader is None:
            return
        model.eval()
        loss_sum, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
        with torch.no_grad():
            for batch in val_loader:
                tokens += count_label_tokens([batch])
                with train.cut(to_device(batch, device)) as local:
                    loss_sum += train.slice_loss(local)
        model.train()
        (all_tokens,) = sum_over(meshes.dp, tokens, device=device)
        (all_loss,) = sum_over(meshes.loss, loss_sum, device=device)
        report.validation(step=step, loss=all_loss / max(all_tokens, 1), tokens=int(all_tokens))

    # --- the loop -----------------------------------------------------------------------------
    model.train()
    step = 0
    validate(step)
    with build_profiler(cfg) as profiler:
        for epoch in range(cfg.epochs):
            loader.set_epoch(epoch)
            steps = micro_batches(loader, cfg.gradient_accumulation_steps)
            for batches in islice(steps, steps_per_epoch):
                timer.start()
                grads = train.backward(batches)
                lr = optimizer.param_groups[0]["lr"]
                train.update(grads.norm)
                train.finish()
                if scheduler is not None:
                    scheduler.step()
                step += 1

                loss_sum = torch.stack(grads.losses).sum(dtype=torch.float64)
                (all_loss,) = sum_over(meshes.loss, loss_sum, device=device)
                peak = max_over(meshes.loss, peak_memory_bytes(device), device=device)
                seconds = timer.stop()
                report.step(
                    step=step,
                    epoch=epoch,
                    loss=all_loss / max(grads.tokens, 1),
                    grad_norm=grads.norm.item(),
                    lr=lr,
                    tokens=int(grads.tokens),
                    seconds=seconds,
                    peak_memory_bytes=int(peak),
                    memory=memory_stats(device),
                )
                profiler.step()
                due = cfg.run_val_every_n_steps and step % cfg.run_val_every_n_steps == 0
                if due or step == total_steps:
                    validate(step)

    # --- checkpoint: a Hugging Face folder, written by all ranks, visible when complete -------
    folder = checkpointer.save_final(model, tokenizer, folder=output_dir / "final")
    report.close()
    log.info("the fine-tuned model lies in %s", folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
