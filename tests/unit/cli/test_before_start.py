"""What ``tune validate`` and ``tune run`` find before a process is started, all of it at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtune_cp.cli.main import main

TINY = ("validate", "tiny/llama_cpu")
JSON_ROWS = "_component_: torchtune_cp.datasets.text_completion_dataset, source: json"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n')
    return path


def problems(capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    code = main([*TINY, *overrides])
    said = capsys.readouterr()
    assert code == (2 if "error:" in said.err else 0)
    return [line.removeprefix("error: ") for line in said.err.splitlines()]


def test_mistakes_of_keys_types_values_and_components_are_found_in_one_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = problems(
        capsys,
        "batchsize=3",
        "epochs=0",
        "optimizer.lr='2e-5'",
        "optimizer.betas=[1.5,0.9]",
        "optimizer.weight_decay=-1",
        "lr_scheduler.num_warmup_steps=0.1",
        "dataset.globb=x",
        "dataset.overlong=truncat",
        "checkpointer.recipe_checkpoint=recipe_state.pt",
        "checkpointer.safe_serialization=false",
        "loss=torch.nn.CrossEntropyLoss",
        "metric_logger.output_fmt=json",
        "metric_logger.log_dirr=x",
    )
    for said in (
        "batchsize: unknown key; did you mean batch_size?",
        "epochs: must be at least 1, got 0",
        "optimizer.lr: expected a number, got the string '2e-5'",
        "optimizer.betas: [1.5, 0.9] is refused by torch.optim.AdamW: ValueError: Invalid beta",
        "optimizer.weight_decay: -1 is refused by torch.optim.AdamW",
        "lr_scheduler.num_warmup_steps: expected an integer of at least 0, got 0.1",
        "dataset.globb: torchtune_cp.datasets.text_folder_dataset has no argument 'globb'; did you",
        "dataset.overlong: 'truncat' is not one of truncate, split, drop, error; did you mean truncate?",
        "checkpointer.recipe_checkpoint=recipe_state.pt: ",
        "checkpointer.safe_serialization=false: ",
        "loss._component_: 'torch.nn.CrossEntropyLoss' is refused",
        "metric_logger.output_fmt: expected txt, jsonl, got 'json'; did you mean jsonl?",
        "metric_logger.log_dirr: is not a key of this logger; did you mean log_dir?",
    ):
        assert [line for line in found if line.startswith(said)], (said, found)
    assert len(found) == 13


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optimizer.lr=1e-3x"], "optimizer.lr: expected a number, got the string '1e-3x'"),
        (["optimizer.lr=-1"], "optimizer.lr: -1 is refused by torch.optim.AdamW"),
        (["optimizer.lr=.inf"], "optimizer.lr: expected a finite number"),
        (["optimizer.amsgrad='false'"], "optimizer.amsgrad: expected true or false"),
        (["lr_scheduler.num_warmup_steps=-1"], "lr_scheduler.num_warmup_steps: expected an integer"),
        (
            ["optimizer=torch.optim.SGD", "optimizer.betas=[0.9,0.9]"],
            "optimizer.betas: torch.optim.SGD has no argument 'betas'",
        ),
        (["model.num_heads=3"], "model: num_heads is 3 and embed_dim is 64"),
        (["model.norm_eps=small"], "model.norm_eps: expected a number"),
        (["model={_component_: torchtune_cp.models.esm2.esm2_8m}"], "this recipe trains a Transformer"),
        (["loss=torch.nn.CosineEmbeddingLoss"], "loss._component_: 'torch.nn.CosineEmbeddingLoss' is"),
        (["loss.num_output_chunks=0"], "loss.num_output_chunks=0"),
        (["resize_token_embeddings=true"], "resize_token_embeddings: True has no equivalent here"),
        (["checkpointer.keep_last_n_checkpoints=0"], "expected an integer of at least 1 or null"),
        (
            ["checkpointer.keep_last_n_checkpoints=2", "keep_last_n=3"],
            "checkpointer.keep_last_n_checkpoints: 2 contradicts keep_last_n=3",
        ),
        (["checkpointer.model_type=GEMMA"], "checkpointer.model_type=GEMMA is not supported"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)  # fmt: skip
def test_one_mistake_is_one_line_that_names_the_key(
    capsys: pytest.CaptureFixture[str], overrides: list[str], said: str
) -> None:
    (line,) = problems(capsys, *overrides)
    assert said in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["resize_token_embeddings=false"],
        ["checkpointer.keep_last_n_checkpoints=2"],
        ["metric_logger.output_fmt=jsonl"],
        ["metric_logger=torchtune_cp.metrics.StdoutLogger"],
        ["optimizer=torch.optim.SGD"],
        ["lr_scheduler._component_=transformers.optimization.get_linear_schedule_with_warmup"],
    ],
    ids=str,
)
def test_what_is_right_has_no_line(
    capsys: pytest.CaptureFixture[str], overrides: list[str]
) -> None:
    assert problems(capsys, *overrides) == []


def test_arguments_of_a_tokenizer_are_refused_before_its_files_are_looked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    node = "_component_: torchtune.models.qwen2.qwen2_tokenizer, path: /nowhere/vocab.json"
    lines = problems(capsys, f"tokenizer={{{node}, prompt_template: x.Y, truncation_type: left}}")
    assert [line.partition("=")[0] for line in lines] == [
        "tokenizer.prompt_template",
        "tokenizer.truncation_type",
    ]
    (note,) = problems(capsys, f"tokenizer={{{node}}}")
    assert note.startswith("note: not on this machine, so not checked: tokenizer.path=")


def test_another_data_set_given_as_a_mapping_takes_nothing_from_the_old_one(
    capsys: pytest.CaptureFixture[str], rows: Path
) -> None:
    assert problems(capsys, f"dataset={{{JSON_ROWS}, data_files: {rows}}}") == []
    lines = problems(capsys, "dataset._component_=torchtune_cp.datasets.alpaca_dataset")
    assert [line.partition(":")[0] for line in lines] == ["dataset.path", "dataset.glob"]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("colum: text", "dataset.colum: is no argument of this data set"),
        ("feild: data", "did you mean field?"),
        ("delimiter: ','", "dataset.delimiter: is no argument"),  # of csv, not of json
        ("chunksize: 65536", None),
        ("field: data", None),
        ("keep_in_memory: true", None),
    ],
)
def test_a_misspelt_argument_for_the_library_that_reads_rows_is_refused_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str], rows: Path, argument: str, said: str | None
) -> None:
    lines = problems(capsys, f"dataset={{{JSON_ROWS}, data_files: {rows}, {argument}}}")
    assert lines == [] if said is None else said in lines[0]
    if argument.startswith("colum:"):
        assert "did you mean column?" in lines[0]


def test_each_data_set_of_a_list_and_of_validation_is_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = problems(
        capsys,
        "dataset=[{_component_: torchtune_cp.datasets.alpaca_cleaned_dataset, packd: true},"
        " {_component_: torchtune_cp.datasets.chat_dataset, source: a/b, conversation_column: x,"
        " conversation_style: shargpt, max_rows: 0}]",
        "dataset_val.max_seq_len=0",
    )
    assert {line.partition(":")[0] for line in lines} == {
        "dataset.0.packd",
        "dataset.1.conversation_style",
        "dataset.1.max_rows",
        "dataset_val.max_seq_len",
    }


def test_what_is_not_on_this_machine_is_a_note_for_validate_and_an_error_for_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    overrides = (
        "checkpointer.checkpoint_dir=/nowhere/model",
        f"dataset={{{JSON_ROWS}, data_files: /nowhere/rows.jsonl}}",
        f"output_dir={tmp_path / 'out'}",
    )
    notes = problems(capsys, *overrides)
    assert len(notes) == 2
    assert all(line.startswith("note: not on this machine, so not checked") for line in notes)
    assert main(["run", "full_finetune_distributed", "--config", *TINY[1:], *overrides]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[2].partition(":")[0] for line in errors] == [
        " dataset.data_files",
        " checkpointer.checkpoint_dir",
    ]
    assert not (tmp_path / "out").exists()


def test_a_warm_up_that_takes_the_whole_run_is_a_warning_with_both_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (line,) = problems(capsys, "lr_scheduler.num_warmup_steps=500", "max_steps_per_epoch=40")
    assert line.startswith("warning: lr_scheduler.num_warmup_steps=500 is not shorter than the run")
    assert "40 steps" in line
    assert problems(capsys, "lr_scheduler.num_warmup_steps=39", "max_steps_per_epoch=40") == []


OWN_SCHEMA = """
from dataclasses import dataclass

