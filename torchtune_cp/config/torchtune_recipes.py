"""Detects configs of torchtune recipes that this project does not have.

Such a config is reported as such, instead of as a list of unknown keys.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtune_cp.config.locate import TORCHTUNE_RECIPES, recipe_names
from torchtune_cp.config.overrides import COMPONENT

#: A launch command in a config's comments: its recipe and its config.
LAUNCH_COMMAND = re.compile(r"^#\s*tune run\b.*?([\w./-]+)\s+--config\s+(\S+)", re.MULTILINE)

#: What does the same here as a recipe of another name.
_DOES_THE_SAME = {"full_finetune_single_device": "full_finetune_distributed, with one process,"}


@dataclass(frozen=True)
class _Sign:
    """A sign of a recipe: one of the top-level keys, or a part of a component's or argument's name."""

    recipes: tuple[str, ...]
    keys: tuple[str, ...] = ()
    names: str | None = None
    unless: tuple[str, ...] = ()


_LORA = r"(\.|^)(q?lora|q?dora)_|\.peft\.|(^|\.)(apply_lora_to_\w+|use_dora)$"
_TRAINING = ("optimizer", "dataset")

# The first sign found decides: an extension of another recipe comes before it.
_SIGNS = (
    _Sign(
        ("knowledge_distillation_distributed", "knowledge_distillation_single_device"),
        ("teacher_model", "teacher_checkpointer", "kd_loss", "kd_ratio"),
        r"KL(WithChunkedOutput)?Loss$",
    ),
    _Sign(
        ("ppo_full_finetune_single_device",),
        ("policy_model", "reward_and_value_model", "ref_policy_checkpointer", "ppo_batch_size"),
        r"\.PPOLoss$",
    ),
    _Sign(
        (
            "dev/grpo_full_finetune_distributed",
            "dev/async_grpo_full_finetune_distributed",
        ),
        ("grpo_samples", "orchestration", "reward_functions"),
        r"\.GRPO\w*Loss$",
    ),
    _Sign(
        ("dev/early_exit_finetune_distributed",),
        ("early_exit_loss", "layer_dropout"),
    ),
    _Sign(
        ("lora_dpo_distributed", "lora_dpo_single_device", "full_dpo_distributed"),
        ("ref_checkpointer", "reference_model"),
        r"\.(DPO|RSO|SimPO)Loss$|\.(preference|hh_rlhf_helpful|stack_exchange_paired)_dataset$",
    ),
    _Sign(
        ("qat_distributed", "qat_single_device"), ("fake_quant_after_n_steps",), r"QATQuantizer$"
    ),
    _Sign(("eleuther_eval",), ("tasks",), unless=_TRAINING),
    _Sign(
        ("generate", "dev/generate_v2", "dev/generate_v2_distributed"),
        ("prompt", "max_new_tokens"),
        unless=_TRAINING,
    ),
    _Sign(("quantize",), ("quantizer",), r"\.quantization\.", unless=_TRAINING),
    _Sign(("qat_distributed", "qat_single_device"), ("quantizer",), r"\.quantization\."),
    _Sign(
        (
            "lora_finetune_distributed",
            "lora_finetune_single_device",
            "dev/lora_finetune_distributed_multi_dataset",
        ),
        ("save_adapter_weights_only",),
        _LORA,
    ),
)
# With LoRA as well it is another recipe.
_WITH_LORA = {
    "full_dpo_distributed": ("lora_dpo_distributed", "lora_dpo_single_device"),
    "qat_distributed": ("qat_lora_finetune_distributed",),
}


def recipe_in_comments(text: str) -> str | None:
    """Return the first recipe that a launch command in a config's comments names."""
    found = LAUNCH_COMMAND.search(text)
    return found.group(1) if found else None


def other_recipe_problem(tree: Mapping[str, Any], text: str = "") -> str | None:
    """Say for which of torchtune's recipes a config is, when that is not here.

    Args:
        tree: The config as plain containers; interpolations need not be resolved.
        text: The config file, whose comments may name the recipe.

    Returns:
        One line, or None where nothing in the config belongs to such a recipe.
    """
    found = _recipes_by_signs(tree)
    if found is None:
        return None
    recipes, sign = found
    named = recipe_in_comments(text)
    recipe = named if named in recipes else recipes[0]
    if recipe in recipe_names():
        return None
    return not_here(recipe, f" (it has {sign})")


def not_here(recipe: str, why: str = "") -> str:
    """Say that a config's recipe is one of torchtune's, and what there is."""
    instead = _DOES_THE_SAME.get(recipe)
    does_the_same = f"; {instead} does the same" if instead else ""
    return (
        f"this config is for torchtune's recipe {recipe}, which is not here{why}"
        f"; available: {', '.join(recipe_names())}{does_the_same}"
    )


def is_not_here(recipe: str | None) -> bool:
    """Whether a name is that of a torchtune recipe which is not shipped."""
    return recipe in TORCHTUNE_RECIPES and recipe not in recipe_names()


def _recipes_by_signs(tree: Mapping[str, Any]) -> tuple[tuple[str, ...], str] | None:
    names = list(_names(tree))
    lora = _first(names, re.compile(_LORA).search) or (
        "save_adapter_weights_only" if "save_adapter_weights_only" in tree else None
    )
    for sign in _SIGNS:
        if any(tree.get(key) is not None for key in sign.unless):
            continue
        by_name = _first(names, re.compile(sign.names).search) if sign.names else None
        # null asks for nothing
        key = next((key for key in sign.keys if tree.get(key) is not None), None)
        if key is None and by_name is None:
            continue
        recipes = sign.recipes
        for full, with_lora in _WITH_LORA.items():
            if full in recipes:
                recipes = with_lora if lora else (full, *(r for r in recipes if "lora" not in r))
        return tuple(dict.fromkeys(recipes)), key or str(by_name)
    return None


def _first(names: Sequence[str], matches: Callable[[str], Any]) -> str | None:
    return next((name for name in names if matches(name)), None)


def _names(value: Any) -> Iterator[str]:
    """Every component's path and the names of its arguments, at any depth."""
    if isinstance(value, Mapping):
        path = value.get(COMPONENT)
        if isinstance(path, str):
            yield path
            yield from (str(name) for name in value if value[name] not in (None, False))
        for child in value.values():
            yield from _names(child)
    elif isinstance(value, list):
        for child in value:
            yield from _names(child)
    elif isinstance(value, str) and value.startswith("torchtune."):
        yield value
