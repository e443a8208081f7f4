"""Configs: read, override, check, and build what they describe.

`parse` turns a recipe's main function into a program; `instantiate` builds a component.
"""

from torchtune_cp.config.combinations import (
    degrees_problem,
    module_problems,
    tensor_parallel_problems,
    vocabulary_problem,
)
from torchtune_cp.config.entry_point import parse
from torchtune_cp.config.instantiate import component_callable, instantiate
from torchtune_cp.config.load import load, load_argv
from torchtune_cp.config.locate import find_config, find_recipe
from torchtune_cp.config.lookup import get_component
from torchtune_cp.config.schema import (
    FullFinetuneConfig,
    MaskedLMConfig,
    component_problems,
    resolved_dict,
    resolved_yaml,
    to_typed,
    validate,
)
from torchtune_cp.errors import ConfigError, UserError

__all__ = [
    "ConfigError",
    "FullFinetuneConfig",
    "MaskedLMConfig",
    "UserError",
    "component_callable",
    "component_problems",
    "degrees_problem",
    "find_config",
    "find_recipe",
    "get_component",
    "instantiate",
    "load",
    "load_argv",
    "module_problems",
    "parse",
    "resolved_dict",
    "resolved_yaml",
    "tensor_parallel_problems",
    "to_typed",
    "validate",
    "vocabulary_problem",
]
