"""Whole runs of the ESM-2 recipe on real proteins: one curve on every mesh, resumed bit for bit."""

from __future__ import annotations

import collections
import math
import time

import pytest

from tests.distributed.esm2_fixtures import esm2_config
from tests.distributed.fixtures import run_recipe
from tests.distributed.harness import run_ranks
from torchtune_cp.datasets.example_proteins import EXAMPLE_PROTEINS
from torchtune_cp.datasets.fasta import read_fasta
from torchtune_cp.errors import UserError
from torchtune_cp.metrics import read_metrics

RECIPE = "esm2_mlm_distributed"
STEPS = 6


def _config(output_dir, dp, cp, **overrides):
    degree = "replicate" if overrides.get("data_parallel") == "ddp" else "shard"
    return esm2_config(
        None,
        output_dir,
        **{
            "model": {
                "_component_": "torchtune_cp.models.esm2.esm2",
                "num_layers": 2,
                "num_heads": 4,
                "embed_dim": 32,
            },
            "checkpointer": {"checkpoint_dir": None},
            "dataset": {
                "_component_": "torchtune_cp.datasets.example_protein_dataset",
                "max_rows": 96,
            },
            "dataset_val": {
                "_component_": "torchtune_cp.datasets.example_protein_dataset",
                "max_rows": 7,
            },
            "shuffle": True,
            "batch_size": 4 // dp,
            "epochs": 2,
            "max_steps_per_epoch": STEPS // 2,
            "save_every_epoch": False,
            f"data_parallel_{degree}_dim": dp,
            "context_parallel_dim": cp,
            "clip_grad_norm": 1.0,
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.003},
            **overrides,
        },
    )


BUDGET = {"batch_size": 1, "token_micro_batch_size": 400, "packing_strategy": "best_fit"}


def _runs(folder):
    def run(name, *mesh, **overrides):
        return name, _config(folder / name, *mesh, **overrides)

    return dict(
        [
            run("thd_2x1", 2, 1),
            run("thd_1x2", 1, 2, save_every_n_steps=2),
            run("bshd_1x2", 1, 2, sequence_format="bshd", context_parallel_method="ulysses"),
            run("ddp_1x2", 1, 2, data_parallel="ddp", context_parallel_method="allgather"),
            run("bf16_2x1", 2, 1, dtype="bf16"),
            run("bf16_1x2", 1, 2, dtype="bf16"),
            run("bf16_ddp_1x2", 1, 2, dtype="bf16", data_parallel="ddp"),
            run("budget_2x1", 2, 1, **BUDGET),
            run("budget_1x2", 1, 2, gradient_accumulation_steps=2, **BUDGET),
            # Step 2 lies in the middle of the first epoch, step 4 in that of the second.
            run(
                "resumed_2",
                1,
                2,
                resume_from_checkpoint=str(folder / "thd_1x2/checkpoints/step_2"),
            ),
            run(
                "resumed_4_ddp",
                1,
                2,
                data_parallel="ddp",
                resume_from_checkpoint=str(folder / "thd_1x2/checkpoints/step_4"),
            ),
        ]
    )


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    folder = tmp_path_factory.mktemp("esm2")
    runs = _runs(folder)
    run_ranks(2, run_recipe, list(runs.values()), folder / "stores", RECIPE)
    return {name: read_metrics(folder / name / "metrics.jsonl") for name in runs}


KEYS = ("loss", "grad_norm", "tokens", "accuracy", "perplexity")
VAL_KEYS = ("val_loss", "val_tokens", "val_accuracy", "val_perplexity")


