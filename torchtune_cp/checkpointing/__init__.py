"""Weights in and out: Hugging Face folders read and written slice by slice."""

from torchtune_cp.checkpointing.folder import check_folder
from torchtune_cp.checkpointing.hf_checkpointer import FullModelHFCheckpointer
from torchtune_cp.checkpointing.hf_safetensors import save_hf_folder
from torchtune_cp.checkpointing.rank_sync import RankSync, RemoteError
from torchtune_cp.checkpointing.sources import HFFolderSource, RandomSource, WeightSource

#: What a config may name, by key; see `torchtune_cp.config.allow`.
COMPONENTS = {"checkpointer": ("FullModelHFCheckpointer",)}

__all__ = [
    "FullModelHFCheckpointer",
    "HFFolderSource",
    "RandomSource",
    "RankSync",
    "RemoteError",
    "WeightSource",
    "check_folder",
    "save_hf_folder",
]
