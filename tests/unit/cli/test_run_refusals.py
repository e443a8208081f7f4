"""``tune run`` refuses what cannot work before any process is started."""

import json
import os
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchtune_cp.cli import run
from torchtune_cp.cli.main import main
from torchtune_cp.config.locate import recipes_dir
from torchtune_cp.launch import rendezvous_options
from torchtune_cp.launch.launcher import world_size_of
from torchtune_cp.launch.rendezvous_options import settle_rendezvous
from torchtune_cp.models import hf_config
from torchtune_cp.models.hf_names import to_hf_name
from torchtune_cp.models.llama3 import llama3

RECIPE = "full_finetune_distributed"
TINY = ["--config", "tiny/llama_cpu"]


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(args: object) -> None:
        raise AssertionError("a process would have been started")

    monkeypatch.setattr(run, "launch", launch)
    monkeypatch.setenv("TUNE_TRACEBACK", "0")


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main(["run", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    return lines


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([RECIPE, *TINY, "context_paralel_dim=2"], "did you mean context_parallel_dim?"),
        ([RECIPE, *TINY, "--context-paralel-dim", "2"], "did you mean context_parallel_dim?"),
        ([RECIPE, *TINY, "optimizer.lrr=2"], "optimizer.lrr: torch.optim.AdamW has no argument"),
        ([RECIPE, *TINY, "context_parallel_dim=2"], "the run has 1"),
        (["--nproc_per_node", "3", RECIPE, *TINY, "context_parallel_dim=2"], "the run has 3"),
        (["--nproc-per-node=2", "--nnodes=2", RECIPE, *TINY, "context_parallel_dim=3"], "has 4"),
        ([RECIPE, *TINY, "loss=os.system"], "'os.system' is refused"),
        ([RECIPE, *TINY, "--nproc_per_node", "2"], "put it before the recipe"),
        ([RECIPE, *TINY, "--nproc-per-node=2"], "put it before the recipe"),
        ([RECIPE, *TINY, "batch_size"], "expected key=value"),
        ([RECIPE, *TINY, "dataset.glob=/etc/*.py"], "dataset.glob: '/etc/*.py' is no pattern"),
        ([RECIPE, *TINY, "dataset.glob=x*.nothing"], "dataset.glob: no file in"),
        ([RECIPE, *TINY, "dataset.glob=../*.py"], "leads out of the folder"),
        ([RECIPE, *TINY, "dataset.glob=''"], "dataset.glob: '' is no pattern"),
        ([RECIPE, *TINY, "dataset.split=validation"], "dataset.split='validation' cannot be used"),
        ([RECIPE, *TINY, "dataset.num_proc=0"], "dataset.num_proc: must be 1 or more"),
        ([RECIPE, *TINY, "dataset.packed=true", "dataset.max_seq_len=null"], "length of a pack"),
        ([RECIPE, *TINY, "dataset.path=~nobody_here/x"], "dataset.path: '~nobody_here/x' does not"),
        ([RECIPE, *TINY, f"dataset.path={'x' * 5000}"], " ... "),
        ([RECIPE, *TINY, 'seed="\\e[2J"'], "\\x1b[2J"),
        (
            [RECIPE, *TINY, "custom_sharded_layers=[nothing]"],
            "'nothing' is no module of this model",
        ),
        ([RECIPE, "batch_size=2"], "needs a config"),
        ([RECIPE, "--config"], "--config has no value"),
        ([RECIPE, "--config", "tiny/lama_cpu"], "did you mean tiny/llama_cpu?"),
        (["full_finetune_distribute", *TINY], "did you mean full_finetune_distributed?"),
        (["no_such/recipe.py", *TINY], "does not exist"),
        ([RECIPE, "--config="], "no config file"),
        (["--nproc_per_node", "many", RECIPE, *TINY], "--nproc_per_node"),
        (["--nnodes", "x", RECIPE, *TINY], "--nnodes"),
        (["--nproc_per_node", "0", RECIPE, *TINY], "at least 1"),
        (["--standalone", "--nnodes", "2", RECIPE, *TINY], "--standalone is for one node"),
        (["--standalone", "--master-port", "29500", RECIPE, *TINY], "remove --master-port"),
        (["--node-rank", "1", RECIPE, *TINY], "--node-rank 1: with --nnodes 1"),
        (["--nnodes", "2", "--node-rank", "2", RECIPE, *TINY], "it is one of 0 to 1"),
        (["--nnodes", "1:2", RECIPE, *TINY], "--nnodes 1:2 needs --rdzv-endpoint"),
        (["--nnodes", "1:2", "--rdzv-backend", "static", RECIPE, *TINY], "use c10d"),
        (
            ["--rdzv-backend", "c10", RECIPE, *TINY],
            "did you mean c10d?; allowed: static, c10d, etcd",
        ),
        (["--nnodes", "2", "--rdzv-backend", "MyOwn", RECIPE, *TINY], "got 'MyOwn'; allowed"),
        (["--rdzv-backend", "etcd-v2", RECIPE, *TINY], "needs the package python-etcd"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:0", RECIPE, *TINY], "need a fixed port"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:x", RECIPE, *TINY], "--rdzv-endpoint: The port"),
        (
            ["--nnodes=2", "--rdzv-endpoint=h:5", "--master-port=6", RECIPE, *TINY],
            "name two addresses",
        ),
        (["--rdzv-endpoint", "no-such-host.invalid:5", RECIPE, *TINY], "name is not known here"),
        (["--master-addr", "192.0.2.77", RECIPE, *TINY], "which has no such address"),
        (["--rdzv-timeout", "0", RECIPE, *TINY], "--rdzv-timeout: expected a whole number"),
        (["--rdzv-timeout", "2.5", RECIPE, *TINY], "argument --rdzv-timeout"),
        (["--rdzv-conf", "timeout=x", RECIPE, *TINY], "--rdzv-conf timeout: expected"),
        (["--rdzv-conf", "timeouts=1", RECIPE, *TINY], "static has no timeouts; it takes timeout"),
        (["--rdzv-conf", "timeout", RECIPE, *TINY], "expected key=value"),
        (
            ["--rdzv-timeout", "5", "--rdzv-conf", "timeout=6", RECIPE, *TINY],
            "are the same setting: set only one of them",
        ),
        ([], "required"),
        (["--nproc_per_nod", "2"], "required"),
    ],
)
def test_a_bad_command_or_config_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    (line,) = refused(capsys, *argv)
    assert said in line


