"""A NaN or infinite step is left out, or ends the run, on all ranks alike (``on_nonfinite``).

The causes are real: an embedding row of infinities that one sample of one rank hits, weights so large
that the gradient's norm leaves float32, a learning rate that blows the model up.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.distributed.fixtures import VOCAB, Samples, recipe_config, run_recipe, save_llama
from tests.distributed.harness import run_ranks
from torchtune_cp.checkpointing.training_state_store import list_checkpoints
from torchtune_cp.errors import UserError
from torchtune_cp.metrics import read_metrics

POISON = VOCAB - 1  # no other sample holds this token
POISONED_SAMPLE = 7  # of 16: step 2 of 4; with two ranks rank 1's second micro-batch
LR = 1e-2


def samples_with_one_poisoned(tokenizer: Any = None) -> Samples:
    """Sixteen samples of unequal lengths, one of which holds the poisonous token near its end."""
    g = torch.Generator().manual_seed(3)
    samples = []
    for i in range(16):
        tokens = torch.randint(0, POISON, (24 + i,), generator=g).tolist()
        if i == POISONED_SAMPLE:
            tokens[-3] = POISON
        samples.append({"tokens": tokens, "labels": tokens})
    return Samples(samples)


class RecordingAdamW(torch.optim.AdamW):
    """Keeps a copy of the moments before and after each step."""

    log: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []  # noqa: RUF012

    def _moments(self) -> list[torch.Tensor]:
        return [
            t.detach().clone().to_local() if hasattr(t, "to_local") else t.detach().clone()
            for state in self.state.values()
            for t in state.values()
        ]

    def step(self, closure: Any = None) -> Any:
        before = self._moments()
        result = super().step(closure)
        RecordingAdamW.log.append((before, self._moments()))
        return result


def falling_rate(optimizer: Any, num_training_steps: int) -> Any:
    """A schedule whose rate depends on the number of the step: 1, 1/2, 1/3, 1/4."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def _run(cfgs: list[Any]) -> list[dict[str, Any]]:
    """Run the recipe once per config; what each run said and how its optimizer's moments went."""
    told: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                told.append(record.getMessage())

    logging.getLogger("torchtune_cp").addHandler(Keep())
    results = []
    for cfg in cfgs:
        RecordingAdamW.log.clear()
        told.clear()
        error, saved = None, None
        try:
            run_recipe([cfg])
        except UserError as raised:
            error = str(raised)
            saved = [path.name for path in list_checkpoints(Path(cfg.output_dir) / "checkpoints")]
            torch.distributed.destroy_process_group()
        untouched = [
            all(torch.equal(a, b) for a, b in zip(now[0], last[1], strict=True))
            for last, now in zip(RecordingAdamW.log, RecordingAdamW.log[1:], strict=False)
        ]
        results.append(
            {
                "told": list(told),
                "error": error,
                "saved": saved,
                "steps": len(RecordingAdamW.log),
                "untouched": untouched,
            }
        )
    return results


