"""torchtune's public component names and their equivalents here.

One explicit table: a name in it resolves to this project's equivalent, every other `torchtune.` name is
refused, naming the alternative. torchtune itself is never imported.
"""

import re

from torchtune_cp.did_you_mean import nearest
from torchtune_cp.errors import ConfigError

# Names that are called the same in both projects: torchtune module -> (our module, names).
_SAME_NAME: dict[str, tuple[str, tuple[str, ...]]] = {
    "torchtune.models.llama2": (
        "torchtune_cp.models.llama2",
        ("llama2", "llama2_7b", "llama2_13b", "llama2_70b"),
    ),
    "torchtune.models.llama3": (
        "torchtune_cp.models.llama3",
        ("llama3", "llama3_8b", "llama3_70b"),
    ),
    "torchtune.models.llama3_1": (
        "torchtune_cp.models.llama3_1",
        ("llama3_1", "llama3_1_8b", "llama3_1_70b", "llama3_1_405b"),
    ),
    "torchtune.models.llama3_2": (
        "torchtune_cp.models.llama3_2",
        ("llama3_2", "llama3_2_1b", "llama3_2_3b"),
    ),
    "torchtune.models.llama3_3": ("torchtune_cp.models.llama3_3", ("llama3_3_70b",)),
    "torchtune.models.mistral": ("torchtune_cp.models.mistral", ("mistral", "mistral_7b")),
    "torchtune.models.qwen2": (
        "torchtune_cp.models.qwen2",
        ("qwen2", "qwen2_0_5b", "qwen2_1_5b", "qwen2_7b"),
    ),
    "torchtune.models.qwen2_5": (
        "torchtune_cp.models.qwen2_5",
        (
            "qwen2_5_0_5b",
            "qwen2_5_1_5b_base",
            "qwen2_5_1_5b_instruct",
            "qwen2_5_3b",
            "qwen2_5_7b_base",
            "qwen2_5_7b_instruct",
            "qwen2_5_14b_base",
            "qwen2_5_14b_instruct",
            "qwen2_5_32b_base",
            "qwen2_5_32b_instruct",
            "qwen2_5_72b_base",
            "qwen2_5_72b_instruct",
        ),
    ),
    "torchtune.models.qwen3": (
        "torchtune_cp.models.qwen3",
        (
            "qwen3_0_6b_base",
            "qwen3_0_6b_instruct",
            "qwen3_1_7b_base",
            "qwen3_1_7b_instruct",
            "qwen3_4b_base",
            "qwen3_4b_instruct",
            "qwen3_8b_base",
            "qwen3_8b_instruct",
            "qwen3_14b_base",
            "qwen3_14b_instruct",
            "qwen3_32b",
        ),
    ),
    "torchtune.datasets": (
        "torchtune_cp.datasets",
        (
            "alpaca_cleaned_dataset",
            "alpaca_dataset",
            "chat_dataset",
            "instruct_dataset",
            "text_completion_dataset",
        ),
    ),
    "torchtune.training": (
        "torchtune_cp.checkpointing",
        ("FullModelHFCheckpointer",),
    ),
    "torchtune.training.checkpointing": (
        "torchtune_cp.checkpointing",
        ("FullModelHFCheckpointer",),
    ),
    "torchtune.training.lr_schedulers": (
        "torchtune_cp.training.lr_schedulers",
        ("get_cosine_schedule_with_warmup",),
    ),
    "torchtune.training.metric_logging": (
        "torchtune_cp.metrics",
        ("DiskLogger", "StdoutLogger", "TensorBoardLogger", "WandBLogger"),
    ),
}

_RENAMED: dict[str, str] = {
    "torchtune.models.llama3.base_llama_tp_plan": (
        "torchtune_cp.distributed.tensor_parallel.tensor_parallel_plan"
    ),
    # torchtune has one tokenizer class a model; here all of them read the folder's tokenizer.json.
    "torchtune.models.llama2.llama2_tokenizer": "torchtune_cp.data.llama2_tokenizer",
    "torchtune.models.llama3.llama3_tokenizer": "torchtune_cp.data.llama3_tokenizer",
    "torchtune.models.mistral.mistral_tokenizer": "torchtune_cp.data.mistral_tokenizer",
    "torchtune.models.qwen2.qwen2_tokenizer": "torchtune_cp.data.qwen2_tokenizer",
    "torchtune.models.qwen2_5.qwen2_5_tokenizer": "torchtune_cp.data.qwen2_5_tokenizer",
    "torchtune.models.qwen3.qwen3_tokenizer": "torchtune_cp.data.qwen3_tokenizer",
    "torchtune.data.padded_collate_sft": "torchtune_cp.data.collate",
    "torchtune.modules.loss.CEWithChunkedOutputLoss": (
        "torchtune_cp.training.loss.LinearCrossEntropyLoss"
    ),
    "torchtune.modules.loss.LinearCrossEntropyLoss": (
        "torchtune_cp.training.loss.LinearCrossEntropyLoss"
    ),
    "torchtune.training.get_cosine_schedule_with_warmup": (
        "torchtune_cp.training.lr_schedulers.get_cosine_schedule_with_warmup"
    ),
    "torchtune.training.setup_torch_profiler": (
        "torchtune_cp.training.profiler.setup_torch_profiler"
    ),
}

