"""The typed config of each recipe: every key, its type, its range and its default.

A config is checked as a whole and all problems are reported together. What a dataclass field cannot
express (ranges, choices, what the recipe passes to a component) is in the field's metadata.
"""

import math
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_cp.config.argument_types import TYPE_NAMES
from torchtune_cp.config.combinations import combination_problems
from torchtune_cp.config.context_parallel_rules import METHODS, ROTATE_METHODS
from torchtune_cp.config.environment import Origin, Path, from_environment, hide_in_problem
from torchtune_cp.config.instantiate import value_problems
from torchtune_cp.config.overrides import COMPONENT, is_dotted_path
from torchtune_cp.config.secrets import forget, mask_secrets, secret_variables
from torchtune_cp.did_you_mean import did_you_mean
from torchtune_cp.errors import ConfigError


@dataclass(frozen=True)
class Rule:
    """What a key's type does not express.

    Attributes:
        low: The smallest value allowed.
        high: The largest value allowed: far above any that makes sense, so that a slip of the pen is
            refused and not computed with.
        above: A bound that the value must exceed.
        also: Values allowed besides the range (-1 for "infer").
        choices: The only values allowed; strings match in any case.
        spellings: Other spellings of a value, and their meaning.
        filled: Whether a string must not be empty.
        positional: How many positional arguments the recipe gives to this component.
        supplied: The keyword arguments that the recipe gives to this component.
    """

    low: int | None = None
    high: int = 10**12
    above: float | None = None
    also: tuple[Any, ...] = ()
    choices: tuple[str, ...] | None = None
    spellings: tuple[tuple[str, Any], ...] = ()
    filled: bool = False
    positional: int = 0
    supplied: tuple[str, ...] = ()


_AtLeastOne = Rule(low=1)
_Filled = Rule(filled=True)
_Size = Rule(low=1, high=2**31)  # of a batch or of a part of one
_Degree = Rule(low=1, high=2**20)  # ranks
_Seconds = 10**9
_OtherDtypeNames = (
    ("float32", "fp32"),
    ("torch.float32", "fp32"),
    ("bfloat16", "bf16"),
    ("torch.bfloat16", "bf16"),
)


def _default_loss() -> DictConfig:
    return OmegaConf.create({COMPONENT: "torchtune_cp.training.loss.LinearCrossEntropyLoss"})


