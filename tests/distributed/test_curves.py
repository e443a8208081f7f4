"""Twenty AdamW steps on real text: the loss curve does not depend on the mesh."""

from __future__ import annotations

import pytest

from tests.distributed.fixtures import recipe_config, run_recipe
from tests.distributed.harness import run_ranks
from torchtune_cp.metrics import read_metrics

STEPS = 20


def _config(output_dir, dp, cp, **overrides):
    return recipe_config(
        None,
        output_dir,
        model={
            "_component_": "torchtune_cp.models.llama3.llama3",
            "vocab_size": 272,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "embed_dim": 32,
            "max_seq_len": 256,
        },
        checkpointer={"checkpoint_dir": None},
        dataset={
            "_component_": "torchtune_cp.datasets.text_folder_dataset",
            "glob": "a*.py",
            "max_seq_len": 251,
        },
        shuffle=True,
        batch_size=4 // dp,
        data_parallel_shard_dim=dp,
        context_parallel_dim=cp,
        max_steps_per_epoch=STEPS,
        clip_grad_norm=1.0,
        optimizer={"_component_": "torch.optim.AdamW", "lr": 0.003},
        lr_scheduler={
            "_component_": "torchtune_cp.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 3,
        },
        **overrides,
    )


@pytest.mark.distributed
def test_loss_curves_of_all_meshes_are_one_curve(tmp_path):
    curves = {}
    for world, meshes in {1: [(1, 1)], 2: [(1, 2)], 4: [(1, 4), (2, 2)]}.items():
        folders = [tmp_path / f"dp{dp}_cp{cp}" for dp, cp in meshes]
        cfgs = [_config(f, dp, cp) for f, (dp, cp) in zip(folders, meshes, strict=True)]
        run_ranks(world, run_recipe, cfgs)
        for folder in folders:
            curves[folder.name] = read_metrics(folder / "metrics.jsonl")
    reference = curves.pop("dp1_cp1")
    losses = [line["loss"] for line in reference]
    assert len(losses) == STEPS
    assert losses[-1] < 0.8 * losses[0], "the model does not learn: the curves would prove nothing"
    assert len({line["lr"] for line in reference}) > 10
    for name, curve in curves.items():
        for line, expected in zip(curve, reference, strict=True):
            # Float32 noise grows over 20 steps of Adam; a real difference starts at 1e-3.
            assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4), (name, line["step"])
            assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
            assert line["tokens"] == expected["tokens"]
            assert line["lr"] == expected["lr"]