from torchtune_cp import config
from torchtune_cp.config import FullFinetuneConfig


@dataclass(kw_only=True)
class MyConfig(FullFinetuneConfig):
    temperature: float = 1.0


@config.parse(schema=MyConfig)
def main(cfg: MyConfig) -> None:
    raise AssertionError("validate must not run it")


{end}
"""
RAW = """
from torchtune_cp import config


@config.parse
def main(cfg) -> None: ...


if __name__ == "__main__":
    main()
"""


def test_a_recipe_of_ones_own_is_checked_by_its_own_schema_or_by_components_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    guarded = tmp_path / "my_recipe.py"
    guarded.write_text(OWN_SCHEMA.format(end='if __name__ == "__main__":\n    main()'))
    assert problems(capsys, "temperature=2.0") == ["temperature: unknown key"]
    assert problems(capsys, "--recipe", str(guarded), "temperature=2.0") == []
    (line,) = problems(capsys, f"--recipe={guarded}", "temperature=hot")
    assert line == "temperature: expected a number, got 'hot'"
    (line,) = problems(capsys, "--recipe", str(guarded), "temperatur=2.0")
    assert "did you mean temperature?" in line

    raw = tmp_path / "raw_recipe.py"
    raw.write_text(RAW)
    starts_when_imported = tmp_path / "script_recipe.py"
    starts_when_imported.write_text(OWN_SCHEMA.format(end="main()"))
    for recipe in (raw, starts_when_imported):
        assert problems(capsys, "--recipe", str(recipe), "my_own_key=3", "~seed") == []
        (line,) = problems(capsys, "--recipe", str(recipe), "optimizer.lr='1'", "my_own_key=3")
        assert line.startswith("optimizer.lr: expected a number")
        (line,) = problems(capsys, "--recipe", str(recipe), "my={_component_: torch.optim.SGDD}")
        assert "did you mean torch.optim.SGD?" in line
