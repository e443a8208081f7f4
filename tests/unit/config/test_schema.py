"""The typed config: what is refused, what is accepted, and with which words."""

import math
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from torchtune_cp import config
from torchtune_cp.config import ConfigError, FullFinetuneConfig, to_typed, validate
from torchtune_cp.config.combinations import degrees_problem
from torchtune_cp.config.schema import component_problems

from .examples import TORCHTUNE_STYLE, minimal

CONTRACT_KEYS = """
output_dir overwrite seed shuffle batch_size epochs max_steps_per_epoch gradient_accumulation_steps
optimizer optimizer_in_bwd optimizer_on_host lr_scheduler loss clip_grad_norm compile device dtype
tokenizer dataset dataset_val run_val_every_n_steps batch_size_val collate_fn model checkpointer
resume_from_checkpoint save_every_n_steps enable_async_checkpointing save_every_epoch keep_last_n keep_best
on_save_error on_nonfinite collective_timeout_s stop_grace_s
context_parallel_dim context_parallel_rotate_method tensor_parallel_dim tensor_parallel_plan
data_parallel_shard_dim data_parallel_replicate_dim fsdp_cpu_offload fsdp_reshard_after_forward
enable_activation_checkpointing enable_activation_offloading mlp_tile_tokens ac_mode ac_option
attention_head_chunks enable_fp8_training fp8_recipe_name fp8_emulate custom_sharded_layers
metric_logger log_every_n_steps log_peak_memory_stats log_level profiler
context_parallel_method context_parallel_ulysses_dim
"""


def problems(world_size: int | None = None, /, **changes: Any) -> list[str]:
    return validate(OmegaConf.create(minimal() | changes), world_size=world_size)


def test_every_key_of_the_contract_is_known_and_no_other() -> None:
    known = set(FullFinetuneConfig.__dataclass_fields__)
    assert known == set(CONTRACT_KEYS.split())


def test_a_torchtune_config_runs_unchanged() -> None:
    cfg = OmegaConf.create(yaml.safe_load(TORCHTUNE_STYLE))
    # OmegaConf's own loader reads 2e-5 as a number; safe_load leaves a string.
    cfg.optimizer.lr = 2e-5
    typed = to_typed(cfg, world_size=8)
    assert component_problems(typed) == []
    assert typed.data_parallel_shard_dim == -1
    assert typed.checkpointer.output_dir == "/tmp/torchtune/out"


def test_a_misspelt_key_is_refused_with_the_nearest_one() -> None:
    assert problems(context_paralel_dim=2) == [
        "context_paralel_dim: unknown key; did you mean context_parallel_dim?"
    ]


def test_all_problems_are_reported_at_once() -> None:
    found = problems(
        4,
        context_paralel_dim=2,
        batch_size=0,
        shuffle="yes please",
        dtype="fp16",
        run_val_every_n_steps=5,
        context_parallel_dim=3,
    )
    assert [line.split(":")[0].split("=")[0] for line in found] == [
        "context_paralel_dim",
        "shuffle",
        "batch_size",
        "dtype",
        "run_val_every_n_steps",
        "data_parallel_replicate_dim",
    ]
    with pytest.raises(ConfigError) as caught:
        to_typed(OmegaConf.create(minimal() | {"batch_size": 0, "epochs": 0}))
    assert len(caught.value.problems) == 2


def test_missing_keys_are_named() -> None:
    assert validate(OmegaConf.create({})) == [
        f"{key}: is missing"
        for key in ("output_dir", "model", "tokenizer", "checkpointer", "dataset", "optimizer")
    ]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("batch_size", 0, "must be at least 1, got 0"),
        ("batch_size", 1.5, "expected an integer, got 1.5"),
        ("batch_size", True, "expected an integer, got True"),
        ("batch_size", "2", "expected an integer, got '2'"),
        ("batch_size", None, "expected an integer, got None"),
        ("clip_grad_norm", 0, "must be greater than 0"),
        ("clip_grad_norm", -1.0, "must be greater than 0"),
        ("seed", -1, "must be at least 0"),
        ("data_parallel_shard_dim", -2, "must be at least 1 or -1"),
        ("data_parallel_shard_dim", 0, "must be at least 1 or -1"),
        ("context_parallel_dim", -1, "must be at least 1"),
        ("device", "mps", "expected one of cuda, cpu"),
        ("dtype", "fp16", "expected one of bf16, fp32"),
        ("context_parallel_rotate_method", "ring", "expected one of allgather, alltoall"),
        ("log_level", "chatty", "expected one of DEBUG, INFO, WARNING, ERROR"),
        ("shuffle", 1, "expected true or false, got 1"),
        ("optimizer", {"lr": 1}, "has no _component_"),
        ("optimizer", "AdamW", "expected a component"),
        ("optimizer", [1], "expected a component"),
        ("dataset", [], "the list is empty"),
        ("dataset", ["x"], "expected a component"),
        ("custom_sharded_layers", "output", "expected a list of strings or null"),
        ("custom_sharded_layers", [1], "expected a list of strings or null"),
        ("compile", {"modell": True}, "compile.modell: unknown key; did you mean model?"),
        ("compile", {"model": 1}, "compile.model: expected true or false"),
        ("ac_option", 0, "must be at least 1"),
        ("output_dir", "${nowhere}/x", "Interpolation key 'nowhere' not found"),
        ("output_dir", "???", "??? is used where a value is required"),
        ("cudnn_deterministic_mode", "default", "no equivalent here"),
    ],
)
def test_a_wrong_value_is_refused_with_key_and_what_is_allowed(
    key: str, value: object, said: str
) -> None:
    (line,) = problems(**{key: value})
    assert line.startswith(key)
    assert said in line


