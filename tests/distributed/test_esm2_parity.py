"""The recipe's weights after an SGD step are those of a plain loop over the proteins, one by one."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from tests.distributed.esm2_fixtures import esm2_config, reference_step, save_esm2
from tests.distributed.fixtures import run_recipe
from tests.distributed.harness import run_ranks

LR = 0.05
TOLERANCE = 1e-5  # of the largest weight of each parameter, fp32

# format, data parallelism, method, rotation
FORMS = (
    ("thd", "fsdp", "ring", "allgather"),
    ("thd", "ddp", "ring", "alltoall"),
    ("thd", "ddp", "allgather", "allgather"),
    ("thd", "fsdp", "ulysses", "allgather"),
    ("bshd", "fsdp", "ring", "alltoall"),
    ("bshd", "ddp", "ulysses", "allgather"),
    ("bshd", "fsdp", "allgather", "allgather"),
)


def _runs(tmp_path, world):
    meshes = {2: ((2, 1), (1, 2)), 4: ((2, 2), (1, 4))}[world]
    for dp, cp in meshes:
        for form in FORMS if cp > 1 else FORMS[::4]:
            sequence_format, data_parallel, method, rotation = form
            name = "_".join((f"{dp}x{cp}", *form))
            degree = "data_parallel_replicate_dim" if data_parallel == "ddp" else None
            yield (
                name,
                esm2_config(
                    tmp_path / "base",
                    tmp_path / name,
                    sequence_format=sequence_format,
                    data_parallel=data_parallel,
                    context_parallel_method=method,
                    context_parallel_rotate_method=rotation,
                    context_parallel_dim=cp,
                    batch_size=6 // dp,
                    optimizer={"lr": LR},
                    **({degree: dp} if degree else {}),
                ),
            )
        tiled = f"{dp}x{cp}_tiled"
        # 5 divides none of the slices' lengths.
        yield (
            tiled,
            esm2_config(
                tmp_path / "base",
                tmp_path / tiled,
                context_parallel_dim=cp,
                batch_size=6 // dp,
                optimizer={"lr": LR},
                mlp_tile_tokens=5,
                enable_activation_checkpointing=True,
            ),
        )
        yield (
            f"{dp}x{cp}_accumulated",
            esm2_config(
                tmp_path / "base",
                tmp_path / f"{dp}x{cp}_accumulated",
                context_parallel_dim=cp,
                data_parallel="ddp",
                gradient_accumulation_steps=3,
                batch_size=2 // dp,
                optimizer={"lr": LR},
            ),
        )


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_weights_equal_a_plain_loop_over_proteins(tmp_path, world):
    save_esm2(tmp_path / "base")
    reference = reference_step(tmp_path / "base", LR)
    runs = dict(_runs(tmp_path, world))
    run_ranks(world, run_recipe, list(runs.values()), "esm2_mlm_distributed")
    for name in runs:
        (line,) = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        assert line["tokens"] == reference["tokens"], name
        assert line["loss"] == pytest.approx(reference["loss"], rel=1e-5), name
        assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5), name
        assert line["accuracy"] == pytest.approx(reference["accuracy"]), name
        weights = load_file(tmp_path / name / "final" / "model.safetensors")
        moved = 0
        for key, after in reference["after"].items():
            scale = after.abs().max()
            error = (weights[key] - after).abs().max()
            assert error < TOLERANCE * scale, (name, key, error / scale)
            moved += bool((after - reference["before"][key]).abs().max() > 100 * TOLERANCE * scale)
        assert moved > 0.7 * len(reference["after"]), "too little moves: the test would see nothing"
