"""All checks of a run that are possible before a process is started.

Keys, types, combinations and the components' signatures first; then each component that is cheap to
build is built with placeholders for what the run passes to it, because only the component knows what else it
refuses.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_cp.cli.model_files import model_files_problems
from torchtune_cp.config import allow, get_component, instantiate, schema, torchtune_names
from torchtune_cp.config.argument_checks import argument_errors, no_pack_length
from torchtune_cp.config.argument_types import parameters_of
from torchtune_cp.config.entry_point import one_line
from torchtune_cp.config.environment import from_environment, hide_in_problem
from torchtune_cp.config.instantiate import components_problems
from torchtune_cp.config.overrides import COMPONENT
from torchtune_cp.config.torchtune_recipes import (
    is_not_here,
    not_here,
    other_recipe_problem,
    recipe_in_comments,
)
from torchtune_cp.errors import ConfigError, NotFoundHereError, UserError

#: Constructors that do nothing but look at their arguments; others (of transformers, of the user's
#: own packages) may read, download or start something.
_CHEAP = ("torchtune_cp.", "torch.", "torchao.", "transformers.optimization.")
#: A run's length that no schedule exceeds, where the config does not set it.
_LONG = 10**9


@dataclass
class Findings:
    """What was found.

    Attributes:
        problems: Mistakes, one line each.
        not_here: What the config names and this machine does not have, one line each.
        notes: What may be meant, one line each.
    """

    problems: list[str] = field(default_factory=list)
    not_here: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def look_over(
    cfg: DictConfig,
    config_class: type[schema.FullFinetuneConfig] | None,
    world_size: int | None = None,
    *,
    text: str = "",
) -> Findings:
    """Check a config as a whole, in one pass over keys and components.

    Args:
        cfg: The config, interpolations unresolved.
        config_class: The recipe's config class; None for a recipe of the user that has none,
            of whose config only the components can be checked.
        world_size: The number of processes, None while it is not known.
        text: The config file; its comments may name another recipe.
    """
    if config_class is None:
        return _look_over_components(cfg)
    other = other_recipe_problem(OmegaConf.to_container(cfg, resolve=False), text)  # type: ignore[arg-type]
    if other is not None:
        return Findings([other])
    values, problems = schema.check(cfg, config_class, world_size)
    found = Findings(problems)
    _Trial(values, config_class, found).run()
    origins = from_environment(cfg)
    for lines in (found.problems, found.not_here, found.notes):
        lines[:] = [hide_in_problem(line, origins) for line in lines]
    named = recipe_in_comments(text)
    if is_not_here(named):
        assert named is not None
        (found.problems or found.notes).insert(0, not_here(named))
    return found


def warmup_notes(values: Mapping[str, Any]) -> list[str]:
    """Report a schedule's warm-up that takes the whole run, if the config determines its length."""
    steps, node = _most_steps(values), values.get("lr_scheduler")
    if steps is None or not isinstance(node, Mapping):
        return []
    return [
        f"lr_scheduler.{name}={value} is not shorter than the run, which has {steps} steps at most:"
        " the learning rate never reaches the optimizer's lr"
        for name, value in node.items()
        if "warmup" in str(name) and type(value) is int and value >= steps
    ]


def _most_steps(values: Mapping[str, Any]) -> int | None:
    per_epoch = values.get("max_steps_per_epoch")
    return None if per_epoch is None else int(per_epoch) * int(values.get("epochs", 1))


def _look_over_components(cfg: DictConfig) -> Findings:
    try:
        tree = OmegaConf.to_container(cfg, resolve=True)
    except Exception as error:  # noqa: BLE001  (what a resolver of the user raises)
        return Findings([one_line(error)])
    assert isinstance(tree, dict)
    problems = [*schema.naming_problems(from_environment(cfg)), *components_problems(tree)]
    found = Findings(problems)
    checkpointer = tree.get("checkpointer")
    if isinstance(checkpointer, dict) and COMPONENT in checkpointer and not found.problems:
        _Trial({"checkpointer": checkpointer}, None, found).run()
    return found