@dataclass(kw_only=True)
class FullFinetuneConfig:
    """Config of `full_finetune_distributed`; the keys are torchtune's.

    Components stay config nodes (`{_component_: dotted.path, ...}`) that the recipe instantiates.
    """

    # Which values came from the environment; without an annotation, for it is no key.
    from_environment = MappingProxyType[Path, Origin]({})

    # What is trained, on what, and where it is written
    output_dir: Annotated[str, _Filled]
    overwrite: bool = False
    model: DictConfig
    tokenizer: DictConfig
    checkpointer: DictConfig
    dataset: Annotated[DictConfig | ListConfig, Rule(positional=1)]
    dataset_val: Annotated[DictConfig | ListConfig | None, Rule(positional=1)] = None
    collate_fn: DictConfig | str = "torchtune_cp.data.collate"
    seed: Annotated[int | None, Rule(low=0, high=2**32 - 1)] = 0  # what NumPy takes
    shuffle: bool = True

    # The length of the run
    batch_size: Annotated[int, _Size] = 1
    batch_size_val: Annotated[int | None, _Size] = None
    epochs: Annotated[int, _AtLeastOne] = 1
    max_steps_per_epoch: Annotated[int | None, _AtLeastOne] = None
    gradient_accumulation_steps: Annotated[int, _Size] = 1
    run_val_every_n_steps: Annotated[int | None, _AtLeastOne] = None

    # Optimisation
    optimizer: Annotated[DictConfig, Rule(positional=1)]
    optimizer_in_bwd: bool = False
    optimizer_on_host: bool = False
    lr_scheduler: Annotated[
        DictConfig | None, Rule(positional=1, supplied=("num_training_steps",))
    ] = None
    loss: DictConfig = field(default_factory=_default_loss)
    clip_grad_norm: Annotated[float | None, Rule(above=0, spellings=(("inf", float("inf")),))] = (
        None
    )
    on_nonfinite: Annotated[str, Rule(choices=("skip", "raise"))] = "raise"

    # Device, precision, compilation
    device: Annotated[str, Rule(choices=("cuda", "cpu"))] = "cuda"
    dtype: Annotated[str, Rule(choices=("bf16", "fp32"), spellings=_OtherDtypeNames)] = "bf16"
    compile: bool | DictConfig = False
    enable_fp8_training: bool = False
    fp8_recipe_name: Annotated[
        str | None, Rule(choices=("tensorwise", "rowwise", "rowwise_with_gw_hp"))
    ] = None
    fp8_emulate: bool = False

    # The mesh
    context_parallel_dim: Annotated[int, _Degree] = 1
    context_parallel_rotate_method: Annotated[str, Rule(choices=ROTATE_METHODS)] = "allgather"
    context_parallel_method: Annotated[str, Rule(choices=METHODS)] = "ring"
    context_parallel_ulysses_dim: Annotated[int | None, _Degree] = None
    tensor_parallel_dim: Annotated[int, _Degree] = 1
    tensor_parallel_plan: Annotated[DictConfig | None, Rule(positional=1)] = None
    data_parallel_shard_dim: Annotated[int, Rule(low=1, high=2**20, also=(-1,))] = -1
    data_parallel_replicate_dim: Annotated[int, _Degree] = 1

    # Sharding and memory
    fsdp_cpu_offload: bool = False
    fsdp_reshard_after_forward: bool = True
    custom_sharded_layers: list[str] | None = None
    enable_activation_checkpointing: bool = False
    enable_activation_offloading: bool = False
    mlp_tile_tokens: Annotated[int | None, _AtLeastOne] = None
    attention_head_chunks: Annotated[int | None, _AtLeastOne] = None
    ac_mode: Annotated[str | None, Rule(choices=("none", "full", "selective"))] = None
    ac_option: Annotated[int | str | None, _AtLeastOne] = None

    # Checkpoints
    resume_from_checkpoint: Annotated[bool | str, _Filled] = False
    save_every_n_steps: Annotated[int | None, _AtLeastOne] = None
    save_every_epoch: bool = True
    enable_async_checkpointing: bool = False
    keep_last_n: Annotated[int | None, _AtLeastOne] = None
    keep_best: bool = False
    on_save_error: Annotated[str, Rule(choices=("raise", "continue"))] = "raise"

    # Signals and failing ranks
    collective_timeout_s: Annotated[float, Rule(above=0, high=_Seconds)] = 600.0
    stop_grace_s: Annotated[float, Rule(low=0, high=_Seconds)] = 300.0

    # What the run reports
    metric_logger: DictConfig | None = None
    log_every_n_steps: Annotated[int, _AtLeastOne] = 1
    log_peak_memory_stats: bool = False
    log_level: Annotated[
        str,
        Rule(choices=("DEBUG", "INFO", "WARNING", "ERROR"), spellings=(("WARN", "WARNING"),)),
    ] = "INFO"
    profiler: DictConfig | None = None


def _default_masking() -> DictConfig:
    return OmegaConf.create({COMPONENT: "torchtune_cp.data.mlm_masking"})


@dataclass(kw_only=True)
class MaskedLMConfig(FullFinetuneConfig):
    """Config of `esm2_mlm_distributed`: the keys of `FullFinetuneConfig` and these."""

    # How samples become batches
    masking: Annotated[DictConfig, Rule(positional=1, supplied=("seed",))] = field(
        default_factory=_default_masking
    )
    sequence_format: Annotated[str, Rule(choices=("thd", "bshd"))] = "thd"
    token_micro_batch_size: Annotated[int | None, _AtLeastOne] = None
    oversize: Annotated[str, Rule(choices=("error", "split", "drop"))] = "error"
    packing_strategy: Annotated[str, Rule(choices=("greedy", "best_fit"))] = "greedy"
    num_workers: Annotated[int, Rule(low=0, high=1024)] = 0

    # What data-parallel ranks share
    data_parallel: Annotated[str, Rule(choices=("fsdp", "ddp"))] = "fsdp"


# Keys of older torchtune configs that name nothing here, with the values that ask for nothing.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "cudnn_deterministic_mode": (None,),
    "memory_efficient_fsdp_wrap": (False, True),
    "resize_token_embeddings": (False, None),
}

# Mapping-valued keys that need not be components.
_COMPILE_PARTS = ("model", "loss", "optimizer_step", "scale_grads")
_PROFILER = "torchtune_cp.training.profiler.setup_torch_profiler"

_REFERENCE = re.compile(r"\$\{\s*([A-Za-z_]\w*)")


def validate(
    cfg: DictConfig,
    schema: type[FullFinetuneConfig] = FullFinetuneConfig,
    world_size: int | None = None,
) -> list[str]:
    """Return every problem of a config, one line each; an empty list when it can be run.

    Args:
        cfg: The config, interpolations unresolved.
        schema: The recipe's config class.
        world_size: The number of processes of the run, None while it is not known.
    """
    return _check(cfg, schema, world_size)[1]


