"""Every config that is shipped can be run: parsed, checked, its components found."""

import pytest

from torchtune_cp.cli.ls import recipe_of
from torchtune_cp.cli.validate import schema_of
from torchtune_cp.config import load, to_typed
from torchtune_cp.config.locate import config_names, configs_dir, recipe_names
from torchtune_cp.config.schema import component_problems

FAMILIES = {
    "tiny",
    "llama3",
    "llama3_1",
    "llama3_2",
    "qwen2_5",
    "qwen3",
    "mistral",
    "smollm2",
    "esm2",
}


def test_each_family_has_a_config() -> None:
    assert {name.partition("/")[0] for name in config_names()} >= FAMILIES


@pytest.mark.parametrize("name", config_names())
def test_a_shipped_config_is_well_formed_and_every_component_takes_its_arguments(name: str) -> None:
    assert component_problems(to_typed(load(name), schema_of(name))) == []


@pytest.mark.parametrize("name", config_names())
def test_the_launch_command_on_top_is_this_configs_own(name: str) -> None:
    text = (configs_dir() / f"{name}.yaml").read_text()
    assert recipe_of(name) in recipe_names()
    header = text.split("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert f"--config {name}" in header


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_the_tiny_config_fits_each_split_of_four_processes(world_size: int, cp: int) -> None:
    if cp > world_size:
        return
    to_typed(load("tiny/llama_cpu", [f"context_parallel_dim={cp}"]), world_size=world_size)