@pytest.mark.parametrize(
    ("key", "value", "becomes"),
    [
        ("clip_grad_norm", 1, 1.0),
        ("clip_grad_norm", "inf", math.inf),
        ("clip_grad_norm", None, None),
        ("dtype", "float32", "fp32"),
        ("dtype", "BF16", "bf16"),
        ("log_level", "debug", "DEBUG"),
        ("log_level", "warn", "WARNING"),
        ("seed", None, None),
        ("data_parallel_shard_dim", -1, -1),
        ("compile", {"model": True, "loss": False}, {"model": True, "loss": False}),
        ("memory_efficient_fsdp_wrap", True, None),
        ("loss", "torch.nn.CrossEntropyLoss", {"_component_": "torch.nn.CrossEntropyLoss"}),
        ("batch_size_val", None, 1),
    ],
)
def test_accepted_spellings_become_one(key: str, value: object, becomes: object) -> None:
    typed = to_typed(OmegaConf.create(minimal() | {key: value}))
    assert getattr(typed, key, None) == becomes


def test_a_variable_that_another_value_refers_to_is_no_unknown_key() -> None:
    changes = {"root": "/data", "name": "x", "output_dir": "${root}/${name}"}
    assert problems(**changes) == []
    assert to_typed(OmegaConf.create(minimal() | changes)).output_dir == "/data/x"
    assert problems(root="/data") == ["root: unknown key"]


def test_a_misspelt_variable_gets_the_nearest_key() -> None:
    (line,) = problems(checkpointer={"_component_": "a.b", "output_dir": "${output_dirr}"})
    assert line.startswith("checkpointer.output_dir: ")
    assert line.endswith("did you mean output_dir?")


def test_checkpoints_are_resumed_from_by_choice_or_by_path() -> None:
    for value in (True, False, "/runs/1/checkpoints/step_8"):
        typed = to_typed(OmegaConf.create(minimal() | {"resume_from_checkpoint": value}))
        assert typed.resume_from_checkpoint == value
    (line,) = problems(resume_from_checkpoint=8)
    assert line == "resume_from_checkpoint: expected true or false or a string, got 8"


def test_values_that_contradict_each_other_are_refused() -> None:
    assert "run_val_every_n_steps" in problems(run_val_every_n_steps=2)[0]
    assert "for keep_best=true" in problems(keep_best=True)[0]
    assert "ac_option" in problems(ac_mode="selective")[0]
    assert (
        "contradicts"
        in problems(ac_mode="selective", ac_option=2, enable_activation_checkpointing=True)[0]
    )
    assert problems(ac_mode="selective", ac_option=2) == []
    loss = {"_component_": "torchtune_cp.training.loss.LinearCrossEntropyLoss"}
    assert "set loss.ignore_index=-100" in problems(loss={**loss, "ignore_index": -1})[0]
    assert problems(loss={**loss, "ignore_index": -100}) == []
    by_op = {"ac_mode": "selective", "ac_option": "op"}
    assert problems(**by_op, compile=True, context_parallel_rotate_method="alltoall") == []
    by_op["ac_option"] = "op_kv"
    assert problems(**by_op) == []
    assert problems(**by_op, compile=True, context_parallel_rotate_method="alltoall") == [
        "context_parallel_rotate_method: must be allgather with ac_option=op_kv",
        "compile: must be false with ac_option=op_kv; ac_option=op can be compiled",
    ]
    by_op["ac_option"] = "ops"
    assert "expected one of N (checkpoint every N-th layer), op " in problems(**by_op)[0]
    in_backward = problems(optimizer_in_bwd=True, gradient_accumulation_steps=2, clip_grad_norm=1.0)
    assert in_backward == [
        "gradient_accumulation_steps: must be 1 with optimizer_in_bwd=true",
        "clip_grad_norm: must be null with optimizer_in_bwd=true",
    ]
    assert problems(optimizer_in_bwd=True) == []


