"""Tensor parallelism, alone and with every other dimension: one SGD step equals a plain loop's.

Sizes are chosen so that shards come out uneven: 66 token ids and 62 hidden columns give a tensor-parallel
rank 33 and 31, which FSDP cannot halve.
"""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.distributed.dispatch_watchers import MostRows
from tests.distributed.fixtures import (
    recipe_config,
    reference_step,
    run_recipe,
    uneven_samples,
)
from tests.distributed.harness import run_ranks
from torchtune_cp.distributed import Meshes, ParallelDims
from torchtune_cp.distributed.tensor_parallel import apply_tensor_parallel
from torchtune_cp.errors import UserError
from torchtune_cp.models.llama3 import llama3
from torchtune_cp.training.loss import LinearCrossEntropyLoss

LR = 1.0
CLIP = 0.1
TOLERANCE = 1e-5
VOCAB = 66
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 62,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}


def _save_models(folder):
    """One model of each kind of parameter: plain, biased everywhere, with head norms and tied."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    torch.manual_seed(0)
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
        "llama_tied": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
        "llama_biased": LlamaForCausalLM(
            LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
        ),
        "qwen2_tied": Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
        "qwen3_tied": Qwen3ForCausalLM(
            Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=True, attention_bias=False)
        ),
    }
    for name, model in models.items():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                # Zero biases and scales of one would hide a bias that is added twice.
                parameter.data += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(folder / name)


def _mesh(dp, cp, tp, replicas=1):
    return {
        "data_parallel_replicate_dim": replicas,
        "data_parallel_shard_dim": dp,
        "context_parallel_dim": cp,
        "tensor_parallel_dim": tp,
    }


_CHECKPOINTING = {"enable_activation_checkpointing": True}
_CLIPPING = {"clip_grad_norm": CLIP}
_OWN_GROUPS = {
    "custom_sharded_layers": ["layers.0", "layers.0.mlp", "layers.1.mlp.w1", "tok_embeddings"],
    # A plan named in the config, by the name that torchtune's configs have for it.
    "tensor_parallel_plan": {"_component_": "torchtune.models.llama3.base_llama_tp_plan"},
}
_RUNS = {
    2: {
        "tp2_tied_acc3": ("llama_tied", _mesh(1, 1, 2), 2, {}),
        "tp2_biased": ("llama_biased", _mesh(1, 1, 2), 6, _CHECKPOINTING),
        "tp2_qwen3": ("qwen3_tied", _mesh(1, 1, 2), 6, {}),
        "tp2_clip": ("llama", _mesh(1, 1, 2), 6, _CLIPPING),
        "cp2_clip": ("llama", _mesh(1, 2, 1), 6, _CLIPPING),
    },
    4: {
        "cp2_tp2_qwen3_acc3": ("qwen3_tied", _mesh(1, 2, 2), 2, _CHECKPOINTING),
        "cp2_tp2_clip": ("llama", _mesh(1, 2, 2), 6, _CLIPPING),
        "dp2_tp2_tied": ("llama_tied", _mesh(2, 1, 2), 3, _OWN_GROUPS),
        "replicate2_tp2_clip": ("llama", _mesh(1, 1, 2, replicas=2), 3, _CLIPPING),
    },
}
_MORE_RUNS = {
    2: {
        "tp2_llama": ("llama", _mesh(1, 1, 2), 6, {}),
        "tp2_qwen2": ("qwen2_tied", _mesh(1, 1, 2), 2, _CHECKPOINTING),
    },
    4: {
        "cp2_tp2_llama": ("llama", _mesh(1, 2, 2), 6, {}),
        "cp2_tp2_tied_acc3": ("llama_tied", _mesh(1, 2, 2), 2, _CHECKPOINTING),
        "cp2_tp2_biased": ("llama_biased", _mesh(1, 2, 2), 6, {}),
        "dp2_tp2_qwen2": ("qwen2_tied", _mesh(2, 1, 2), 3, {}),
        "dp2_tp2_qwen3": ("qwen3_tied", _mesh(2, 1, 2), 3, {}),
        "dp2_tp2_acc3": ("llama", _mesh(2, 1, 2), 1, _CHECKPOINTING),
        "dp2_tp2_clip": ("llama", _mesh(2, 1, 2), 3, _CLIPPING),
        "replicate2_tp2_biased": ("llama_biased", _mesh(1, 1, 2, replicas=2), 3, {}),
    },
}


def _assert_weights(folder, reference, clip=None):
    """Compare a saved model with the plain loop's, whose gradient is scaled down as clipping says."""
    factor = 1.0 if clip is None else min(1.0, clip / (reference["grad_norm"] + 1e-6))
    weights = load_file(folder / "model.safetensors")
    assert set(weights) == set(reference["after"])
    for key, unclipped in reference["after"].items():
        before = reference["before"][key]
        update = factor * (unclipped - before)
        scale = unclipped.abs().max()
        error = (weights[key] - before - update).abs().max()
        assert error < TOLERANCE * scale, (folder, key, error / scale)
        if clip is None:
            assert update.abs().max() > 100 * TOLERANCE * scale, f"{key} hardly moves"