class _Trial:
    """Builds what a config describes, as far as that costs nothing and needs no run."""

    def __init__(
        self,
        values: Mapping[str, Any],
        config_class: type[schema.FullFinetuneConfig] | None,
        found: Findings,
    ) -> None:
        self._values = values
        self._config_class = config_class
        self._found = found

    def run(self) -> None:
        """Add what is found to the findings."""
        for key, value in self._values.items():
            for place, node in _nodes(key, value):
                self._ask(place, node)
        checkpointer = self._build("checkpointer")
        tokenizer = self._build("tokenizer")
        if tokenizer is not None:
            self._build("masking", tokenizer, seed=0)
            self._check_packing(tokenizer)
        self._check_loss(self._build("loss"))
        self._check_model(checkpointer, tokenizer)
        self._check_optimizer()
        self._found.notes += warmup_notes(self._values)

    def _ask(self, key: str, node: Mapping[str, Any]) -> None:
        with suppress(ConfigError):  # a path that does not lead anywhere has been reported
            component = get_component(node[COMPONENT], key)
            arguments = {str(name): value for name, value in node.items() if name != COMPONENT}
            for error in argument_errors(component, arguments):
                self._add(f"{key}.", error)

    def _add(self, prefix: str, error: UserError) -> None:
        lines = [f"{prefix}{line}" for line in one_line(error).splitlines()]
        if isinstance(error, NotFoundHereError):
            self._found.not_here += lines
        else:
            self._found.problems += [line for line in lines if line not in self._found.problems]

    def _node(self, key: str) -> dict[str, Any] | None:
        """A component without the arguments that have a problem; None when it is not to be tried."""
        node = self._values.get(key)
        if not isinstance(node, dict):
            return None
        reported = {line.partition(": ")[0] for line in self._found.problems}
        if reported & {key, f"{key}.{COMPONENT}"}:
            return None
        path = torchtune_names.resolve(node[COMPONENT])
        if not path.startswith(_CHEAP) or allow.allowed_by_user(path):
            return None
        left_out = {name for name in node if f"{key}.{name}" in reported}
        parameters = parameters_of(get_component(path)) or ()
        if any(p.name in left_out and p.default is p.empty for p in parameters):
            return None  # it cannot do without
        return {name: value for name, value in node.items() if name not in left_out}

    def _build(self, key: str, *given: Any, **supplied: Any) -> Any:
        """Build one component; None when it is refused, or not to be tried.

        An argument that is refused is left out of another try, so that no mistake hides the next.
        """
        node = self._node(key)
        while node is not None:
            try:
                return instantiate(OmegaConf.create({key: node})[key], *given, **supplied)
            except UserError as error:
                self._add("" if one_line(error).startswith(key) else f"{key}: ", error)
                return None
            except Exception as error:  # noqa: BLE001  (a library's own refusal, of any type)
                name = _to_blame(node, error, given, supplied)
                where, what = (key, "") if name is None else (f"{key}.{name}", f"{node[name]!r} ")
                self._found.problems.append(
                    f"{where}: {what}is refused by {node[COMPONENT]}: {one_line(error)}"
                )
                node = {n: v for n, v in node.items() if n != name} if name else None
        return None

    def _check_packing(self, tokenizer: Any) -> None:
        for key in ("dataset", "dataset_val"):
            for place, node in _nodes(key, self._values.get(key)):
                lengths = (node.get("max_seq_len"), getattr(tokenizer, "max_seq_len", 0))
                is_ours = torchtune_names.resolve(node[COMPONENT]).startswith("torchtune_cp.")
                if is_ours and node.get("packed") is True and lengths == (None, None):
                    self._found.problems.append(no_pack_length(place))

    def _check_loss(self, loss: Any) -> None:
        if loss is None:
            return
        import torch

        call = type(loss).forward if isinstance(loss, torch.nn.Module) else type(loss).__call__
        path = self._values["loss"][COMPONENT]
        if not _takes(call, 4) or path.startswith("torch.nn."):
            self._found.problems.append(
                f"loss: {path} cannot be used: a loss is called with (hidden, weight, labels), before the"
                " output projection, and returns the sum over label tokens; allowed:"
                " torchtune_cp.training.loss.LinearCrossEntropyLoss, which is the cross entropy"
            )

    def _check_model(self, checkpointer: Any, tokenizer: Any) -> None:
        import torch

        from torchtune_cp.config import module_problems, tensor_parallel_problems
        from torchtune_cp.models import TransformerDecoder, TransformerEncoder

        with torch.device("meta"):
            model = self._build("model")
        if model is None or self._config_class is None:
            return
        masked = issubclass(self._config_class, schema.MaskedLMConfig)
        kind = TransformerEncoder if masked else TransformerDecoder
        if not isinstance(model, kind):
            self._found.problems.append(
                f"model: {self._values['model'][COMPONENT]} builds a {type(model).__name__}; this"
                f" recipe trains a {kind.__name__}"
            )
            return
        if isinstance(model, TransformerDecoder):
            degree = self._values.get("tensor_parallel_dim", 1)
            if degree > 1:
                self._found.problems += tensor_parallel_problems(vars(model.config), degree)
        names = self._values.get("custom_sharded_layers") or ()
        self._found.problems += module_problems(names, dict(model.named_modules()))
        self._found.problems += model_files_problems(model, checkpointer, tokenizer)

    def _check_optimizer(self) -> None:
        import torch

        optimizer = self._build("optimizer", [torch.nn.Parameter(torch.zeros(1))])
        if not isinstance(optimizer, torch.optim.Optimizer):
            return
        lr = optimizer.defaults.get("lr")
        if isinstance(lr, float) and lr == float("inf"):
            self._found.problems.append("optimizer.lr: expected a finite number, got inf")
        steps = _most_steps(self._values) or _LONG
        self._build("lr_scheduler", optimizer, num_training_steps=steps)


def _to_blame(
    node: Mapping[str, Any], error: Exception, given: tuple[Any, ...], supplied: Mapping[str, Any]
) -> str | None:
    """The argument without which this error does not come, if there is one."""
    for name in node:
        if name == COMPONENT:
            continue
        try:
            instantiate({n: v for n, v in node.items() if n != name}, *given, **supplied)
        except Exception as other:  # noqa: BLE001  (another mistake may be left)
            if type(other) is type(error) and str(other) == str(error):
                continue
        return name
    return None


def _takes(call: Callable[..., Any], positional: int) -> bool:
    try:
        inspect.signature(call).bind(*[None] * positional)
    except TypeError:
        return False
    return True


def _nodes(key: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every component below a key, with its path in the config."""
    if isinstance(value, Mapping):
        if isinstance(value.get(COMPONENT), str):
            yield key, value
        for name, child in value.items():
            yield from _nodes(f"{key}.{name}", child)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _nodes(f"{key}.{index}", child)