def test_float8_that_no_kernel_computes_is_refused() -> None:
    fp8 = {"enable_fp8_training": True, "device": "cuda", "dtype": "fp32"}
    (line,) = problems(**fp8, fp8_recipe_name="rowwise")
    assert line.startswith("dtype: must be bf16 with fp8_recipe_name=rowwise")
    assert problems(**fp8, fp8_recipe_name="rowwise", fp8_emulate=True) == []
    assert problems(**fp8 | {"dtype": "bf16"}, fp8_recipe_name="rowwise") == []
    assert problems(**fp8, fp8_recipe_name="tensorwise") == []
    assert problems(**fp8 | {"enable_fp8_training": False}, fp8_recipe_name="rowwise") == []
    assert problems(**fp8, tensor_parallel_dim=2) == []
    (line,) = problems(**fp8, tensor_parallel_dim=2, compile=True)
    assert line.startswith("compile: must be false with enable_fp8_training=true")


def test_compiled_tensor_parallel_layers_are_checkpointed_by_layer_and_without_context_parallelism():
    compiled = {"tensor_parallel_dim": 2, "compile": True, "context_parallel_dim": 2}
    for checkpointing in (
        {"enable_activation_checkpointing": True},
        {"ac_mode": "full"},
        {"ac_mode": "selective", "ac_option": 2},
    ):
        (line,) = problems(**compiled, **checkpointing)
        assert line.startswith(
            "compile: must be false with tensor_parallel_dim and context_parallel"
        )
        assert problems(**compiled | {"context_parallel_dim": 1}, **checkpointing) == []
        assert problems(**compiled | {"compile": {"model": False}}, **checkpointing) == []
        assert problems(**compiled | {"tensor_parallel_dim": 1}, **checkpointing) == []
    assert problems(**compiled, ac_mode="none") == []
    by_operator = {"ac_mode": "selective", "ac_option": "op"}
    (line,) = problems(**compiled | {"context_parallel_dim": 1}, **by_operator)
    assert line.startswith(
        "compile: must be false with tensor_parallel_dim above 1 and ac_option=op"
    )


@pytest.mark.parametrize(
    ("shard", "cp", "replicate", "world_size", "fits"),
    [
        (-1, 1, 1, 8, True),
        (-1, 4, 1, 8, True),
        (-1, 3, 1, 8, False),
        (2, 4, 1, 8, True),
        (2, 2, 1, 8, False),
        (2, 2, 2, 8, True),
        (-1, 8, 1, 4, False),
        (-1, 2, 1, 1, False),
    ],
)
def test_degrees_must_fill_the_world(
    shard: int, cp: int, replicate: int, world_size: int, fits: bool
) -> None:
    degrees = {
        "data_parallel_shard_dim": shard,
        "context_parallel_dim": cp,
        "data_parallel_replicate_dim": replicate,
    }
    found = problems(world_size, **degrees)
    assert (found == []) is fits
    if not fits:
        for key, value in (degrees | {"tensor_parallel_dim": 1}).items():
            assert f"{key}={value}" in found[0]
        assert f"the run has {world_size}" in found[0]
    assert problems(None, **degrees) == []
    assert (degrees_problem(degrees | {"tensor_parallel_dim": 1}, world_size) is None) is fits


def test_component_arguments_are_compared_with_signatures() -> None:
    typed = to_typed(
        OmegaConf.create(
            minimal()
            | {
                "optimizer": {"_component_": "torch.optim.SGD", "learning_rat": 1, "momentu": 2},
                "model": {"_component_": "torchtune_cp.models.llama3.llama3", "vocab_size": 9},
                "collate_fn": "torchtune_cp.data.no_such",
                "dataset": {
                    "_component_": "torchtune_cp.datasets.text_folder_dataset",
                    "tokenizer": "x",
                },
            }
        )
    )
    found = component_problems(typed)
    assert any("momentu'; did you mean momentum?" in line for line in found)
    assert any(line.startswith("optimizer.learning_rat: ") for line in found)
    assert any(line.startswith("model: ") and "num_layers" in line for line in found)
    assert any(line.startswith("collate_fn: ") for line in found)
    assert any("dataset.tokenizer: is set by the recipe" in line for line in found)
    assert len(found) == 5


def test_the_resolved_config_has_every_key_gives_the_same_config_again_and_no_secret() -> None:
    changes = {
        "root": "/data",
        "output_dir": "${root}/x",
        "metric_logger": {
            "_component_": "torchtune_cp.metrics.WandBLogger",
            "api_key": "s3cret",
            "hf_token": "s3cret",
            "url": "https://me:s3cret@host/",
            "pad_token": "<pad>",
        },
    }
    typed = to_typed(OmegaConf.create(minimal() | changes))
    text = config.resolved_yaml(typed)
    assert "s3cret" not in text
    assert "<pad>" in text
    assert "${" not in text
    loaded = OmegaConf.create(text)
    assert set(loaded) == set(FullFinetuneConfig.__dataclass_fields__)
    again = to_typed(loaded)
    assert config.resolved_yaml(again) == text
    assert again.output_dir == "/data/x"
    assert "s3cret" not in config.resolved_yaml(OmegaConf.create(changes))
    assert config.resolved_dict(typed)["metric_logger"]["api_key"] == "***"
