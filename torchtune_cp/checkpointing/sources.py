"""Where a model's first weights come from: a Hugging Face folder, or seeded random numbers.

A source hands out slices, so that every rank reads only what it keeps.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from torchtune_cp.checkpointing.folder import CheckpointFiles, TensorEntry, read_headers
from torchtune_cp.errors import UserError

_FLOAT_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_MAX_LISTED = 8


class WeightSource(Protocol):
    """Anything that can hand out a slice of a model's parameter."""

    def read(
        self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]
    ) -> torch.Tensor:  # pragma: no cover - protocol
        """Return ``parameter[offsets[0] : offsets[0] + shape[0], ...]`` on the CPU.

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
            checkpoint_files: See :func:`~torchtune_cp.checkpointing.folder.check_folder`.

        Raises:
            UserError: The folder is not whole.
        """
        self.checkpoint_dir = Path(checkpoint_dir)
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
        self._open_files: dict[Path, Any] = {}

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
            UserError: The tensor is missing, quantised, or the slice does not lie within it.
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

    def check_names(
        self,
        shapes: Mapping[str, Sequence[int]],
        is_unused: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Compare the files with the model; report every difference at once.

        ``rotary_emb.inv_freq`` (computed here, stored by old files) is ignored, and so is
        ``lm_head.weight`` where the model ties it to its embeddings.

        Args:
            shapes: The model's parameter names and full shapes.
            is_unused: Says of a tensor's name in the folder whether to ignore it, too.

        Raises:
            UserError: Tensors are missing, unexpected, quantised or of another shape.
        """
        wanted = {self._to_hf_name(name): tuple(shape) for name, shape in shapes.items()}
        missing = [name for name in wanted if name not in self._tensors]
        unexpected = [
            name
            for name in self._tensors
            if name not in wanted
            and not name.endswith("rotary_emb.inv_freq")
            and name != "lm_head.weight"
            and not is_unused(name)
        ]
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
                ("quantised, which cannot be fine-tuned", quantised),
            )
            if found
        ]
        if problems:
            raise UserError(
                f"the weights in {self.checkpoint_dir} are not those of the model: "
                f"{'; '.join(problems)}"
            )

    def close(self) -> None:
        """Close the files; they open again at the next read."""
        self._open_files.clear()


class RandomSource:
    """Random weights that depend on the seed and the parameter's name, and on nothing else.

    Every parameter is generated whole on the CPU with a generator of its own and then cut, so every
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
            init: Fills a tensor in place: ``init(name, tensor, generator)``.
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
