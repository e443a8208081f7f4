"""Datasets that configs name: rows -> token lists with labels."""

from torchtune_cp.datasets.alpaca import alpaca_cleaned_dataset, alpaca_dataset
from torchtune_cp.datasets.chat import chat_dataset
from torchtune_cp.datasets.example_proteins import example_protein_dataset
from torchtune_cp.datasets.instruct import instruct_dataset
from torchtune_cp.datasets.packed import PackedDataset, PackStats
from torchtune_cp.datasets.protein import protein_dataset
from torchtune_cp.datasets.sample_stream import SampleStream, StreamPlace
from torchtune_cp.datasets.sft import DatasetStats, SFTDataset
from torchtune_cp.datasets.streamed_batches import StreamedBatches
from torchtune_cp.datasets.text_completion import text_completion_dataset
from torchtune_cp.datasets.text_folder import text_folder_dataset

#: What a config may name, by key; see `torchtune_cp.config.allow`.
COMPONENTS = {
    "dataset": (
        "alpaca_cleaned_dataset",
        "alpaca_dataset",
        "chat_dataset",
        "example_protein_dataset",
        "instruct_dataset",
        "protein_dataset",
        "text_completion_dataset",
        "text_folder_dataset",
    )
}

__all__ = [
    "DatasetStats",
    "PackStats",
    "PackedDataset",
    "SFTDataset",
    "SampleStream",
    "StreamPlace",
    "StreamedBatches",
    "alpaca_cleaned_dataset",
    "alpaca_dataset",
    "chat_dataset",
    "example_protein_dataset",
    "instruct_dataset",
    "protein_dataset",
    "text_completion_dataset",
    "text_folder_dataset",
]