def test_every_problem_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    lines = refused(capsys, RECIPE, *TINY, "epohcs=2", "batch_size=0", "tensor_parallel_dim=2")
    assert len(lines) == 3  # the third: 2 does not divide the world of 1


def test_heads_that_tensor_parallelism_cannot_give_out_are_named_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ["model.num_heads=4", "model.num_kv_heads=2", "model.vocab_size=274"]
    command = ["--nproc_per_node", "4", RECIPE, *TINY, *sizes]
    (heads, vocab) = refused(capsys, *command, "tensor_parallel_dim=4")
    assert "tensor_parallel_dim: 4 does not divide the model's num_kv_heads of 2" in heads
    assert "vocab_size of 274" in vocab


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_config_without_a_gpu_says_what_to_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (line,) = refused(capsys, RECIPE, *TINY, "device=cuda")
    assert "device=cpu" in line


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with two shards, as a download leaves it."""
    folder = tmp_path / "model"
    folder.mkdir()
    model = llama3(272, 2, 4, 2, 64, 1024, intermediate_dim=192)  # that of tiny/llama_cpu
    weights = {to_hf_name("llama", name): p.detach() for name, p in model.named_parameters()}
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(weights)}
    for file in set(where.values()):
        save_file({name: weights[name] for name in weights if where[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(hf_config(model)))
    return folder


@pytest.mark.parametrize("damage", ["missing", "truncated", "incomplete"])
def test_an_incomplete_download_is_named_before_anything_starts(
    capsys: pytest.CaptureFixture[str], model_folder: Path, damage: str
) -> None:
    shard = model_folder / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    if damage == "truncated":
        shard.write_bytes(content[:-100])
    else:
        shard.unlink()
    if damage == "incomplete":
        cache = model_folder / ".cache" / "huggingface" / "download"
        cache.mkdir(parents=True)
        (cache / f"{shard.name}.incomplete").write_bytes(content[:100])
    (line,) = refused(capsys, RECIPE, *TINY, f"checkpointer.checkpoint_dir={model_folder}")
    assert shard.name in line


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Collect the options that would be launched."""
    seen: list[object] = []
    monkeypatch.setattr(run, "launch", lambda args, settings: seen.append(args))
    return seen


def test_a_whole_checkpoint_is_let_through(model_folder: Path, launched: list) -> None:
    assert main(["run", RECIPE, *TINY, f"checkpointer.checkpoint_dir={model_folder}"]) == 0
    assert len(launched) == 1


def test_weights_of_another_model_and_a_tokenizer_too_large_are_named_before_anything_starts(
    capsys: pytest.CaptureFixture[str], model_folder: Path
) -> None:
    """Case F10 for the tokenizer."""
    path = model_folder / "model-00002-of-00002.safetensors"
    save_file({**load_file(path), "score.weight": torch.ones(2, 64)}, path)
    given = f"checkpointer.checkpoint_dir={model_folder}"
    lines = refused(capsys, RECIPE, *TINY, given, "model.vocab_size=200")
    assert len(lines) == 2
    assert (
        "token ids go up to 271 (vocabulary of 272), but the model's vocab_size is 200" in lines[0]
    )
    assert "other shape: model.embed_tokens.weight is [272, 64]" in lines[1]
    assert "unexpected: score.weight" in lines[1]
    (line,) = refused(capsys, RECIPE, *TINY, given)
    assert "unexpected: score.weight" in line