ALIASES: dict[str, str] = {
    **{
        f"{theirs}.{name}": f"{ours}.{name}"
        for theirs, (ours, names) in _SAME_NAME.items()
        for name in names
    },
    **_RENAMED,
}

#: torchtune's names of the families whose models are built here.
BUILT_FAMILIES = tuple(
    theirs.removeprefix("torchtune.models.")
    for theirs in _SAME_NAME
    if theirs.startswith("torchtune.models.")
)

_USE_AUTO_MODEL = (
    "torchtune_cp.models.auto_model with checkpoint_dir builds the model that a Hugging Face"
    " folder's config.json describes"
)
_USE_HF_CHECKPOINTER = (
    "use torchtune.training.FullModelHFCheckpointer with a folder in Hugging Face format"
    " (config.json and *.safetensors)"
)
_ONLY_FULL = "only full fine-tuning is available: use the builder without LoRA"
_OTHER_LOGGERS = "use WandBLogger, TensorBoardLogger, DiskLogger or StdoutLogger"

# Advice for names without an equivalent: the first fragment found in the name decides.
_INSTEAD: tuple[tuple[str, str], ...] = (
    (".lora_", _ONLY_FULL),
    (".qlora_", _ONLY_FULL),
    (".dora_", _ONLY_FULL),
    ("torchtune.modules.peft.", _ONLY_FULL),
    ("FullModelMetaCheckpointer", _USE_HF_CHECKPOINTER),
    ("FullModelTorchTuneCheckpointer", _USE_HF_CHECKPOINTER),
    ("DistributedCheckpointer", _USE_HF_CHECKPOINTER),
    ("_reward_", "only language models are available"),
    ("_classifier", "only language models are available"),
    ("CometLogger", _OTHER_LOGGERS),
    ("MLFlowLogger", _OTHER_LOGGERS),
    ("torchtune.training.quantization.", "quantisation is not available"),
    ("torchtune.rlhf.", "only supervised fine-tuning is available"),
    ("vision", "only text models are available"),
    ("torchtune.datasets.multimodal.", "only text datasets are available"),
    (
        "torchtune.datasets.",
        "use text_completion_dataset, chat_dataset or instruct_dataset with source=...",
    ),
    ("KLLoss", "use torchtune.modules.loss.LinearCrossEntropyLoss"),
    ("KLWithChunkedOutputLoss", "use torchtune.modules.loss.LinearCrossEntropyLoss"),
    ("torchtune.data.padded_collate", "use torchtune.data.padded_collate_sft"),
    ("tp_plan", "set tensor_parallel_plan=null: each model then has its own plan"),
)


def is_torchtune_name(path: str) -> bool:
    """Say whether a component path belongs to torchtune (`torchtune.x.y`)."""
    return path == "torchtune" or path.startswith("torchtune.")


def resolve(path: str) -> str:
    """Return this project's dotted path for a component path; other packages' paths are unchanged.

    Raises:
        ConfigError: A `torchtune.` name without an equivalent; the message names the alternative.
    """
    if not is_torchtune_name(path) or path in ALIASES:
        return ALIASES.get(path, path)
    raise ConfigError(f"{path} has no equivalent in torchtune_cp{_what_to_use(path)}")


def _what_to_use(path: str) -> str:
    for fragment, instead in _INSTEAD:
        if fragment in path:
            return f": {instead}"
    family = re.match(r"torchtune\.models\.(\w+)\.\w+", path)
    if family and family.group(1) not in BUILT_FAMILIES:
        # Not auto_model: it builds the same families.
        return (
            f": models of the family {family.group(1)} are not supported; supported are"
            f" {', '.join(BUILT_FAMILIES)}"
        )
    close = nearest(path, ALIASES)
    if close is not None and close.rpartition(".")[0] == path.rpartition(".")[0]:
        return f"; did you mean {close}?"
    if path.startswith("torchtune.models."):
        return f": {_USE_AUTO_MODEL}"
    return f"; did you mean {close}?" if close else ""