def to_typed(
    cfg: DictConfig,
    schema: type[FullFinetuneConfig] = FullFinetuneConfig,
    world_size: int | None = None,
) -> FullFinetuneConfig:
    """Turn a config into the recipe's typed one: resolved, checked, defaults filled in.

    `batch_size_val` becomes `batch_size` where it is not given.

    Raises:
        ConfigError: With every problem found.
    """
    values, problems = _check(cfg, schema, world_size)
    if problems:
        raise ConfigError(problems)
    # One root, so that each component node knows its key for messages.
    root = OmegaConf.create({k: v for k, v in values.items() if isinstance(v, (dict, list))})
    typed = schema(**{k: root[k] if isinstance(v, dict) else v for k, v in values.items()})
    for name in ("dataset", "dataset_val"):
        if isinstance(values[name], list):
            setattr(typed, name, root[name])
    origins = from_environment(cfg)
    if typed.batch_size_val is None:
        typed.batch_size_val = typed.batch_size
        if ("batch_size",) in origins:
            origins["batch_size_val",] = origins["batch_size",]
    object.__setattr__(typed, "from_environment", origins)
    return typed


def component_problems(cfg: FullFinetuneConfig) -> list[str]:
    """Compare every component's argument names with its signature; nothing is built.

    Args:
        cfg: The typed config.

    Returns:
        One line a problem: paths that do not exist or are refused, unknown arguments with the
        nearest name, missing ones.
    """
    keys = list(_keys(type(cfg)))
    values = {key.name: getattr(cfg, key.name) for key in keys}
    return _component_problems(values, keys, cfg.from_environment)


