"""A tokenizer that needs no files: one token per byte, for tiny configs and tests."""

from __future__ import annotations

import json

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from torchtune_cp.data.chat_templates import CHATML
from torchtune_cp.data.tokenizer import HFTokenizer

_BOS, _EOS, _PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
_SPECIAL_TOKENS = [_BOS, _EOS, _PAD, "<|im_start|>", "<|im_end|>"]
# 272 = 17 x 16: a size that the vocabulary can be cut at, by tensor-parallel degrees up to 16.
_VOCAB_SIZE = 272


def byte_tokenizer(max_seq_len: int | None = None) -> HFTokenizer:
    """Build the byte-level tokenizer.

    Token ids 0 to 255 are the bytes of the UTF-8 text; 256 begins a text, 257 ends it, 258 is
    padding, 259 and 260 begin and end a turn of a conversation (ChatML template), and up to 271
    tokens are reserved. Its files, written by `save`, load in transformers.

    Args:
        max_seq_len: The length that datasets cut samples to; None = no limit.
    """
    # GPT-2's printable stand-ins for the 256 bytes, in the order of the bytes.
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    reserved = range(_VOCAB_SIZE - 256 - len(_SPECIAL_TOKENS))
    specials = [*_SPECIAL_TOKENS, *(f"<|reserved_{i}|>" for i in reserved)]
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in specials]
    )
    tokenizer.post_processor = TemplateProcessing(
        single=f"{_BOS} $A",
        pair=f"{_BOS} $A {_BOS}:1 $B:1",
        special_tokens=[(_BOS, tokenizer.token_to_id(_BOS))],
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _BOS,
        "eos_token": _EOS,
        "pad_token": _PAD,
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }
    return HFTokenizer(
        tokenizer,
        config=config,
        chat_template=CHATML,
        max_seq_len=max_seq_len,
        generated_files=files,
        name="the byte tokenizer",
    )


def _byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte 0..255.

    Printable Latin-1 characters stand for themselves; the others get the code points from 256 on, in
    order (the mapping of GPT-2's tokenizer, Radford et al. 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