class _FloatRows(MostRows):
    """Leaves out index tensors: the offsets of a cut parameter's shards are as many as token ids."""

    def saw(self, func, args, out):
        outs = out if isinstance(out, (tuple, list)) else (out,)
        super().saw(
            func, args, [t for t in outs if isinstance(t, torch.Tensor) and t.is_floating_point()]
        )


def _watched(cfgs):
    """Run the recipe once per config; the most rows of whole and of half logits in each run."""
    rows = []
    for cfg in cfgs:
        with _FloatRows(VOCAB) as whole, _FloatRows(VOCAB // 2) as half:
            run_recipe([cfg])
        rows.append((whole.rows, half.rows))
    return rows


def _assert_steps_equal_the_plain_loop(folder, world, runs):
    _save_models(folder)
    references = {
        model: reference_step(folder / model, uneven_samples(), LR)
        for model in {model for model, *_ in runs.values()}
    }
    cfgs = []
    for name, (model, mesh, batch_size, more) in runs.items():
        dp = mesh["data_parallel_shard_dim"] * mesh["data_parallel_replicate_dim"]
        cfgs.append(
            recipe_config(
                folder / model,
                folder / name,
                **mesh,
                **more,
                batch_size=batch_size,
                gradient_accumulation_steps=6 // batch_size // dp,
                dataset_val={"_component_": "tests.distributed.fixtures.uneven_samples"},
                optimizer={"lr": LR},
            )
        )
    by_rank = run_ranks(world, _watched, cfgs)
    for i, (name, (model, mesh, _, more)) in enumerate(runs.items()):
        reference, clip = references[model], more.get("clip_grad_norm")
        lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
        before, line, *_ = lines
        assert before["val_loss"] == pytest.approx(reference["loss"], rel=1e-6), name
        assert line["tokens"] == reference["tokens"]
        assert line["loss"] == pytest.approx(reference["loss"], rel=1e-6), name
        # The norm is that before clipping, and the same on every mesh.
        assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5), name
        assert reference["grad_norm"] > 2 * CLIP, "clipping would change nothing"
        _assert_weights(folder / name / "final", reference, clip)
        if mesh["tensor_parallel_dim"] > 1:
            assert {rows[i][0] for rows in by_rank} == {0}, "a rank held a whole row of logits"
            if name == "cp2_tp2_qwen3_acc3":
                # Two samples of 128 tokens, half of each on a rank, projected in two chunks.
                assert {rows[i][1] for rows in by_rank} == {64}


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_weights_loss_and_norm_equal_a_plain_loop_after_one_step(tmp_path, world):
    _assert_steps_equal_the_plain_loop(tmp_path, world, _RUNS[world])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_more_meshes_and_models_equal_a_plain_loop_after_one_step(tmp_path, world):
    _assert_steps_equal_the_plain_loop(tmp_path, world, _MORE_RUNS[world])


def _sharded_model(tp_mesh):
    model = llama3(
        vocab_size=VOCAB,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=32,
        max_seq_len=64,
        intermediate_dim=66,
    )
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    apply_tensor_parallel(model, tp_mesh)
    return model, whole


def _loss_cases(group_size):
    """The loss of sharded logits and its gradients against those of whole logits, and refusals."""
    mesh = Meshes.build(ParallelDims(1, 1, 1, group_size, group_size), "cpu").tp
    g = torch.Generator().manual_seed(0)
    seen = {}
    for dtype in (torch.float32, torch.float64):
        hidden = torch.randn(2, 15, 8, generator=g).to(dtype).requires_grad_()
        weight = torch.randn(VOCAB, 8, generator=g).mul_(20).to(dtype).requires_grad_()
        labels = torch.randint(0, VOCAB, (2, 15), generator=g)
        labels[0, :9] = -100
        labels[1, 14] = VOCAB - 1
        expected = F.cross_entropy(
            (hidden @ weight.t()).flatten(0, 1), labels.flatten(), reduction="sum"
        )
        expected_grads = torch.autograd.grad(expected, (hidden, weight))
        loss_fn = LinearCrossEntropyLoss(num_output_chunks=4)

        cut = DTensor.from_local(
            weight.detach().chunk(group_size)[mesh.get_local_rank()].clone(), mesh, [Shard(0)]
        ).requires_grad_()
        whole = DTensor.from_local(hidden.detach().clone(), mesh, [Replicate()]).requires_grad_()
        with torch.no_grad():
            plain = loss_fn(whole, cut, labels)
        loss = loss_fn(whole, cut, labels)
        loss.backward()
        nothing = loss_fn(whole, cut, torch.full_like(labels, -100))
        seen[dtype] = {
            "loss": (loss.detach(), plain, expected.detach()),
            "nothing": nothing.detach(),
            "hidden": (whole.grad.full_tensor(), expected_grads[0]),
            "weight": (cut.grad.full_tensor(), expected_grads[1]),
            "partial": whole.grad.placements[0].is_partial(),
        }
        for wrong in (VOCAB, -1):
            with pytest.raises(RuntimeError, match="out of bounds"), torch.no_grad():
                loss_fn(whole, cut, torch.full_like(labels, wrong))
    model, weights = _sharded_model(mesh)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        torch.testing.assert_close(parameter.full_tensor(), weights[name], rtol=0, atol=0)
    tokens = torch.randint(0, VOCAB, (1, 6), generator=g)
    with pytest.raises(UserError, match=f"5 tokens with tensor_parallel_dim={group_size}"):
        model(tokens[:, :5])
    with pytest.raises(IndexError, match="out of range"), torch.no_grad():
        model(tokens + VOCAB)
    incomplete = {"tok_embeddings": torch.distributed.tensor.parallel.ColwiseParallel()}
    with torch.device("meta"):
        other = llama3(**_small(num_kv_heads=2))
        few_heads = llama3(**_small(num_kv_heads=1))
    with pytest.raises(UserError, match="tensor_parallel_plan leaves out"):
        apply_tensor_parallel(other, mesh, incomplete)
    with pytest.raises(UserError, match="num_kv_heads of 1"):
        apply_tensor_parallel(few_heads, mesh)
    shapes = {name: tuple(p.to_local().shape) for name, p in model.named_parameters()}
    return seen, shapes


