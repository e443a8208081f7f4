"""The plan covers every family's model, and sizes that do not divide are named."""

import pytest
import torch

from torchtune_cp.config import tensor_parallel_problems
from torchtune_cp.distributed.tensor_parallel import tensor_parallel_plan
from torchtune_cp.models.llama3 import llama3, llama3_70b
from torchtune_cp.models.llama3_2 import llama3_2_1b
from torchtune_cp.models.mistral import mistral_7b
from torchtune_cp.models.qwen2_5 import qwen2_5_7b_base
from torchtune_cp.models.qwen3 import qwen3_8b_base
from torchtune_cp.models.smollm2 import smollm2_135m

BUILDERS = [llama3_70b, llama3_2_1b, mistral_7b, qwen2_5_7b_base, qwen3_8b_base, smollm2_135m]


def _modules_of(plan, model):
    """The modules that a plan's names stand for."""
    found = {}
    for name, style in plan.items():
        layers = range(model.config.num_layers) if "*" in name else [0]
        for layer in layers:
            found[name.replace("*", str(layer))] = style
    return found


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_the_plan_names_every_module_with_parameters_and_none_that_is_not_there(build):
    with torch.device("meta"):
        model = build()
    planned = _modules_of(tensor_parallel_plan(model), model)
    modules = dict(model.named_modules())
    assert set(planned) <= set(modules)
    holders = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    assert holders <= set(planned)


def test_every_size_that_does_not_divide_is_named_with_its_value():
    with torch.device("meta"):
        model = llama3(
            vocab_size=99,
            num_layers=1,
            num_heads=8,
            num_kv_heads=2,
            embed_dim=64,
            max_seq_len=32,
            intermediate_dim=130,
        )
    sizes = vars(model.config)
    assert tensor_parallel_problems(sizes, 1) == []
    found = tensor_parallel_problems(sizes, 4)
    assert [line.partition("model's ")[2].partition(":")[0] for line in found] == [
        "num_kv_heads of 2",
        "intermediate_dim of 130",
        "vocab_size of 99",
    ]
    assert all(line.startswith("tensor_parallel_dim: 4 does not divide") for line in found)