def _numbers(lines, after=0):
    found = []
    for line in lines:
        if line["step"] > after or (line["step"] == after and "loss" in line and not after):
            found += [line[key] for key in (*KEYS, *VAL_KEYS) if key in line]
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("one", "other", "tolerance"),
    [
        ("thd_2x1", "thd_1x2", 1e-5),
        ("thd_2x1", "bshd_1x2", 1e-5),
        ("thd_2x1", "ddp_1x2", 1e-5),
        ("budget_2x1", "budget_1x2", 1e-5),
        ("bf16_2x1", "bf16_1x2", 2e-2),
        ("bf16_1x2", "bf16_ddp_1x2", 2e-2),
    ],
)
def test_the_curve_is_that_without_context_parallelism(curves, one, other, tolerance):
    first, second = _numbers(curves[one]), _numbers(curves[other])
    assert len(first) == len(second) > STEPS * len(KEYS)
    assert second == pytest.approx(first, rel=tolerance)
    losses = [line["loss"] for line in curves[other] if "loss" in line]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]


@pytest.mark.distributed
def test_a_run_resumed_in_the_middle_of_an_epoch_goes_on_bit_for_bit(curves):
    whole = _numbers(curves["thd_1x2"], after=2)
    assert _numbers(curves["resumed_2"], after=2) == whole
    # Another kind of data parallelism adds up in another order.
    assert _numbers(curves["resumed_4_ddp"], after=4) == pytest.approx(
        _numbers(curves["thd_1x2"], after=4), rel=1e-5
    )


@pytest.mark.distributed
def test_packing_spares_padding(curves):
    share = {
        name: [line["padded_token_share"] for line in curves[name] if "loss" in line]
        for name in ("thd_2x1", "thd_1x2", "bshd_1x2")
    }
    assert share["thd_2x1"] == [0.0] * STEPS
    assert all(0 < s < 0.03 for s in share["thd_1x2"])
    assert sum(share["bshd_1x2"]) / STEPS > 0.05


class _Raises:
    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index == 5:
            raise UserError("protein 5 cannot be read")
        return {"tokens": [0, *[5] * 20, 2], "labels": [0, *[5] * 20, 2]}


def raising(tokenizer=None):
    """Sixteen proteins, of which the sixth cannot be read."""
    return _Raises()


def _run_and_tell(cfg, stores):
    started = time.monotonic()
    try:
        run_recipe([cfg], stores, RECIPE)
    except Exception as error:  # noqa: BLE001
        return str(error), time.monotonic() - started
    return None


@pytest.mark.distributed
def test_a_dataset_that_raises_ends_all_ranks_with_its_error(tmp_path):
    cfg = _config(
        tmp_path / "run",
        2,
        2,
        dataset={"_component_": "tests.distributed.test_esm2_runs.raising", "max_rows": None},
        batch_size=1,
        shuffle=False,
        dataset_val=None,
    )
    del cfg.dataset["max_rows"]
    told = run_ranks(4, _run_and_tell, cfg, tmp_path / "stores")
    assert all(text == "protein 5 cannot be read" for text, _ in told), told
    assert all(seconds < 60 for _, seconds in told)


def unigram_entropy():
    """Nats per residue of a model that knows only how often each residue occurs."""
    counts = collections.Counter("".join(s for _, s in read_fasta(EXAMPLE_PROTEINS)))
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


@pytest.mark.slow
@pytest.mark.distributed
def test_a_model_from_scratch_learns_how_often_each_residue_occurs(tmp_path):
    long = {
        "dataset_val": None,
        "max_steps_per_epoch": None,
        "save_every_epoch": False,
        "batch_size": 8,
        "model": {
            "_component_": "torchtune_cp.models.esm2.esm2",
            "num_layers": 2,
            "num_heads": 4,
            "embed_dim": 64,
        },
    }
    component = "torchtune_cp.datasets.example_protein_dataset"
    runs = {
        "frequencies": _config(
            tmp_path / "frequencies",
            1,
            2,
            **long | {"dataset": {"_component_": component, "max_rows": None}, "epochs": 13},
        ),
    }
    run_ranks(2, run_recipe, list(runs.values()), tmp_path / "stores", RECIPE)
    for name, goal in (("frequencies", unigram_entropy() + 0.03),):
        losses = [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl")]
        last = sum(losses[-20:]) / 20
        print(f"{name}: {len(losses)} steps, {losses[0]:.3f} -> {last:.3f}, goal {goal:.3f}")
        assert last < goal, name
