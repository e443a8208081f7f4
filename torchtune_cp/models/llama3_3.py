"""Llama 3.3: new weights for the sizes of Llama 3.1 70B."""

from torchtune_cp.models.llama3_1 import llama3_1_70b
from torchtune_cp.models.transformer import TransformerDecoder

__all__ = ["llama3_3_70b"]


def llama3_3_70b() -> TransformerDecoder:
    """Build Llama 3.3 70B."""
    return llama3_1_70b()
