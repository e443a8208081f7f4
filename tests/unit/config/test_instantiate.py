"""Components: building them, naming torchtune's, and refusing what a stranger's config may not name."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from torchtune_cp.config import ConfigError, allow, component_callable, get_component, instantiate


def test_arguments_of_recipe_and_config_reach_the_component() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    node = OmegaConf.create({"opt": {"_component_": "torch.optim.SGD", "lr": 0.5, "momentum": 0.9}})
    optimizer = instantiate(node.opt, [weight], lr=0.25)
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["params"] == [weight]
    assert optimizer.defaults["lr"] == 0.25
    assert optimizer.defaults["momentum"] == 0.9


def test_components_nested_in_the_users_own_are_built_first_and_interpolations_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(allow.ALLOW_VARIABLE, "torch.nn")
    node = OmegaConf.create(
        {
            "size": 4,
            "model": {
                "_component_": "torch.nn.TransformerEncoder",
                "num_layers": 2,
                "encoder_layer": {
                    "_component_": "torch.nn.TransformerEncoderLayer",
                    "d_model": "${size}",
                    "nhead": 2,
                    "dim_feedforward": 8,
                },
            },
        }
    )
    model = instantiate(node.model)
    assert len(model.layers) == 2
    assert model.layers[0].linear1.in_features == 4


def test_none_gives_none_and_a_plain_dict_is_a_node() -> None:
    assert instantiate(None) is None
    tokenizer = instantiate({"_component_": "torchtune_cp.data.byte_tokenizer", "max_seq_len": 3})
    assert tokenizer.max_seq_len == 3


def test_a_component_can_be_taken_as_a_callable() -> None:
    collate = component_callable("torchtune.data.padded_collate_sft")
    assert collate is importlib.import_module("torchtune_cp.data").collate
    bound = component_callable({"_component_": "torchtune_cp.data.collate", "padding_idx": 7})
    samples = [{"tokens": [1, 2, 3], "labels": [1, 2, 3]}, {"tokens": [1], "labels": [1]}]
    assert bound(samples)["tokens"].tolist() == [[1, 2, 3], [1, 7, 7]]


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"lr": 1}, "has no _component_"),
        ({"_component_": "torch.optim.AdamW", "lrr": 1}, "no argument 'lrr'; did you mean lr?"),
        ({"_component_": "torchtune_cp.data.hf_tokenizer"}, "needs path"),
        ({"_component_": "torch.optim.Adamw"}, "refused; did you mean torch.optim.AdamW?"),
        (
            {"_component_": "torch.optim.lr_schedulr.StepLR"},
            "did you mean torch.optim.lr_scheduler.StepLR?",
        ),
        ({"_component_": "torch.optim"}, "is refused"),
        ({"_component_": "AdamW"}, "no dotted path"),
        ({"_component_": "torch.optim.Adam W"}, "no dotted path"),
        ({"_component_": "torchtune_cp.data.hf_tokenizer", "path": "???"}, "issing"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_key(node: dict, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        instantiate(OmegaConf.create({"part": node}).part)
    assert said in str(caught.value)
    assert "part" in str(caught.value)


def test_an_argument_that_the_recipe_gives_cannot_stand_in_the_config() -> None:
    with pytest.raises(ConfigError, match="params: is set by the recipe"):
        instantiate({"_component_": "torch.optim.SGD", "params": [], "lr": 1}, [])
    with pytest.raises(ConfigError, match="does not take 'steps', which the recipe passes"):
        instantiate({"_component_": "torch.optim.SGD", "lr": 1}, [], steps=3)


def test_an_error_inside_the_component_passes_unchanged() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        instantiate(
            {"_component_": "torch.optim.SGD", "lr": -1.0}, [torch.nn.Parameter(torch.ones(1))]
        )


# A config that tries to run something: by name, through another module's attribute, through a loader
# of the big packages, through private names, methods and our own command line.
ESCAPES = [
    "os.system",
    "subprocess.run",
    "builtins.eval",
    "builtins.exec",
    "shutil.rmtree",
    "importlib.import_module",
    "runpy.run_path",
    "posix.system",
    "torch.os.system",
    "torch.sys.exit",
    "torch.load",
    "torch.save",
    "torch.hub.load",
    "torch.serialization.load",
    "torch.package.PackageImporter",
    "torch.utils.cpp_extension.load",
    "torch.utils.cpp_extension.load_inline",
    "torch.compile",
    "torch.distributed.run.main",
    "torch.nn.os.system",
    "torch.nn.modules.module.warnings.os.system",
    "torch.nn.modules.module.functools.partial",
    "torch.nn.modules.module.itertools.chain",
    "torch.nn.modules.module.torch.load",
    "torch.nn.torch.hub.load",
    "torch.optim.lr_scheduler.types.FunctionType",
    "torch.optim.lr_scheduler.partial",
    "torch.optim.lr_scheduler.warnings.warn",
    "torch.optim.optimizer.functools.partial",
    "torch.nn.Module.__init__.__globals__",
    "torch.nn.Module.__class__",
    "torch.nn.Module.__subclasses__",
    "torch.nn.Module.load_state_dict",
    "torch.nn.Linear.forward.__globals__.get",
    "torchao.float8.torch.load",
    "transformers.os.system",
    "transformers.pipeline",
    "transformers.Trainer",
    "transformers.dynamic_module_utils.get_class_from_dynamic_module",
    "transformers.utils.import_utils.importlib.import_module",
    "transformers.utils.hub.subprocess.run",
    "torchtune_cp.cli.main.main",
    "torchtune_cp.cli.run.run_command",
    "torchtune_cp.cli.cp.shutil.copyfile",
    "torchtune_cp.config.instantiate",
    "torchtune_cp.config.allow.trust_folder",
    "torchtune_cp.quickstart.main",
    "torchtune_cp.data.loader.torch.load",
    "torchtune_cp.datasets.source.Path.write_text",
    "torchtune_cp.checkpointing.folder.json.load",
    "torchtune_cp.checkpointing.folder.Path",
    "torchtune_cp.data.tokenizer.Path.unlink",
    # This project's functions and classes that are no components, and the ways to one through another.
    "torchtune_cp.durable.delete_hidden",
    "torchtune_cp.durable.shutil.rmtree",
    "torchtune_cp.checkpointing.save_hf_folder",
    "torchtune_cp.checkpointing.FullModelHFCheckpointer.save_final",
    "torchtune_cp.checkpointing.hf_checkpointer.FullModelHFCheckpointer.__init__",
    "torchtune_cp.metrics.MetricsFile",
    "torchtune_cp.metrics.jsonl.MetricsFile",
    "torchtune_cp.metrics.run_notes.RunNotes",
    "torchtune_cp.metrics.text_loggers.DiskLogger.log_config",
    "torchtune_cp.data.HFTokenizer",
    "torchtune_cp.data.HFTokenizer.save",
    "torchtune_cp.data.family_tokenizers.load_tokenizer",
    "torchtune_cp.data.hf_tokenizer.__globals__.get",
    "torchtune_cp.datasets.PackedDataset",
    "torchtune_cp.datasets.source.load_rows",
    "torchtune_cp.datasets.token_store.stored_tokens",
    "torchtune_cp.models.depth.first_layers",
    "torchtune_cp.models.model_from_hf_config",
    "torchtune_cp.training.profiler.Path",
    "torchtune_cp.training.resume.TrainingProgress",
    "torchtune_cp",
    "torchtune_cp.data",
    # Of the big packages what is no optimizer or schedule, and those that call what they are given.
    "torch.nn.Linear",
    "torch.nn.CrossEntropyLoss",
    "torch.optim.Optimizer",
    "torch.optim.SGD.load_state_dict",
    "torch.optim.swa_utils.AveragedModel",
    "torch.optim.lr_scheduler.LambdaLR",
    "torch.optim.lr_scheduler.MultiplicativeLR",
    "torch.optim.lr_scheduler.SequentialLR",
    "torchao.optim.CPUOffloadOptimizer",
    "torchao.float8.convert_to_float8_training",
    "transformers.AutoTokenizer.from_pretrained",
    "transformers.AutoModelForCausalLM.from_config",
    "transformers.LlamaForCausalLM",
    "transformers.models.auto.modeling_auto.AutoModelForCausalLM.from_pretrained",
    "transformers.optimization.get_scheduler",
    "transformers.optimization.torch.load",
    "functools.partial",
    "datasets.load_dataset",
    "huggingface_hub.snapshot_download",
    "wandb.init",
]


@pytest.mark.parametrize("path", ESCAPES)
@pytest.mark.parametrize("key", ["loss", "a_key_of_my_own", "collate_fn"])
def test_a_config_cannot_name_what_is_no_component(path: str, key: str) -> None:
    node = OmegaConf.create({key: {"_component_": path, "x": "touch /tmp/escaped"}})[key]
    for use in (instantiate, component_callable):
        with pytest.raises(ConfigError) as caught:
            use(node)
        assert f"{key}._component_" in str(caught.value)
    with pytest.raises(ConfigError):
        component_callable(path, key)


def test_a_refused_package_is_not_even_imported() -> None:
    sys.modules.pop("antigravity", None)
    with pytest.raises(ConfigError, match="TUNE_ALLOW_COMPONENTS=antigravity"):
        get_component("antigravity.webbrowser.open")
    assert "antigravity" not in sys.modules


def test_the_optimizers_and_schedules_of_the_big_packages_are_reached() -> None:
    import transformers

    assert get_component("torch.optim.AdamW") is torch.optim.AdamW
    assert get_component("torch.optim.adamw.AdamW") is torch.optim.AdamW
    assert get_component("torch.optim.lr_scheduler.StepLR") is torch.optim.lr_scheduler.StepLR
    assert get_component("torchao.optim.AdamW8bit").__name__ == "AdamW8bit"
    assert get_component("transformers.Adafactor") is transformers.Adafactor
    for path in ("transformers", "transformers.optimization"):
        found = get_component(f"{path}.get_linear_schedule_with_warmup")
        assert found is transformers.get_linear_schedule_with_warmup


def test_the_user_can_allow_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(allow.ALLOW_VARIABLE, "fractions, collections")
    assert str(instantiate({"_component_": "fractions.Fraction", "numerator": 3})) == "3"
    monkeypatch.setenv(allow.ALLOW_VARIABLE, "fraction")
    with pytest.raises(ConfigError, match="refused"):
        get_component("fractions.Fraction")


def test_modules_beside_a_recipe_of_ones_own_are_allowed_and_nothing_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allow, "_trusted_folders", [])
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_parts.py").write_text("import os\ndef three():\n    return 3\n")
    site = tmp_path / ".venv" / "site-packages"
    site.mkdir(parents=True)
    (site / "stranger_parts.py").write_text("def three():\n    return 3\n")
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(ConfigError, match="refused"):
        get_component("my_parts.three")
    allow.trust_folder(tmp_path)
    assert instantiate({"_component_": "my_parts.three"}) == 3
    for path in ("my_parts.os.system", "stranger_parts.three", "os.system"):
        with pytest.raises(ConfigError, match="refused"):
            get_component(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("torchtune.training.FullModelMetaCheckpointer", "FullModelHFCheckpointer"),
        ("torchtune.training.metric_logging.CometLogger", "WandBLogger"),
        ("torchtune.models.llama3.lora_llama3_8b", "only full fine-tuning"),
        ("torchtune.models.llama3.qlora_llama3_8b", "only full fine-tuning"),
        ("torchtune.models.llama3_2_vision.llama3_2_vision_11b", "only text models"),
        (
            "torchtune.models.gemma2.gemma2_9b",
            "family gemma2 are not supported; supported are llama2,",
        ),
        ("torchtune.models.phi3.phi3_mini_tokenizer", "family phi3 are not supported"),
        ("torchtune.models.mistral.mistral_reward_7b", "only language models"),
        ("torchtune.models.llama3.llama3_9b", "did you mean torchtune.models.llama3.llama3_"),
        ("torchtune.datasets.samsum_dataset", "instruct_dataset"),
        ("torchtune.rlhf.loss.DPOLoss", "only supervised"),
        ("torchtune.models.llama4.decoder_only_tp_plan", "tensor_parallel_plan=null"),
    ],
)
def test_a_torchtune_name_without_equivalent_is_refused_with_what_to_use(
    name: str, said: str
) -> None:
    with pytest.raises(ConfigError, match="has no equivalent in torchtune_cp") as caught:
        get_component(name)
    assert said in str(caught.value)
    assert "torchtune" not in sys.modules