def check(
    cfg: DictConfig,
    schema: type[FullFinetuneConfig] = FullFinetuneConfig,
    world_size: int | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Check a config's keys and components in one pass; nothing is built.

    Args:
        cfg: The config, interpolations unresolved.
        schema: The recipe's config class.
        world_size: The number of processes of the run, None while it is not known.

    Returns:
        The resolved values as plain containers, defaults filled in, without those that have a
        problem; and every problem, one line each, as `validate` and `component_problems`
        give them.
    """
    values, problems = _check(cfg, schema, world_size)
    return values, problems + _component_problems(
        values, list(_keys(schema)), from_environment(cfg)
    )


def _component_problems(
    values: Mapping[str, Any], keys: list["_Key"], origins: Mapping[Path, Origin]
) -> list[str]:
    problems = []
    for key in keys:
        value = values.get(key.name)
        if key.name == "collate_fn" and value is not None:
            # Called by the loader with the samples, not built by the recipe.
            problems += value_problems(value, key.name, positional=1)
        elif isinstance(value, (dict, list, DictConfig, ListConfig)) and key.is_component:
            problems += value_problems(
                value, key.name, positional=key.rule.positional, supplied=key.rule.supplied
            )
    return [hide_in_problem(problem, origins) for problem in problems]


def resolved_dict(cfg: FullFinetuneConfig | DictConfig) -> dict[str, Any]:
    """Return the whole config as plain containers, resolved, without its secrets: what is logged."""
    if isinstance(cfg, DictConfig):
        tree = mask_secrets(cfg)
    else:
        values = {spec.name: getattr(cfg, spec.name) for spec in fields(cfg)}
        tree = mask_secrets(values, cfg.from_environment)
    assert isinstance(tree, dict)
    return tree


def resolved_yaml(cfg: FullFinetuneConfig | DictConfig) -> str:
    """Return `resolved_dict` as YAML; loading it gives the same run again."""
    return OmegaConf.to_yaml(OmegaConf.create(resolved_dict(cfg)))


@dataclass(frozen=True)
class _Key:
    """One key of a schema: its name, the types it accepts, its rule, its default if it has one."""

    name: str
    accepted: tuple[Any, ...]
    rule: Rule
    required: bool
    default: Any

    @property
    def is_component(self) -> bool:
        """Whether a mapping here is a component (`compile` takes a mapping of switches)."""
        return DictConfig in self.accepted and self.name != "compile"


def _keys(schema: type[FullFinetuneConfig]) -> Iterator[_Key]:
    hints = get_type_hints(schema, include_extras=True)
    for spec in fields(schema):
        hint, rule = hints[spec.name], Rule()
        if get_origin(hint) is Annotated:
            hint, rule = get_args(hint)
        default = spec.default
        if spec.default_factory is not MISSING:
            default = _plain(spec.default_factory())
        yield _Key(spec.name, _accepted(hint), rule, default is MISSING, default)


def _check(
    cfg: DictConfig, schema: type[FullFinetuneConfig], world_size: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the resolved values with defaults (those without a problem) and all problems."""
    keys = list(_keys(schema))
    origins = from_environment(cfg)
    problems = list(_unknown_keys(cfg, [key.name for key in keys]))
    problems += naming_problems(origins)
    values: dict[str, Any] = {}
    given = set(cfg.keys())  # "in cfg" would leave out keys whose value is ???
    for key in keys:
        if key.name not in given:
            if key.required:
                problems.append(f"{key.name}: is missing")
            else:
                values[key.name] = key.default
            continue
        try:
            value = _plain(cfg._get_node(key.name))
        except OmegaConfBaseException as error:
            problems.append(_resolution_problem(key.name, error, cfg))
            continue
        checked, found = _checked(key.name, value, key.accepted, key.rule)
        problems += (hide_in_problem(problem, origins) for problem in found)
        if isinstance(checked, str) and checked in (key.rule.choices or ()):
            forget(str(value))
        if not found:
            values[key.name] = checked
    problems += _adopt_keep_last_n(values)
    problems += combination_problems(values, world_size)
    return values, problems


def _adopt_keep_last_n(values: dict[str, Any]) -> list[str]:
    """Take `keep_last_n` from the checkpointer, which has it in torchtune."""
    given = (values.get("checkpointer") or {}).get("keep_last_n_checkpoints")
    if given is None or "keep_last_n" not in values:
        return []
    if values["keep_last_n"] not in (None, given):
        return [
            f"checkpointer.keep_last_n_checkpoints: {given} contradicts keep_last_n="
            f"{values['keep_last_n']}, which means the same: set one of them"
        ]
    values["keep_last_n"] = given
    return []


# Keys whose values become the names of folders, files and runs.
_NAMING_KEYS = (
    *("output_dir", "log_dir", "dir", "filename", "project", "entity", "id"),
    *("resume_from", "fork_from", "x_label"),
)


def naming_problems(origins: Mapping[Path, Origin]) -> Iterator[str]:
    """Refuse variables whose value everybody could read as the name of a folder, a file or a run.

    Args:
        origins: See `torchtune_cp.config.environment.from_environment`.
    """
    for path, origin in origins.items():
        names = secret_variables(origin)
        if names and (path[-1] in _NAMING_KEYS or _names_something(origin.value)):
            key = ".".join(map(str, path))
            yield (
                f"{key}: holds the value of {' and '.join(names)}, and everybody can"
                " read the names of folders and runs; a variable may stand here that holds an absolute"
                " path on this machine, or one such as USER, SLURM_JOB_ID, WANDB_PROJECT; on the command"
                f' line the shell fills in others: {key}="...${names[0]}"'
            )


def _names_something(value: Any) -> bool:
    if isinstance(value, dict):
        return any(key in _NAMING_KEYS or _names_something(item) for key, item in value.items())
    return isinstance(value, list) and any(map(_names_something, value))


def _plain(node: Any) -> Any:
    if OmegaConf.is_config(node):
        if node._is_interpolation() or node._is_missing() or node._is_none():
            node = node._dereference_node()
            return None if node is None or node._is_none() else _plain(node)
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    if hasattr(node, "_dereference_node"):
        if node._is_missing():
            raise OmegaConfBaseException("??? is used where a value is required")
        target = node._dereference_node()
        return _plain(target) if OmegaConf.is_config(target) else target._value()
    return node


def _resolution_problem(name: str, error: OmegaConfBaseException, cfg: DictConfig) -> str:
    first_line = str(error).splitlines()[0]
    missing = re.search(r"Interpolation key '([^']+)'", first_line)
    hint = did_you_mean(missing.group(1), [str(k) for k in cfg]) if missing else ""
    where = getattr(error, "full_key", None) or name
    return f"{where}: {first_line}{hint}"


def _unknown_keys(cfg: DictConfig, known: list[str]) -> Iterator[str]:
    referenced = set(_references(OmegaConf.to_container(cfg, resolve=False)))
    for key in map(str, cfg):
        if key in known or key in referenced:
            continue  # a key that ${key} refers to is the user's own variable
        if key in _WITHOUT_EFFECT:
            value = cfg._get_node(key)
            if _plain(value) in _WITHOUT_EFFECT[key]:
                continue
            off = " or ".join(map(repr, _WITHOUT_EFFECT[key]))
            yield f"{key}: {_plain(value)!r} has no equivalent here; remove it or set it to {off}"
            continue
        yield f"{key}: unknown key{did_you_mean(key, known)}"


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for child in value.values():
            yield from _references(child)
    elif isinstance(value, list):
        for child in value:
            yield from _references(child)
    elif isinstance(value, str):
        yield from _REFERENCE.findall(value)


def _accepted(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(get_origin(h) or h for h in get_args(hint))
    return (get_origin(hint) or hint,)


_TYPE_NAMES = {
    **TYPE_NAMES,
    list: "a list of strings",
    DictConfig: f"a component {{{COMPONENT}: dotted.path, ...}}",
    ListConfig: "a list of components",
}


def _checked(name: str, value: Any, accepted: tuple[Any, ...], rule: Rule) -> tuple[Any, list[str]]:
    """Return the value in its final spelling, and its problems."""
    if isinstance(value, str):
        same = {choice.lower(): choice for choice in rule.choices or ()}
        same |= {spelling.lower(): meaning for spelling, meaning in rule.spellings}
        value = same.get(value.lower(), value)
    if DictConfig in accepted and str not in accepted and is_dotted_path(value):
        value = {COMPONENT: value}
    if name == "profiler" and isinstance(value, dict):
        value = {COMPONENT: _PROFILER, **value}
    if isinstance(value, int) and not isinstance(value, bool) and int not in accepted:
        value = _as_float(value) if float in accepted else value
    if not _fits(value, accepted):
        expected = " or ".join(_TYPE_NAMES[kind] for kind in accepted)
        return value, [f"{name}: expected {expected}, got {value!r}"]
    if isinstance(value, dict):
        return value, _mapping_problems(name, value) + list(_endless_numbers(name, value))
    if isinstance(value, list) and list not in accepted:
        return value, [
            p
            for i, item in enumerate(value)
            for p in _checked(f"{name}.{i}", item, (DictConfig,), Rule())[1]
        ] or ([f"{name}: the list is empty"] if not value else [])
    return value, _range_problems(name, value, rule)


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def _fits(value: Any, accepted: tuple[Any, ...]) -> bool:
    if isinstance(value, dict):
        return DictConfig in accepted
    if isinstance(value, list):
        if list in accepted:
            return all(isinstance(item, str) for item in value)
        return ListConfig in accepted
    # bool is an int for Python, not for a user: type() distinguishes them.
    return type(value) in accepted


def _mapping_problems(name: str, value: dict[Any, Any]) -> list[str]:
    if name == "compile":
        return [
            f"compile.{key}: unknown key{did_you_mean(str(key), _COMPILE_PARTS)}"
            f" (allowed: {', '.join(_COMPILE_PARTS)})"
            if key not in _COMPILE_PARTS
            else f"compile.{key}: expected true or false, got {part!r}"
            for key, part in value.items()
            if key not in _COMPILE_PARTS or not isinstance(part, bool)
        ]
    if not isinstance(value.get(COMPONENT), str):
        return [f"{name}: has no {COMPONENT}, the dotted path of what to build"]
    return []


# Arguments of components that are lengths of sequences: nothing can be that long.
_LENGTHS = ("max_seq_len", "seq_len", "pack_len")
_LONGEST = 2**32


def _endless_numbers(name: str, value: Any) -> Iterator[str]:
    """Problems of numbers among a component's arguments that no component can compute with."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _endless_numbers(f"{name}.{key}", item)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{name}: expected a finite number, got {value}"
    elif isinstance(value, int):
        most = _LONGEST if name.rpartition(".")[2] in _LENGTHS else 2**63 - 1
        if not -most <= value <= most:
            got = value if abs(value) < 10**30 else "far more"
            yield f"{name}: must be at most {most}, got {got}"


def _range_problems(name: str, value: Any, rule: Rule) -> list[str]:
    if value is None:
        return []
    if rule.filled and isinstance(value, str) and not value.strip():
        return [f"{name}: is empty"]
    if rule.choices is not None and value not in rule.choices:
        return [f"{name}: expected one of {', '.join(rule.choices)}, got {value!r}"]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value not in rule.also:
        also = "".join(f" or {other}" for other in rule.also)
        if value in (meaning for _, meaning in rule.spellings):
            return []
        if isinstance(value, float) and not math.isfinite(value):
            return [f"{name}: expected a finite number, got {value}"]
        if rule.low is not None and value < rule.low:
            return [f"{name}: must be at least {rule.low}{also}, got {value}"]
        if rule.above is not None and not value > rule.above:
            return [f"{name}: must be greater than {rule.above}{also}, got {value}"]
        if value > rule.high:
            got = value if value < 10**30 else "far more"
            return [f"{name}: must be at most {rule.high}{also}, got {got}"]
    return []
