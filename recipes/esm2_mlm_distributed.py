"""Train a protein language model on masked residues, every protein cut over several ranks.

    tune run --nproc_per_node 2 esm2_mlm_distributed --config tiny/esm2_cpu context_parallel_dim=2

The run, top to bottom: config -> mesh -> model -> data -> step -> metrics -> checkpoint.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from torchtune_cp import config
from torchtune_cp.checkpointing.training_state import TrainingState
from torchtune_cp.config import MaskedLMConfig
from torchtune_cp.distributed import Meshes, context_parallel
from torchtune_cp.distributed.context_parallel import attention_work
from torchtune_cp.distributed.fsdp import set_gradient_sync
from torchtune_cp.distributed.process_group import init_distributed, is_rank_zero
from torchtune_cp.errors import RunStopped
from torchtune_cp.metrics import memory_stats, peak_memory_bytes
from torchtune_cp.metrics.throughput import StepTimer
from torchtune_cp.models import TransformerEncoder
from torchtune_cp.training.masked_lm import (
    build_masked_lm_loader,
    count_tokens,
    masked_lm_head,
    perplexity,
)
from torchtune_cp.training.nonfinite import NonFiniteGuard, step_totals
from torchtune_cp.training.position import RunPosition
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
    ulysses_dim,
)
from torchtune_cp.training.step import (
    clip_gradients,
    imbalance_over,
    max_over,
    sum_over,
    to_device,
)
from torchtune_cp.training.stop import StopRequest


@config.parse(schema=MaskedLMConfig)
def main(cfg: MaskedLMConfig) -> None:
    """Train, validate, save: see the module's docstring."""
    # --- mesh: every rank learns its place ----------------------------------------------------
    device = init_distributed(cfg.device, cfg.collective_timeout_s)
    log = setup_logging(cfg.log_level)
    dims = parallel_dims(cfg)
    meshes = Meshes.build(dims, device.type, shard=cfg.data_parallel == "fsdp")
    checkpoints, found = open_checkpoints(cfg)  # found: what to continue from, if anything
    seed = shared_seed(saved_seed(found) if cfg.seed is None else cfg.seed)
    set_seed(seed)
    output_dir = Path(cfg.output_dir).expanduser()
    if is_rank_zero():
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "config.yaml").write_text(config.resolved_yaml(cfg), encoding="utf-8")

    # --- model: sharded over dp_shard x cp (or whole on every rank), each rank reads its part --
    checkpointer = config.instantiate(cfg.checkpointer)
    model = build_model(cfg, checkpointer, meshes, device, seed, found, kind=TransformerEncoder)
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
    at = RunPosition.start(cfg, loader, found)  # counts the steps; the loader follows it
    optimizer, scheduler, gradient_norm = build_optimizer(cfg, model, at.total_steps)
    log.info(
        "%d parameters on %s, %d steps",
        sum(p.numel() for p in model.parameters()),
        dims.describe(),
        at.total_steps,
    )
    state, run = TrainingState(model, optimizer, scheduler), run_record(cfg, dims, seed)
    restore(found, checkpoints, state, at, run)
    report = build_report(cfg, at.total_steps, dims.world_size, resume_step=at.resumed_at)
    nonfinite = NonFiniteGuard(cfg.on_nonfinite, meshes, before_raising=checkpoints.wait)
    nonfinite.count = skipped_steps(found)
    timer = StepTimer(device)

    # --- attention over all ranks' slices: training and validation go through the same door ---
    attend = partial(
        context_parallel,
        meshes.cp,
        already_cut=True,  # by the loader
        is_causal=False,
        rotate_method=cfg.context_parallel_rotate_method,
        method=cfg.context_parallel_method,
        ulysses_dim=ulysses_dim(cfg, model),
    )

    def slice_loss(local: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the token losses of this rank's slice, and how many of its labels were guessed."""
        return model(
            local["tokens"],
            local["input_pos"],
            token_dropout_scale=local.get("token_dropout_scale"),
            output_fn=partial(masked_lm_head, labels=local["labels"], loss_fn=loss_fn),
        )

    def validate(step: int) -> float | None:
        """Mean token loss over the whole validation set: every sample once, whatever the mesh.

        None without a validation set, and when a signal cut it short: a resumed run then repeats it.
        """
        if val_loader is None:
            return None
        model.eval()
        val_loader.set_epoch(0)
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        guessed = torch.zeros((), dtype=torch.int64, device=device)
        tokens = 0
        with torch.no_grad():
            for batch in val_loader:
                if stop.agreed():
                    model.train()
                    return None
                tokens += count_tokens([batch], dims.cp)[0]
                with attend(to_device(batch, device)) as local:
                    loss, right = slice_loss(local)
                loss_sum += loss
                guessed += right
        model.train()
        all_loss, all_guessed, all_tokens = sum_over(
            meshes.loss, loss_sum, guessed, tokens, device=device
        )
        val_loss = all_loss / max(all_tokens, 1)
        told = {
            "val_accuracy": all_guessed / max(all_tokens, 1),
            "val_perplexity": perplexity(val_loss),
        }
        report.validation(step=step, loss=val_loss, tokens=int(all_tokens), extra=told)
        return val_loss

    # --- the loop -----------------------------------------------------------------------------
    stop = StopRequest()  # from here on SIGTERM, SIGINT and SIGUSR1 mean: save, then leave

    def leave(signal_name: str) -> NoReturn:
        """End the run early, on all ranks together."""
        checkpoints.close()
        report.close()
        raise RunStopped(signal_name, checkpoints.newest)

    model.train()
    if at.validation_due and not at.validated:
        validate(at.step)
    if asked := stop.agreed():
        leave(asked)
    with build_profiler(cfg) as profiler:
        for epoch in range(at.epoch, cfg.epochs):
            for batches in at.rest_of_epoch(epoch):
                timer.start()
                # Counted over everything that this optimizer step adds up.
                tokens, real, held = sum_over(
                    meshes.loss, *count_tokens(batches, dims.cp), device=device
                )
                # FSDP averages gradients over its ranks; wanted is the sum / label tokens.
                scale = meshes.loss.size() / max(tokens, 1)
                losses, work = [], 0.0
                guessed = torch.zeros((), dtype=torch.int64, device=device)
                for i, batch in enumerate(batches):
                    set_gradient_sync(model, i == len(batches) - 1)
                    with attend(to_device(batch, device)) as local:
                        loss, right = slice_loss(local)
                        (loss * scale).backward()
                    work += attention_work(local)
                    guessed += right
                    losses.append(loss.detach())
                grad_norm = gradient_norm()
                totals = step_totals(meshes, losses, grad_norm, device)
                lr = optimizer.param_groups[0]["lr"]
                if nonfinite.allows(totals, step=at.step + 1, losses=losses, batches=batches):
                    if cfg.clip_grad_norm is not None:
                        clip_gradients(model, cfg.clip_grad_norm, grad_norm)
                    optimizer.step()  # with optimizer_in_bwd: done already, nothing is left to do
                optimizer.zero_grad(set_to_none=True)
                if scheduler is not None:
                    scheduler.step()
                at.advance()

                (all_guessed,) = sum_over(meshes.loss, guessed, device=device)
                imbalance = imbalance_over(meshes.loss, work, device=device)
                peak = max_over(meshes.loss, peak_memory_bytes(device), device=device)
                seconds = timer.stop()
                mean_loss = totals.loss_sum / max(tokens, 1)
                report.step(
                    step=at.step,
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
                        "accuracy": all_guessed / max(tokens, 1),
                        "perplexity": perplexity(mean_loss),
                        "padded_token_share": 1 - real / held,
                    },
                )
                profiler.step()
                val_loss = validate(at.step) if at.validation_due else None
                checkpoints.check()  # the error of a save in the background comes out here
                asked = stop.agreed()
                if at.save_due or asked:
                    record = run | at.record() | {"nonfinite_steps": nonfinite.count}
                    checkpoints.save(state, step=at.step, record=record, val_loss=val_loss)
                if asked:
                    leave(asked)

    # --- the result: a Hugging Face folder, written by all ranks, visible when complete -------
    folder = checkpointer.save_final(model, tokenizer, folder=output_dir / "final")
    checkpoints.close()
    report.close()
    for open_loader in filter(None, (loader, val_loader)):
        open_loader.close()
    log.info("the trained model lies in %s", folder)
    stop.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
