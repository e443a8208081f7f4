"""Sources of a model's initial weights: a Hugging Face folder, or seeded random numbers.

A source returns slices, so that every rank reads only what it keeps.
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from torchtune_cp.checkpointing.folder import (
    CheckpointFiles,
    TensorEntry,
    read_headers,
    unread_weights,
)
from torchtune_cp.checkpointing.safetensors_format import DTYPE_NAMES, WEIGHT_DTYPES
from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.errors import UserError

_FLOAT_DTYPES = {DTYPE_NAMES[dtype]: dtype for dtype in WEIGHT_DTYPES}
_MAX_LISTED = 8
#: Copies of the embedding that a folder may hold where the model has none of its own, and of what.
_TIED_TO = {
    "lm_head.weight": "model.embed_tokens.weight",
    "lm_head.decoder.weight": "esm.embeddings.word_embeddings.weight",
}
_PIECE_ROWS = 4096

log = logging.getLogger(__name__)


class WeightSource(Protocol):
    """Anything that can return a slice of a model's parameter."""

    def read(
        self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]
    ) -> torch.Tensor:  # pragma: no cover - protocol
        """Return `parameter[offsets[0] : offsets[0] + shape[0], ...]` on the CPU.

        Args:
            name: The parameter's name in this package's models.
            offsets: First index in every dimension.
            shape: Size of the slice in every dimension.
        """
        ...


