"""torchtune's own configs, unchanged: those for what is here validate, the others are told their recipe."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from torchtune_cp.cli.main import main
from torchtune_cp.config.load import load
from torchtune_cp.config.locate import TORCHTUNE_RECIPES, recipe_names
from torchtune_cp.config.torchtune_recipes import other_recipe_problem

ASSETS = Path(__file__).parents[2] / "assets" / "torchtune"
OURS = sorted((ASSETS / "full_finetune_distributed").glob("*.yaml"))
OTHERS = sorted(
    path
    for folder in ASSETS.iterdir()
    if folder.is_dir() and not folder.name.startswith("full_finetune")
    for path in folder.glob("*.yaml")
)
# torchtune's comments in these name the other recipe of the pair.
ALSO = {"knowledge_distillation_single_device": "knowledge_distillation_distributed"}


@pytest.fixture(autouse=True)
def _no_downloads_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_a_config_of_full_finetune_distributed_validates_unchanged(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(path)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("Config is well-formed")
    # Only what has not been downloaded is left unchecked, and that is said.
    assert all(line.startswith("note: not on this machine") for line in said.err.splitlines())


def test_there_are_configs_of_every_family_and_every_recipe() -> None:
    assert len(OURS) == 22
    families = {path.stem.partition("-")[0] for path in OURS}
    assert families == {
        *("llama2", "llama3", "llama3_1", "llama3_2", "llama3_3", "mistral"),
        *("qwen2", "qwen2_5", "qwen3"),
    }
    folders = {path.name for path in ASSETS.iterdir() if path.is_dir()}
    assert folders == {name.removeprefix("dev/") for name in TORCHTUNE_RECIPES}


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_config_of_another_recipe_is_told_so_in_its_first_line(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(path)]) == 2
    first = capsys.readouterr().err.splitlines()[0]
    recipe = ALSO.get(path.parent.name, path.parent.name)
    assert first.startswith("error: this config is for torchtune's recipe ")
    assert f"{recipe}, which is not here" in first
    assert f"available: {', '.join(recipe_names())}" in first


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_it_is_told_without_its_comments_too(path: Path) -> None:
    tree = OmegaConf.to_container(load(path), resolve=False)
    assert isinstance(tree, dict)
    said = other_recipe_problem(tree)
    assert said is not None
    recipe = said.removeprefix("this config is for torchtune's recipe ").partition(",")[0]
    kind = path.parent.name.replace("single_device", "distributed").replace("_multi_dataset", "")
    # One and the same config can be for one device or for many, and for either generation recipe.
    kind = "generate" if kind.startswith("generate") else kind
    assert recipe.removeprefix("dev/").replace("single_device", "distributed") in (
        kind,
        kind.replace("async_", ""),
    )


def test_a_config_for_one_device_that_is_right_validates_with_a_word(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (path,) = (ASSETS / "full_finetune_single_device").glob("*.yaml")
    assert main(["validate", str(path)]) == 2  # bitsandbytes
    first, *_ = capsys.readouterr().err.splitlines()
    assert "full_finetune_single_device, which is not here" in first
    assert "full_finetune_distributed, with one process, does the same" in first
    assert main(["validate", str(path), "optimizer=torch.optim.AdamW"]) == 0
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: this config is for torchtune's recipe full_finetune_single")


def test_a_recipe_of_torchtune_is_refused_by_name_whatever_the_config(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for recipe in set(TORCHTUNE_RECIPES) - set(recipe_names()):
        assert main(["run", recipe, "--config", "tiny/llama_cpu"]) == 2
        assert f"torchtune's recipe {recipe} is not supported; available" in capsys.readouterr().err
    lora = str(ASSETS / "lora_finetune_distributed" / "llama2-7B_lora.yaml")
    assert main(["run", "full_finetune_distributed", "--config", lora]) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert "torchtune's recipe lora_finetune_distributed, which is not here" in first