def _reference(folder: Path) -> dict[str, torch.Tensor]:
    """A plain loop over the same samples with transformers' model that leaves step 2 out."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    samples = samples_with_one_poisoned().samples
    for step in range(4):
        optimizer.param_groups[0]["lr"] = LR / (step + 1)
        if step == POISONED_SAMPLE // 4:
            continue
        group = samples[4 * step : 4 * step + 4]
        count = sum(len(s["tokens"]) - 1 for s in group)
        for s in group:
            logits = model(torch.tensor([s["tokens"]])).logits[0, :-1]
            labels = torch.tensor(s["tokens"][1:])
            (F.cross_entropy(logits, labels, reduction="sum") / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four runs on two ranks: poisoned data under dp and under cp, a huge gradient, a huge rate."""
    base = tmp_path_factory.mktemp("nonfinite")
    for name in ("poisoned", "steep", "plain"):
        save_llama(base / name)
        path = base / name / "model.safetensors"
        tensors = load_file(path)
        if name == "poisoned":
            tensors["model.embed_tokens.weight"][POISON] = math.inf
        if name == "steep":
            tensors["lm_head.weight"] *= 1e22
        save_file(tensors, path, metadata={"format": "pt"})
    common: dict[str, Any] = {
        "dataset": {"_component_": "tests.distributed.test_nonfinite.samples_with_one_poisoned"},
        "optimizer": {"_component_": "tests.distributed.test_nonfinite.RecordingAdamW", "lr": LR},
        "lr_scheduler": {"_component_": "tests.distributed.test_nonfinite.falling_rate"},
        "on_nonfinite": "skip",
    }

    def config(folder: str, run: str, **other: Any) -> Any:
        return recipe_config(base / folder, base / run, **(common | other))

    cfgs = [
        config("poisoned", "dp", gradient_accumulation_steps=2, clip_grad_norm=1e6),
        config("poisoned", "cp", gradient_accumulation_steps=4, context_parallel_dim=2),
        config("steep", "overflow", gradient_accumulation_steps=2),
        config(
            "plain",
            "raise",
            on_nonfinite="raise",
            optimizer={"_component_": "torch.optim.SGD", "lr": 1e38},
            lr_scheduler=None,
            save_every_n_steps=1,
            enable_async_checkpointing=True,
        ),
    ]
    return base, run_ranks(2, _run, cfgs)


pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("run", ["dp", "cp"])
def test_a_skipped_step_leaves_weights_and_moments_and_the_run_goes_on(runs, run):
    base, ranks = runs
    expected = _reference(base / "poisoned")
    found = load_file(base / run / "final" / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
    for rank in ranks:
        result = rank[("dp", "cp").index(run)]
        assert result["error"] is None
        assert result["steps"] == 3  # of 4
        assert result["untouched"] == [True, True]  # step 3 found the moments that step 1 left
    steps = read_metrics(base / run / "metrics.jsonl")
    assert [line.get("nonfinite_steps") for line in steps] == [None, 1, None, None]
    assert [line["loss"] is None for line in steps] == [False, True, False, False]
    assert [line["lr"] for line in steps] == pytest.approx([LR, LR / 2, LR / 3, LR / 4])


def test_one_warning_names_step_quantity_and_the_samples_of_all_ranks(runs):
    _, ranks = runs
    (line,) = ranks[0][0]["told"]
    assert line == (
        "step 2 skipped: the loss is nan; micro-batches whose loss is not finite: number 2 of"
        " data-parallel rank 1 (samples 7); the step's samples 4, 6, 5, 7; skipped so far: 1"
        " (on_nonfinite=skip)"
    )
    (line,) = ranks[0][1]["told"]  # context parallelism: both ranks read the same samples
    assert "number 4 of data-parallel rank 0 (samples 7); the step's samples 4, 5, 6, 7" in line
    assert ranks[1][0]["told"] == ranks[1][1]["told"] == []


def test_an_infinite_gradient_norm_is_caught_though_the_loss_is_finite(runs):
    base, ranks = runs
    assert [rank[2]["steps"] for rank in ranks] == [0, 0]
    assert len(ranks[0][2]["told"]) == 4
    assert (
        "step 1 skipped: the gradient's norm is inf (the loss is finite); the step's"
        in (ranks[0][2]["told"][0])
    )
    before = load_file(base / "steep" / "model.safetensors")
    after = load_file(base / "overflow" / "final" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    steps = read_metrics(base / "overflow" / "metrics.jsonl")
    assert [line["nonfinite_steps"] for line in steps] == [1, 2, 3, 4]
    assert all(line["grad_norm"] is None and line["loss"] > 1e20 for line in steps)


def test_raise_ends_the_run_on_every_rank_with_the_same_line(runs):
    base, ranks = runs
    errors = {rank[3]["error"] for rank in ranks}
    (error,) = errors
    assert error.startswith("step 2: the loss is ")
    assert "the step's samples 2, 3;" in error
    assert "\n" not in error
    assert not (base / "raise" / "final").exists()


def test_a_checkpoint_in_the_making_is_finished_before_the_run_is_ended(runs):
    _, ranks = runs
    assert [rank[3]["saved"] for rank in ranks] == [["step_1"], ["step_1"]]
