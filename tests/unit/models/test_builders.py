"""The named sizes against what their makers published."""

import importlib

import pytest
import torch
import transformers

from torchtune_cp.models import hf_config, to_hf_name

# Parameters of the published safetensors files; a tied output weight counts once.
PUBLISHED = {
    "llama2.llama2_7b": 6_738_415_616,
    "llama2.llama2_13b": 13_015_864_320,
    "llama2.llama2_70b": 68_976_648_192,
    "llama3.llama3_8b": 8_030_261_248,
    "llama3.llama3_70b": 70_553_706_496,
    "llama3_1.llama3_1_8b": 8_030_261_248,
    "llama3_1.llama3_1_70b": 70_553_706_496,
    "llama3_1.llama3_1_405b": 405_853_388_800,
    "llama3_2.llama3_2_1b": 1_235_814_400,
    "llama3_2.llama3_2_3b": 3_212_749_824,
    "llama3_3.llama3_3_70b": 70_553_706_496,
    "mistral.mistral_7b": 7_241_732_096,
    "qwen2.qwen2_0_5b": 494_032_768,
    "qwen2.qwen2_1_5b": 1_543_714_304,
    "qwen2.qwen2_7b": 7_615_616_512,
    "qwen2_5.qwen2_5_0_5b": 494_032_768,
    "qwen2_5.qwen2_5_1_5b_base": 1_543_714_304,
    "qwen2_5.qwen2_5_1_5b_instruct": 1_543_714_304,
    "qwen2_5.qwen2_5_3b": 3_085_938_688,
    "qwen2_5.qwen2_5_7b_base": 7_615_616_512,
    "qwen2_5.qwen2_5_7b_instruct": 7_615_616_512,
    "qwen2_5.qwen2_5_14b_base": 14_770_033_664,
    "qwen2_5.qwen2_5_14b_instruct": 14_770_033_664,
    "qwen2_5.qwen2_5_32b_base": 32_763_876_352,
    "qwen2_5.qwen2_5_32b_instruct": 32_763_876_352,
    "qwen2_5.qwen2_5_72b_base": 72_706_203_648,
    "qwen2_5.qwen2_5_72b_instruct": 72_706_203_648,
    "qwen3.qwen3_0_6b_base": 596_049_920,
    "qwen3.qwen3_0_6b_instruct": 596_049_920,
    "qwen3.qwen3_1_7b_base": 1_720_574_976,
    "qwen3.qwen3_1_7b_instruct": 1_720_574_976,
    "qwen3.qwen3_4b_base": 4_022_468_096,
    "qwen3.qwen3_4b_instruct": 4_022_468_096,
    "qwen3.qwen3_8b_base": 8_190_735_360,
    "qwen3.qwen3_8b_instruct": 8_190_735_360,
    "qwen3.qwen3_14b_base": 14_768_307_200,
    "qwen3.qwen3_14b_instruct": 14_768_307_200,
    "qwen3.qwen3_32b": 32_762_123_264,
    "smollm2.smollm2_135m": 134_515_008,
    "smollm2.smollm2_360m": 361_821_120,
    "smollm2.smollm2_1_7b": 1_711_376_384,
}


def _build(path: str):
    module, _, builder = path.partition(".")
    with torch.device("meta"):
        return getattr(importlib.import_module(f"torchtune_cp.models.{module}"), builder)()


@pytest.mark.parametrize("path", PUBLISHED)
def test_parameter_count_is_the_published_one(path):
    assert sum(p.numel() for p in _build(path).parameters()) == PUBLISHED[path]


@pytest.mark.parametrize(
    "path",
    [
        "llama3.llama3_8b",
        "llama3_2.llama3_2_1b",
        "mistral.mistral_7b",
        "qwen2_5.qwen2_5_0_5b",
        "qwen3.qwen3_0_6b_base",
        "smollm2.smollm2_135m",
    ],
)
def test_names_and_shapes_are_those_of_transformers(path):
    ours = _build(path)
    config = transformers.AutoConfig.for_model(**hf_config(ours))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert {to_hf_name(ours.config.family, n): p.shape for n, p in ours.named_parameters()} == {
        n: p.shape for n, p in theirs.named_parameters()
    }


@pytest.mark.parametrize(
    ("path", "context", "base", "eps", "stretch"),
    [
        ("llama2.llama2_7b", 4096, 1e4, 1e-5, None),
        ("llama3.llama3_8b", 8192, 5e5, 1e-5, None),
        ("llama3_1.llama3_1_8b", 131_072, 5e5, 1e-5, 8.0),
        ("llama3_2.llama3_2_3b", 131_072, 5e5, 1e-5, 32.0),
        ("mistral.mistral_7b", 32_768, 1e4, 1e-5, None),
        ("qwen2_5.qwen2_5_7b_base", 131_072, 1e6, 1e-6, None),
        ("qwen2_5.qwen2_5_14b_base", 131_072, 1e6, 1e-5, None),
        ("qwen2_5.qwen2_5_14b_instruct", 32_768, 1e6, 1e-6, None),
        ("qwen3.qwen3_8b_base", 32_768, 1e6, 1e-6, None),
        ("qwen3.qwen3_8b_instruct", 40_960, 1e6, 1e-6, None),
        ("smollm2.smollm2_135m", 8192, 1e5, 1e-5, None),
        ("smollm2.smollm2_1_7b", 8192, 1.3e5, 1e-5, None),
    ],
)
def test_what_leaves_no_trace_in_the_shapes_is_the_published_value(
    path, context, base, eps, stretch
):
    config = _build(path).config
    assert (config.max_seq_len, config.rope_base, config.norm_eps) == (context, base, eps)
    assert (config.rope_scaling.factor if config.rope_scaling else None) == stretch