def test_names_become_absolute_paths_and_overrides_pass_unchanged(launched: list) -> None:
    overrides = ["lr_scheduler=None", "~clip_grad_norm", "--batch_size", "2", "--log-level", "INFO"]
    assert main(["run", "--nproc_per_node", "2", RECIPE, *TINY, *overrides]) == 0
    (args,) = launched
    assert Path(args.training_script) == recipes_dir() / f"{RECIPE}.py"
    assert args.training_script_args[0] == "--config"
    assert os.path.isabs(args.training_script_args[1])
    assert args.training_script_args[2:] == overrides
    assert args.nproc_per_node == "2"


def test_a_recipe_is_found_from_the_current_folder_with_or_without_py(
    tmp_path: Path, launched: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text("print('hello')\n")
    monkeypatch.chdir(tmp_path)
    for name in ("sub/mine.py", "./sub/mine", str(tmp_path / "sub" / "mine.py")):
        assert main(["run", name, "anything", "--goes"]) == 0
    assert {args.training_script for args in launched} == {str(tmp_path / "sub" / "mine.py")}


def test_a_package_that_the_user_allows_is_found_in_the_current_folder(
    tmp_path: Path,
    launched: list,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "my_losses.py").write_text("class Loss:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    command = [RECIPE, *TINY, "loss=my_losses.Loss"]
    (line,) = refused(capsys, *command)
    assert "TUNE_ALLOW_COMPONENTS=my_losses" in line
    monkeypatch.setenv("TUNE_ALLOW_COMPONENTS", "my_losses")
    assert main(["run", *command]) == 0
    assert len(launched) == 1


def test_a_copied_recipe_is_checked_by_its_own_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "mine.py"
    copy.write_text((recipes_dir() / f"{RECIPE}.py").read_text())
    (line,) = refused(capsys, str(copy), *TINY, "context_paralel_dim=2")
    assert "did you mean context_parallel_dim?" in line


def test_a_recipe_that_is_no_python_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def main(:\n")
    (line,) = refused(capsys, str(broken), *TINY)
    assert "no Python file" in line


def test_every_torchrun_option_is_taken_in_both_spellings() -> None:
    from torch.distributed.run import get_args_parser

    options = [
        o for a in get_args_parser()._actions for o in a.option_strings if o.startswith("--")
    ]
    parser = run._torchrun_parser()
    for option in options:
        for spelling in (option.replace("-", "_").replace("__", "--", 1), option):
            assert spelling in parser._option_string_actions, spelling


@pytest.mark.parametrize(
    ("argv", "size"),
    [
        ([], 1),
        (["--nproc_per_node", "4"], 4),
        (["--nnodes", "2", "--nproc-per-node", "4"], 8),
        (["--nnodes", "1:2", "--nproc-per-node", "4"], None),
    ],
)
def test_the_world_size_is_known_from_the_options(argv: list[str], size: int | None) -> None:
    assert world_size_of(run._torchrun_parser().parse_args([*argv, "recipe"])) == size


@pytest.mark.parametrize(
    ("argv", "backend", "endpoint"),
    [
        ([], "tune_one_node", "127.0.0.1:0"),
        (["--standalone"], "tune_one_node", "127.0.0.1:0"),
        (["--rdzv-backend", "c10d"], "tune_one_node", "127.0.0.1:0"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:5"], "tune_one_node", "127.0.0.1:5"),
        (["--rdzv-endpoint", "[::1]:5"], "tune_one_node", "[::1]:5"),
        (["--master-port", "5"], "tune_one_node", "127.0.0.1:5"),
        (["--nnodes", "2", "--master-addr", "h"], "tune_static", "h:29500"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:5"], "tune_static", "h:5"),
        (["--nnodes", "2", "--rdzv-backend=c10d", "--rdzv-endpoint=h"], "tune_c10d", "h:29400"),
        (["--nnodes", "1:2", "--rdzv-endpoint", "h:5"], "tune_c10d", "h:5"),
        (["--nnodes=2", "--rdzv-backend=installed", "--rdzv-endpoint=h:5"], "installed", "h:5"),
    ],
)
def test_only_who_asks_for_it_meets_with_pickled_state(
    argv: list[str], backend: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = EntryPoint("installed", "some.module:handler", "torchrun.handlers")
    monkeypatch.setattr(rendezvous_options, "entry_points", lambda group: EntryPoints([plugin]))
    args = run._torchrun_parser().parse_args([*argv, "recipe"])
    settle_rendezvous(args)
    assert (args.rdzv_backend, args.rdzv_endpoint) == (backend, endpoint)
