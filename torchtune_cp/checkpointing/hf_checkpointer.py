"""The checkpointer that configs name: Hugging Face folders in and out."""

import json
import logging
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from torch.distributed.tensor import DTensor, Replicate

from torchtune_cp.checkpointing.folder import (
    CONFIG_NAME,
    CheckpointFiles,
    check_folder,
)
from torchtune_cp.checkpointing.hf_safetensors import MAX_FILE_BYTES, save_hf_folder
from torchtune_cp.checkpointing.model_folder import OTHER_FILES
from torchtune_cp.checkpointing.rank_sync import RankSync
from torchtune_cp.checkpointing.sources import HFFolderSource, RandomSource, WeightSource
from torchtune_cp.config.argument_types import AtLeast
from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.errors import UserError
from torchtune_cp.models.auto import LanguageModel, hf_config
from torchtune_cp.models.config import DecoderConfig
from torchtune_cp.models.encoder import TransformerEncoder
from torchtune_cp.models.encoder_config import EncoderConfig
from torchtune_cp.models.hf_esm import (
    carried_tensors,
    is_carried_esm_tensor,
    is_ignored_esm_tensor,
    read_frequencies,
)
from torchtune_cp.models.hf_names import to_hf_name
from torchtune_cp.models.init import init_tensor_
from torchtune_cp.models.tokenizer_files import TOKENIZER_FILES
from torchtune_cp.models.transformer import TransformerDecoder

# torchtune's model types, and what config.json calls these models.
_MODEL_TYPES = {
    "LLAMA2": "llama",
    "LLAMA3": "llama",
    "LLAMA3_2": "llama",
    "MISTRAL": "mistral",
    "QWEN2": "qwen2",
    "QWEN3": "qwen3",
    "ESM2": "esm",
}
log = logging.getLogger(__name__)