class HFFolderSource:
    """Weights in the safetensors files of a Hugging Face folder, read slice by slice.

    Files are opened when first asked for and stay open; only the bytes of the asked slices are
    read.
    """

    def __init__(
        self,
        checkpoint_dir: str | Path,
        to_hf_name: Callable[[str], str],
        checkpoint_files: CheckpointFiles | None = None,
    ) -> None:
        """Read the headers.

        Args:
            checkpoint_dir: The folder.
            to_hf_name: Gives the name in the files for a name in the model.
            checkpoint_files: See `check_folder`.

        Raises:
            UserError: The folder is not whole.
        """
        self.checkpoint_dir = expand_home(checkpoint_dir)
        self._to_hf_name = to_hf_name
        headers = read_headers(checkpoint_dir, checkpoint_files)
        # As transformers reads them; its version 5.24 writes layer norms under their oldest names.
        self._stored = {
            name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
                "LayerNorm.beta", "LayerNorm.bias"
            ): name
            for name in headers
        }
        self._tensors = {name: headers[stored] for name, stored in self._stored.items()}
        if len(self._stored) < len(headers):
            doubled = sorted(set(headers) - set(self._stored.values()))
            raise UserError(
                f"{checkpoint_dir} holds {', '.join(doubled)} a second time under a newer name"
            )
        self._open_files: dict[Path, Any] = {}
        self._is_copy: dict[str, bool] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type that holds most of the weights' bytes."""
        sizes: dict[str, int] = {}
        for _, entry in self._tensors.values():
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.num_bytes
        floats = {name: size for name, size in sizes.items() if name in _FLOAT_DTYPES}
        if not floats:
            raise UserError(
                f"{self.checkpoint_dir} holds no floating-point weights ({', '.join(sizes)})"
            )
        return _FLOAT_DTYPES[max(floats, key=lambda name: floats[name])]

    def _find(self, name: str) -> tuple[str, Path, TensorEntry]:
        hf_name = self._to_hf_name(name)
        if hf_name not in self._tensors:
            raise UserError(f"{self.checkpoint_dir} holds no tensor {hf_name} (parameter {name})")
        path, entry = self._tensors[hf_name]
        if entry.dtype not in _FLOAT_DTYPES:
            raise UserError(
                f"tensor {hf_name} in {path} is stored as {entry.dtype}: quantised weights cannot "
                f"be fine-tuned; use a checkpoint in {', '.join(_FLOAT_DTYPES)}"
            )
        return hf_name, path, entry

    def read(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Return one slice of a parameter, in the type that the file holds, on the CPU.

        Args:
            name: The parameter's name in the model.
            offsets: First index in every dimension.
            shape: Size of the slice in every dimension.

        Raises:
            UserError: The tensor is missing, quantised, or the slice exceeds it.
        """
        hf_name, path, entry = self._find(name)
        ends = tuple(first + size for first, size in zip(offsets, shape, strict=True))
        if len(ends) != len(entry.shape) or any(
            end > size for end, size in zip(ends, entry.shape, strict=True)
        ):
            raise UserError(
                f"tensor {hf_name} in {path} has shape {list(entry.shape)}; the model needs at "
                f"least {list(ends)}: config.json (or the model's arguments) and the weights do "
                "not belong together"
            )
        if 0 in shape:
            return torch.empty(shape, dtype=_FLOAT_DTYPES[entry.dtype])
        try:
            file = self._open(path)
            if not shape:
                return file.get_tensor(self._stored[hf_name])
            window = tuple(slice(first, end) for first, end in zip(offsets, ends, strict=True))
            return file.get_slice(self._stored[hf_name])[window]
        except (SafetensorError, OSError) as error:
            raise UserError(f"cannot read tensor {hf_name} from {path}: {error}") from error

    def _open(self, path: Path) -> Any:
        if path not in self._open_files:
            self._open_files[path] = safe_open(path, framework="pt", device="cpu")
        return self._open_files[path]

    def __contains__(self, hf_name: object) -> bool:
        """Whether the folder holds a tensor of that name in Hugging Face's checkpoints."""
        return hf_name in self._tensors

    def __getitem__(self, hf_name: str) -> torch.Tensor:
        """A whole tensor by its name in the folder, as stored, on the CPU.

        Raises:
            UserError: The file cannot be read.
        """
        path, _ = self._tensors[hf_name]
        try:
            return self._open(path).get_tensor(self._stored[hf_name])
        except (SafetensorError, OSError) as error:
            raise UserError(f"cannot read tensor {hf_name} from {path}: {error}") from error

    def has_other_output(self, hf_name: str = "lm_head.weight") -> bool:
        """Whether the folder holds an output weight that is not a copy of its embedding.

        Args:
            hf_name: The output weight's name in the folder.
        """
        of = _TIED_TO[hf_name]
        if hf_name not in self._tensors or of not in self._tensors:
            return False
        if hf_name not in self._is_copy:
            self._is_copy[hf_name] = self._equal(hf_name, of)
        return not self._is_copy[hf_name]

    def _equal(self, one: str, other: str) -> bool:
        (path, entry), (other_path, other_entry) = self._tensors[one], self._tensors[other]
        if entry.shape != other_entry.shape or len(entry.shape) != 2:
            return False
        try:
            a = self._open(path).get_slice(self._stored[one])
            b = self._open(other_path).get_slice(self._stored[other])
            return all(
                torch.equal(
                    a[row : row + _PIECE_ROWS].to(self.dtype),
                    b[row : row + _PIECE_ROWS].to(self.dtype),
                )
                for row in range(0, entry.shape[0], _PIECE_ROWS)
            )
        except (SafetensorError, OSError) as error:
            raise UserError(f"cannot read tensor {one} or {other}: {error}") from error

    def check_names(
        self,
        shapes: Mapping[str, Sequence[int]],
        is_ignored: Callable[[str], bool] = lambda name: False,
        is_read: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Compare the files with the model; report all differences together.

        Ignored, with a line in the log, are `rotary_emb.inv_freq` (computed here, stored by old files)
        and, where the model ties its output to the embedding, a stored copy of that.

        Args:
            shapes: The model's parameter names and full shapes.
            is_ignored: Says of a tensor's name in the folder whether to ignore it, too.
            is_read: Says whether a tensor that is no parameter is used all the same.

        Raises:
            UserError: Tensors are missing, unexpected, quantised or of another shape, or a tied output
                weight is not the embedding.
        """
        wanted = {self._to_hf_name(name): tuple(shape) for name, shape in shapes.items()}
        missing = [name for name in wanted if name not in self._tensors]
        others = [name for name in self._tensors if name not in wanted and not is_read(name)]
        ignored = [
            name
            for name in others
            if name.endswith("rotary_emb.inv_freq") or name in _TIED_TO or is_ignored(name)
        ]
        unexpected = [name for name in others if name not in ignored]
        untied = [name for name in ignored if name in _TIED_TO and self.has_other_output(name)]
        other_shape = [
            f"{name} is {list(self._tensors[name][1].shape)} in {self._tensors[name][0].name}, "
            f"{list(shape)} in the model"
            for name, shape in wanted.items()
            if name in self._tensors and self._tensors[name][1].shape != shape
        ]
        quantised = [
            f"{name} ({self._tensors[name][1].dtype})"
            for name in wanted
            if name in self._tensors and self._tensors[name][1].dtype not in _FLOAT_DTYPES
        ]
        problems = [
            f"{title}: {', '.join(found[:_MAX_LISTED])}"
            + (f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else "")
            for title, found in (
                ("missing", missing),
                ("unexpected", unexpected),
                ("other shape", other_shape),
                ("not the embedding, to which the model ties it", untied),
                ("quantised, which cannot be fine-tuned", quantised),
            )
            if found
        ]
        if problems:
            raise UserError(
                f"the weights in {self.checkpoint_dir} do not match the model: "
                f"{'; '.join(problems)}"
            )
        if ignored:
            log.info("%s: not used, as in transformers: %s", self.checkpoint_dir, _grouped(ignored))
        files = {path for path, _ in self._tensors.values()}
        if unread := unread_weights(self.checkpoint_dir, files):
            log.info("%s: files that are not read: %s", self.checkpoint_dir, ", ".join(unread))

    def close(self) -> None:
        """Close the files; they open again at the next read."""
        self._open_files.clear()


def _grouped(names: Sequence[str]) -> str:
    """Names without their layer number, with the number of occurrences."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return ", ".join(name if count == 1 else f"{name} ({count})" for name, count in counts.items())


class RandomSource:
    """Random weights that depend on the seed and the parameter's name, only.

    Every parameter is generated whole on the CPU with a separate generator and then cut, so every
    mesh, rank and order of reading starts from the same model. The last one is kept: a parameter
    cut along several dimensions is read in several slices.
    """

    def __init__(
        self,
        seed: int,
        shapes: Mapping[str, Sequence[int]],
        init: Callable[[str, torch.Tensor, torch.Generator], object],
    ) -> None:
        """Keep the recipe for the weights; nothing is generated yet.

        Args:
            seed: The run's seed.
            shapes: Parameter names and full shapes.
            init: Fills a tensor in place: `init(name, tensor, generator)`.
        """
        self.seed = seed
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._init = init
        self._last: tuple[str, torch.Tensor] | None = None

    def _full(self, name: str) -> torch.Tensor:
        if self._last is not None and self._last[0] == name:
            return self._last[1]
        # Python's hash() differs from process to process.
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        tensor = torch.empty(self._shapes[name], dtype=torch.float32)
        with torch.no_grad():
            self._init(name, tensor, generator)
        self._last = (name, tensor)
        return tensor

    def read(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Return one slice of a parameter, fp32 on the CPU.

        Args:
            name: The parameter's name in the model.
            offsets: First index in every dimension.
            shape: Size of the slice in every dimension.
        """
        full = self._full(name)
        assert all(
            first + size <= whole
            for first, size, whole in zip(offsets, shape, full.shape, strict=True)
        ), f"{name}: slice {shape} at {offsets} leaves {tuple(full.shape)}"
        window = tuple(
            slice(first, first + size) for first, size in zip(offsets, shape, strict=True)
        )
        return full[window].clone()