def _small(num_kv_heads):
    return {
        "vocab_size": VOCAB,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": num_kv_heads,
        "embed_dim": 32,
        "max_seq_len": 64,
        "intermediate_dim": 66,
    }


@pytest.mark.distributed
def test_sharded_logits_give_the_loss_and_gradients_of_whole_ones():
    for seen, shapes in run_ranks(2, _loss_cases, 2):
        for dtype, case in seen.items():
            tolerance = 1e-5 if dtype == torch.float32 else 1e-12
            for loss in case["loss"][:2]:
                torch.testing.assert_close(
                    loss, case["loss"][2], rtol=tolerance, atol=0, check_dtype=True
                )
            assert case["nothing"] == 0
            assert case["partial"], "each rank holds the contribution of its own token ids"
            for key in ("hidden", "weight"):
                actual, expected = case[key]
                torch.testing.assert_close(
                    actual, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item()
                )
        assert shapes["tok_embeddings.weight"] == shapes["output.weight"] == (VOCAB // 2, 32)
        assert shapes["layers.0.attn.q_proj.weight"] == (16, 32)
        assert shapes["layers.0.attn.k_proj.weight"] == (8, 32)
        assert shapes["layers.0.attn.output_proj.weight"] == (32, 16)
        assert shapes["layers.0.mlp.w1.weight"] == (33, 32)
        assert shapes["layers.0.mlp.w2.weight"] == (32, 33)
        assert shapes["layers.0.sa_norm.scale"] == (32,)


@pytest.mark.slow
@pytest.mark.distributed
def test_bfloat16_is_as_near_to_a_plain_loop_as_without_tensor_parallelism(tmp_path):
    # bfloat16 keeps 8 bits: two orders of the same sums differ by a few times 0.4 %; a missing position,
    # label or part of a gradient moves updates by 10 % and more.
    _save_models(tmp_path)
    reference = reference_step(tmp_path / "qwen3_tied", uneven_samples(), LR, torch.bfloat16)
    cfg = recipe_config(
        tmp_path / "qwen3_tied",
        tmp_path / "out",
        **_mesh(1, 2, 2),
        batch_size=2,
        gradient_accumulation_steps=3,
        dtype="bf16",
        optimizer={"lr": LR},
    )
    run_ranks(4, run_recipe, [cfg])
    (line,) = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    assert line["loss"] == pytest.approx(reference["loss"], rel=5e-3)
    weights = load_file(tmp_path / "out" / "final" / "model.safetensors")
    for key, after in reference["after"].items():
        update = after - reference["before"][key]
        assert (weights[key] - after).norm() < 0.05 * update.norm(), key


@pytest.mark.slow
@pytest.mark.distributed
def test_compiled_layers_give_the_same_step(tmp_path):
    # The embedding's gradient above all: a compiled layer handed a tensor in flight may lose it.
    _save_models(tmp_path)
    reference = reference_step(tmp_path / "llama", uneven_samples(), LR)
    cfgs = [
        recipe_config(
            tmp_path / "llama",
            tmp_path / name,
            **_mesh(1, cp, 2),
            batch_size=2,
            gradient_accumulation_steps=3,
            compile=True,
            optimizer={"lr": LR},
            enable_activation_checkpointing=checkpointed,
        )
        for name, cp, checkpointed in (
            ("tp2", 1, False),
            ("ac2", 1, True),
            ("cp2_tp2", 2, False),
        )
    ]
    for cfg in cfgs:
        run_ranks(2 * cfg.context_parallel_dim, run_recipe, [cfg])
        (line,) = map(
            json.loads, (tmp_path / cfg.output_dir / "metrics.jsonl").read_text().splitlines()
        )
        assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
        _assert_weights(tmp_path / cfg.output_dir / "final", reference)