# torch.compile and the checkpoint wrapper put these into the names of parameters.
_WRAPPER_PREFIX = re.compile(r"(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


class SavableTokenizer(Protocol):
    """A tokenizer that can write the files that describe it."""

    def save(self, folder: str | Path) -> None:  # pragma: no cover - protocol
        """Write the files that accompany a saved model."""
        ...


def _parameters(model: LanguageModel) -> dict[str, torch.Tensor]:
    """The model's parameters by their plain names; a tied one once."""
    return {
        _WRAPPER_PREFIX.sub("", name): parameter for name, parameter in model.named_parameters()
    }


def _gathered(parameter: DTensor) -> torch.Tensor:
    """The whole parameter on every rank, gathered over one dimension of the mesh after the other.

    `full_tensor()` does the same, but warns of it where FSDP and tensor parallelism cut the same
    dimension.
    """
    placements = list(parameter.placements)
    for dim, placement in enumerate(placements):
        if not placement.is_replicate():
            placements[dim] = Replicate()
            parameter = parameter.redistribute(placements=placements)
    return parameter.to_local()


class FullModelHFCheckpointer:
    """Reads the initial weights and writes the fine-tuned model, as Hugging Face folders.

    Attributes:
        checkpoint_dir: The folder to start from; None starts from seeded random weights.
        output_dir: The run's output folder.
    """

    def __init__(
        self,
        checkpoint_dir: str | None = None,
        checkpoint_files: CheckpointFiles | None = None,
        model_type: str | None = None,
        output_dir: str | None = None,
        adapter_checkpoint: str | None = None,
        recipe_checkpoint: str | None = None,
        resume_from_checkpoint: bool = False,
        safe_serialization: bool = True,
        should_load_recipe_state: bool = False,
        keep_last_n_checkpoints: Annotated[int | None, AtLeast(1)] = None,
        enable_dcp: bool = False,
    ) -> None:
        """Check the folder; nothing is loaded. The arguments are those of torchtune.

        Args:
            checkpoint_dir: A Hugging Face folder, or None.
            checkpoint_files: Names of the weight files; by default those in the folder's index.
            model_type: For example `LLAMA3`; only compared with the folder's `config.json`.
            output_dir: Where `save_final` writes `final/`.
            adapter_checkpoint: Not supported: must be None.
            recipe_checkpoint: Not supported (`resume_from_checkpoint` of the run resumes): must be None.
            resume_from_checkpoint: Not supported: must be False.
            safe_serialization: Must be True: pickles are not written.
            should_load_recipe_state: Not supported: must be False.
            keep_last_n_checkpoints: torchtune's name for the run's `keep_last_n`, read by the recipe.
            enable_dcp: Not supported (training checkpoints are always distributed): must be False.

        Raises:
            UserError: Arguments are not supported (the message lists all of them), or the folder is
                incomplete.
        """
        key = "checkpointer"
        problems = []
        if adapter_checkpoint is not None:
            problems.append(
                f"{key}.adapter_checkpoint={adapter_checkpoint}: adapters (LoRA) are not "
                "supported; merge the adapter into the model first and leave this null"
            )
        for name, value in (
            ("recipe_checkpoint", recipe_checkpoint),
            ("should_load_recipe_state", should_load_recipe_state or None),
            ("resume_from_checkpoint", resume_from_checkpoint or None),
        ):
            if value is not None:
                problems.append(
                    f"{key}.{name}={value}: torchtune's recipe checkpoints cannot be resumed from; "
                    "leave it out (resume_from_checkpoint of the run resumes a run of this project)"
                )
        if not safe_serialization:
            problems.append(
                f"{key}.safe_serialization=false: only safetensors is written; leave it true"
            )
        if enable_dcp:
            problems.append(
                f"{key}.enable_dcp=true: leave it false; enable_async_checkpointing of the run saves "
                "in the background"
            )
        if model_type is not None and str(model_type).upper() not in _MODEL_TYPES:
            problems.append(
                f"{key}.model_type={model_type} is not supported; known: {', '.join(_MODEL_TYPES)}"
            )
        if checkpoint_dir is None and checkpoint_files:
            problems.append(f"{key}.checkpoint_files needs checkpoint_dir, which is null")
        if problems:
            raise UserError("\n".join(problems))
        self.checkpoint_dir = None if checkpoint_dir is None else expand_home(checkpoint_dir)
        self.output_dir = None if output_dir is None else expand_home(output_dir)
        self._checkpoint_files = checkpoint_files
        self._source: HFFolderSource | None = None
        if self.checkpoint_dir is not None:
            check_folder(self.checkpoint_dir, checkpoint_files)
            found = self._source_config().get("model_type")
            if model_type is not None and found != _MODEL_TYPES[str(model_type).upper()]:
                raise UserError(
                    f"{key}.model_type={model_type}, but {self.checkpoint_dir / CONFIG_NAME} "
                    f"describes a {found!r} model; leave model_type out, config.json decides"
                )

    def _source_config(self) -> dict[str, Any]:
        assert self.checkpoint_dir is not None
        return json.loads((self.checkpoint_dir / CONFIG_NAME).read_text(encoding="utf-8"))

    def keep_stored_output(self, model: LanguageModel) -> None:
        """Untie a model's output projection if the folder contains one that differs from the embedding.

        As transformers does, also against `config.json`. To be called before the model is sharded.

        Args:
            model: The model, on any device; changed in place.

        Raises:
            UserError: A file cannot be read.
        """
        source = self._opened_source(model)
        if (
            source is not None
            and isinstance(model, TransformerDecoder)
            and model.config.tie_word_embeddings
            and source.has_other_output()
        ):
            log.info(
                "%s: lm_head.weight is not the embedding: the model keeps it as a separate weight, although "
                "its config ties them (tie_word_embeddings)",
                self.checkpoint_dir,
            )
            model.untie_output()

    def source(self, model: LanguageModel, seed: int) -> WeightSource:
        """Return the source of the model's initial weights.

        Args:
            model: The model, on any device (`meta` is sufficient), sharded or not.
            seed: Seed of the random weights when there is no `checkpoint_dir`.

        Raises:
            UserError: The folder's weights do not match this model, for example a separate output weight
                for a model that ties it, see `keep_stored_output`.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in _parameters(model).items()}
        if self.checkpoint_dir is None:
            return RandomSource(seed, shapes, partial(_init, model.config))
        source = self._opened_source(model)
        assert source is not None
        if isinstance(model, TransformerEncoder):
            source.check_names(shapes, is_ignored_esm_tensor, is_carried_esm_tensor)
            read_frequencies(model, source)
        else:
            source.check_names(shapes)
        return source

    def save_final(
        self,
        model: LanguageModel,
        tokenizer: SavableTokenizer | None = None,
        *,
        folder: str | Path | None = None,
        dtype: torch.dtype | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> Path:
        """Write the model as a Hugging Face folder; collective, every rank must call it.

        Args:
            model: The live model; its parameters may be sharded (DTensor).
            tokenizer: Its files are saved with the weights; None copies those of
                `checkpoint_dir`.
            folder: Where to write; default `<output_dir>/final`.
            dtype: The type to write; default that of the weights in `checkpoint_dir`, or of the
                model's parameters when it started from random weights.
            max_file_bytes: Maximum bytes of weights per file.

        Returns:
            The folder.

        Raises:
            UserError: The folder cannot be written, on every rank.
        """
        if folder is None:
            if self.output_dir is None:
                raise UserError("checkpointer.output_dir is needed to save the model")
            folder = self.output_dir / "final"
        named = {
            to_hf_name(model.config.family, name): parameter
            for name, parameter in _parameters(model).items()
        }
        save_dtype = dtype or self._saved_dtype(model)
        carried: dict[str, torch.Tensor] = {}
        if isinstance(model, TransformerEncoder):
            carried = carried_tensors(model, self._opened_source(model) or {})
            named = {**carried, **named}

        def get_full(name: str) -> torch.Tensor:
            parameter = named[name].detach()
            if name not in carried and save_dtype.itemsize < parameter.dtype.itemsize:
                parameter = parameter.to(save_dtype)  # fewer bytes to gather
            return _gathered(parameter) if isinstance(parameter, DTensor) else parameter

        rank_sync = RankSync()
        scratch = tempfile.TemporaryDirectory()
        try:
            save_hf_folder(
                {name: tuple(parameter.shape) for name, parameter in named.items()},
                get_full,
                folder,
                config=self._final_config(model, save_dtype),
                dtype=save_dtype,
                float32_names=[name for name in carried if name.endswith("inv_freq")],
                extra_files=(
                    self._extra_files(tokenizer, Path(scratch.name)) if rank_sync.rank == 0 else ()
                ),
                max_file_bytes=max_file_bytes,
                rank_sync=rank_sync,
            )
        finally:
            rank_sync.close()
            scratch.cleanup()
        return Path(folder)

    def _saved_dtype(self, model: LanguageModel) -> torch.dtype:
        source = self._opened_source(model)
        return next(model.parameters()).dtype if source is None else source.dtype

    def _opened_source(self, model: LanguageModel) -> HFFolderSource | None:
        """The folder that the run started from, None without one."""
        if self._source is None and self.checkpoint_dir is not None:
            to_name = partial(to_hf_name, model.config.family)
            self._source = HFFolderSource(self.checkpoint_dir, to_name, self._checkpoint_files)
        return self._source

    def _final_config(self, model: LanguageModel, dtype: torch.dtype) -> dict[str, Any]:
        """The source's `config.json` (or one made from the model) with the saved type set."""
        if self.checkpoint_dir is None:
            return hf_config(model, dtype)
        config = self._source_config()
        # transformers renamed torch_dtype to dtype in 4.56; older releases know only the first.
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
        for key in keys:
            config[key] = str(dtype).removeprefix("torch.")
        if isinstance(model, TransformerDecoder):
            tied = model.config.tie_word_embeddings
            if bool(config.get("tie_word_embeddings", False)) != tied:
                config["tie_word_embeddings"] = tied
        return config

    def _extra_files(self, tokenizer: SavableTokenizer | None, scratch: Path) -> list[Path]:
        files: list[Path] = []
        if tokenizer is not None:
            tokenizer.save(scratch)  # a template given in the config is part of what it writes
            files += sorted(scratch.iterdir())
        if self.checkpoint_dir is not None:
            # Everything else in a model's folder stays where it is: weights in other formats, READMEs
            # with another model's results, caches.
            names = OTHER_FILES if tokenizer is not None else (*OTHER_FILES, *TOKENIZER_FILES)
            files += [
                self.checkpoint_dir / name
                for name in names
                if (self.checkpoint_dir / name).exists()
            ]
        return list({path.name: path for path in reversed(files)}.values())


def _init(
    config: DecoderConfig | EncoderConfig,
    name: str,
    tensor: torch.Tensor,
    generator: torch.Generator,
) -> None:
    init_tensor_(name, tensor, generator, config)
