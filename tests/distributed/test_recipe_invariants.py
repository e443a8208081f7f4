"""What holds on every rank during a run of the recipe: data, logits, positions, step counts."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.dispatch_watchers import MostRows
from tests.distributed.fixtures import recipe_config, run_recipe
from tests.distributed.harness import run_ranks
from torchtune_cp.config import to_typed
from torchtune_cp.distributed import Meshes, ParallelDims, context_parallel, unshard
from torchtune_cp.metrics import read_metrics
from torchtune_cp.models.llama3 import llama3
from torchtune_cp.training.setup import build_loader

NUMBERED = "tests.distributed.fixtures.numbered_samples"
VOCAB = 97


def _model(vocab_size=VOCAB, **sizes):
    defaults = {
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "embed_dim": 32,
        "max_seq_len": 128,
    }
    return {"vocab_size": vocab_size, **defaults, **sizes}


def _config(output_dir, **overrides):
    model = {"_component_": "torchtune_cp.models.llama3.llama3", **_model()}
    return recipe_config(
        None,
        output_dir,
        model=model,
        checkpointer={"checkpoint_dir": None},
        dataset={"_component_": NUMBERED},
        **overrides,
    )


def _ids_read(cfg):
    """The sample ids that this rank's loader yields over two epochs."""
    import os

    os.environ["TUNE_ALLOW_COMPONENTS"] = "tests"
    typed = to_typed(cfg)
    meshes = Meshes.build(ParallelDims(1, 2, 2, 1, 4), "cpu")
    loader = build_loader(typed, typed.dataset, None, meshes, seed=0)
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([batch["sample_ids"].tolist() for batch in loader])
    return meshes.dp.get_local_rank(), meshes.cp.get_local_rank(), epochs


@pytest.mark.distributed
def test_cp_peers_read_the_same_samples_and_dp_ranks_disjoint_ones(tmp_path):
    cfg = _config(tmp_path, shuffle=True)
    read = {(dp, cp): epochs for dp, cp, epochs in run_ranks(4, _ids_read, cfg)}
    assert len(read) == 4
    for dp in range(2):
        assert read[dp, 0] == read[dp, 1]
    first, second = read[0, 0], read[1, 0]
    for epoch in range(2):
        ids = [i for batch in first[epoch] + second[epoch] for i in batch]
        assert len(ids) == len(set(ids)) == 6  # 7 samples, 2 a step: the seventh waits
    assert first[0] != first[1], "every epoch has an order of its own"


def _watched(cfgs):
    seen = []
    for cfg in cfgs:
        with MostRows(VOCAB) as watcher:
            run_recipe([cfg])
        seen.append(watcher.rows)
    return seen


@pytest.mark.distributed
def test_seven_samples_give_every_rank_the_same_steps_and_no_rank_whole_logits(tmp_path):
    length, chunks = 1024, 4
    dataset = {"_component_": NUMBERED, "length": length}
    common = {"context_parallel_dim": 2, "loss": {"num_output_chunks": chunks}}
    train = _config(tmp_path / "train", **common)
    train.dataset = dataset
    validate = _config(tmp_path / "validate", dataset_val=dataset, epochs=2, **common)
    for rows in run_ranks(4, _watched, [train, validate]):
        # dp 2 x cp 2: each rank projects half a sequence, a quarter of it at a time.
        assert rows == [length // 2 // chunks] * 2
    lines = read_metrics(tmp_path / "train" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    lines = read_metrics(tmp_path / "validate" / "metrics.jsonl")
    validations = [line for line in lines if "val_loss" in line]
    assert [line["step"] for line in validations] == [0, 6]
    # Validation reads all seven samples exactly once although two ranks share them.
    assert [line["val_tokens"] for line in validations] == [7 * (length - 1)] * 2
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]


def _logits(positions):
    """Logits under cp after unsharding, and those of the whole sequence on this rank alone."""
    world = torch.distributed.get_world_size()
    mesh = Meshes.build(ParallelDims(1, 1, world, 1, world), "cpu").cp
    torch.manual_seed(0)
    model = llama3(**_model())
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    tokens = torch.randint(0, VOCAB, (2, len(positions)))
    input_pos = torch.tensor(positions).expand(2, -1)
    pairs = []
    with torch.no_grad():
        for changed in (False, True):
            if changed:
                tokens[:, 0] = (tokens[:, 0] + 1) % VOCAB
            whole = model(tokens, input_pos)
            with context_parallel(mesh, {"tokens": tokens, "input_pos": input_pos}) as local:
                out = model(local["tokens"], local["input_pos"])
            pairs.append((whole, unshard(out, mesh, seq_len=len(positions))))
    return pairs


@pytest.mark.distributed
@pytest.mark.parametrize(
    "positions",
    [list(range(40)), list(range(15)) + list(range(25))],
    ids=["shorter_than_max_seq_len", "restarting"],
)
def test_logits_put_together_again_are_those_of_one_process(positions):
    for pairs in run_ranks(4, _logits, positions):
        for whole, unsharded in pairs:
            torch.testing.assert_close(unsharded, whole, rtol=1e-5, atol=1e-5)
        (before, _), (after, _) = pairs
        far = (before[:, -1] - after[:, -1]).abs().max()
        assert far > 1e-4, "the first token must reach the last one's logits"
