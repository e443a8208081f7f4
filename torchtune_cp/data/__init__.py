"""From text to batches: tokenizers, chat messages, collation, and the data loader."""

from torchtune_cp.data.buckets import bucket_length, bucketed
from torchtune_cp.data.byte_tokenizer import byte_tokenizer
from torchtune_cp.data.collate import CROSS_ENTROPY_IGNORE_IDX, collate, padded_collate_sft
from torchtune_cp.data.cp_loader import CPDataLoader, create_cp_dataloader
from torchtune_cp.data.esm_tokenizer import EsmTokenizer, esm_tokenizer
from torchtune_cp.data.family_tokenizers import (
    llama2_tokenizer,
    llama3_tokenizer,
    mistral_tokenizer,
    qwen2_5_tokenizer,
    qwen2_tokenizer,
    qwen3_tokenizer,
)
from torchtune_cp.data.loader import TokenDataLoader, build_dataloader
from torchtune_cp.data.masked_dataset import MaskedDataset
from torchtune_cp.data.messages import (
    MaskingStrategy,
    Message,
    mask_messages,
)
from torchtune_cp.data.mlm import MLMMasking, mlm_masking
from torchtune_cp.data.mlm_collate import MaskedLMCollator
from torchtune_cp.data.resumable_loader import ResumableLoader
from torchtune_cp.data.sampler import GlobalBatchSampler
from torchtune_cp.data.token_budget import TokenBudgetDataset
from torchtune_cp.data.tokenizer import HFTokenizer, hf_tokenizer
from torchtune_cp.data.turns import parse_conversation
from torchtune_cp.distributed.context_parallel.cut import cut_for_ranks

#: What a config may name, by key; see `torchtune_cp.config.allow`.
COMPONENTS = {
    "collate_fn": ("collate", "padded_collate_sft"),
    "masking": ("mlm_masking",),
    "tokenizer": (
        "byte_tokenizer",
        "esm_tokenizer",
        "hf_tokenizer",
        "llama2_tokenizer",
        "llama3_tokenizer",
        "mistral_tokenizer",
        "qwen2_tokenizer",
        "qwen2_5_tokenizer",
        "qwen3_tokenizer",
    ),
}

__all__ = [
    "CROSS_ENTROPY_IGNORE_IDX",
    "CPDataLoader",
    "EsmTokenizer",
    "GlobalBatchSampler",
    "HFTokenizer",
    "MLMMasking",
    "MaskedDataset",
    "MaskedLMCollator",
    "MaskingStrategy",
    "Message",
    "ResumableLoader",
    "TokenBudgetDataset",
    "TokenDataLoader",
    "bucket_length",
    "bucketed",
    "build_dataloader",
    "byte_tokenizer",
    "collate",
    "create_cp_dataloader",
    "cut_for_ranks",
    "esm_tokenizer",
    "hf_tokenizer",
    "llama2_tokenizer",
    "llama3_tokenizer",
    "mask_messages",
    "mistral_tokenizer",
    "mlm_masking",
    "padded_collate_sft",
    "parse_conversation",
    "qwen2_5_tokenizer",
    "qwen2_tokenizer",
    "qwen3_tokenizer",
]
