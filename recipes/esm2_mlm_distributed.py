"""Train a protein language model on masked residues, with every protein split over several ranks.

    tune run --nproc_per_node 2 esm2_mlm_distributed --config tiny/esm2_cpu context_parallel_dim=2

The run, top to bottom: config -> mesh -> model -> data -> step -> metrics -> checkpoint.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from torchtune_cp import config
from torchtune_cp.checkpointing.training_state import TrainingState
from torchtune_cp.config import MaskedLMConfig
from torchtune_cp.config.secrets import write_private
from torchtune_cp.distributed import Meshes
from torchtune_cp.distributed.process_group import init_distributed, is_rank_zero
from torchtune_cp.errors import RunStopped
from torchtune_cp.launch.stop import StopRequest
from torchtune_cp.metrics import memory_stats, peak_memory_bytes
from torchtune_cp.metrics.throughput import StepTimer
from torchtune_cp.models import TransformerEncoder
from torchtune_cp.training.masked_lm import (
    build_masked_lm_loader,
    masked_lm_step,
    perplexity,
)
from torchtune_cp.training.nonfinite import NonFiniteGuard, step_totals
from torchtune_cp.training.progress import TrainingProgress
from torchtune_cp.training.resume import (
    open_checkpoints,
    restore,
    run_record,
    saved_seed,
    skipped_steps,
)
from torchtune_cp.training.seed import set_seed, shared_seed
from torchtune_cp.training.setup import (
    build_model,
    build_optimizer,
    build_profiler,
    build_report,
    build_tokenizer,
    parallel_dims,
    setup_logging,
)
from torchtune_cp.training.step import imbalance_over, max_over, sum_over


@config.parse(schema=MaskedLMConfig)
def main(cfg: MaskedLMConfig) -> None:
    """Train, validate, save: see the module's docstring."""
    # --- mesh: every rank learns its place ----------------------------------------------------
    device = init_distributed(cfg.device, cfg.collective_timeout_s)
    log = setup_logging(cfg.log_level)
    dims = parallel_dims(cfg)
    meshes = Meshes.build(dims, device.type, shard=cfg.data_parallel == "fsdp")
    checkpoints, resumed = open_checkpoints(cfg)
    seed = shared_seed(saved_seed(resumed) if cfg.seed is None else cfg.seed)
    set_seed(seed)
    output_dir = Path(cfg.output_dir).expanduser()
    if is_rank_zero():
        output_dir.mkdir(parents=True, exist_ok=True)
        write_private(output_dir / "config.yaml", config.resolved_yaml(cfg))

    # --- model: sharded over dp_shard x cp (or whole on every rank), each rank reads its part --
    checkpointer = config.instantiate(cfg.checkpointer)
    model = build_model(cfg, checkpointer, meshes, device, seed, resumed, kind=TransformerEncoder)
    loss_fn = config.instantiate(cfg.loss)

    # --- data: one rank of each group reads, masks and packs; every rank gets its slices -------
    tokenizer = build_tokenizer(cfg)
    build = partial(
        build_masked_lm_loader,
        cfg,
        tokenizer=tokenizer,
        model=model,
        dims=dims,
        meshes=meshes,
        seed=seed,
    )
    loader = build(cfg.dataset)
    val_loader = None if cfg.dataset_val is None else build(cfg.dataset_val, validation=True)
    progress = TrainingProgress.start(cfg, loader, resumed)  # counts the steps; moves the loader
    optimizer, scheduler, gradient_norm = build_optimizer(cfg, model, progress.total_steps)
    log.info(
        "%d parameters on %s, %d steps",
        sum(p.numel() for p in model.parameters()),
        dims.describe(),
        progress.total_steps,
    )
    state, run = TrainingState(model, optimizer, scheduler), run_record(cfg, dims, seed)
    restore(resumed, checkpoints, state, progress, run)
    report = build_report(cfg, progress.total_steps, dims.world_size, resumed)
    nonfinite = NonFiniteGuard(cfg.on_nonfinite, meshes, before_raising=checkpoints.wait)
    nonfinite.count = skipped_steps(resumed)
    timer = StepTimer(device)

    # --- the step; validation uses the same context manager as training -------------------------
    train = masked_lm_step(
        cfg, model, optimizer, gradient_norm, loss_fn, meshes=meshes, dims=dims, device=device
    )

    def validate(step: int) -> float | None:
        """Mean token loss over the whole validation set: every sample once, on every mesh.

        None without a validation set, and when a signal interrupted it: a resumed run then repeats it.
        """
        if val_loader is None:
            return None
        val_loader.set_epoch(0)  # the same masks each time
        evaluation = train.evaluate(val_loader, interrupted=stop.agreed)
        if evaluation is None:
            return None
        extra = {
            "val_accuracy": evaluation.sums[0] / max(evaluation.tokens, 1),
            "val_perplexity": perplexity(evaluation.loss),
        }
        report.validation(step=step, loss=evaluation.loss, tokens=evaluation.tokens, extra=extra)
        return evaluation.loss

    # --- the loop -----------------------------------------------------------------------------
    stop = StopRequest()  # from here on SIGTERM, SIGINT and SIGUSR1 request a save and an exit

    def leave(signal_name: str) -> NoReturn:
        """End the run early on all ranks."""
        checkpoints.close()
        report.close()
        raise RunStopped(signal_name, checkpoints.newest)

    model.train()
    if progress.validation_due and not progress.validated:
        validate(progress.step)
    if asked := stop.agreed():
        leave(asked)
    with build_profiler(cfg) as profiler:
        for epoch in range(progress.epoch, cfg.epochs):
            for batches in progress.rest_of_epoch(epoch):
                timer.start()
                grads = train.backward(batches)
                totals = step_totals(meshes, grads.losses, grads.norm, device)
                lr = optimizer.param_groups[0]["lr"]
                step = progress.step + 1
                if nonfinite.allows(totals, step=step, losses=grads.losses, batches=batches):
                    train.update(grads.norm)
                train.finish()
                if scheduler is not None:
                    scheduler.step()
                progress.advance()

                peak = max_over(meshes.loss, peak_memory_bytes(device), device=device)
                imbalance = imbalance_over(meshes.loss, grads.attention_pairs, device=device)
                (guessed,) = sum_over(meshes.loss, *grads.sums, device=device)
                seconds = timer.stop()
                tokens, real, held = grads.counts
                mean_loss = totals.loss_sum / max(tokens, 1)
                report.step(
                    step=progress.step,
                    epoch=epoch,
                    loss=mean_loss,
                    grad_norm=totals.grad_norm,
                    lr=lr,
                    tokens=int(tokens),
                    seconds=seconds,
                    peak_memory_bytes=int(peak),
                    memory=memory_stats(device),
                    attention_imbalance=imbalance,
                    nonfinite_steps=None if totals.finite else nonfinite.count,
                    extra={
                        "accuracy": guessed / max(tokens, 1),
                        "perplexity": perplexity(mean_loss),
                        "padded_token_share": 1 - real / held,
                    },
                )
                profiler.step()
                val_loss = validate(progress.step) if progress.validation_due else None
                checkpoints.check()  # raises the error of an asynchronous save
                asked = stop.agreed()
                if progress.save_due or asked:
                    record = run | progress.record() | {"nonfinite_steps": nonfinite.count}
                    checkpoints.save(state, step=progress.step, record=record, val_loss=val_loss)
                if asked:
                    leave(asked)

    # --- the result: a Hugging Face folder, written by all ranks, visible when complete -------
    folder = checkpointer.save_final(model, tokenizer, folder=output_dir / "final")
    checkpoints.close()
    report.close()
    for open_loader in filter(None, (loader, val_loader)):
        open_loader.close()
    log.info("the trained model is in %s", folder)
    stop.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
