"""The ESM alphabet: one token per residue, no files needed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.pre_tokenizers import Split, WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.data.tokenizer import HFTokenizer
from torchtune_cp.errors import UserError

#: The 20 standard amino acids, in the order of the alphabet: most frequent first.
STANDARD_RESIDUES = "LAGVSERTIDPKQNFYMHWC"
#: The alphabet of ESM-1b, ESM-2 and transformers' EsmTokenizer; the place of a token is its id. After
#: the 20 amino acids: X any, B and Z either of two, U selenocysteine, O pyrrolysine, and what
#: alignments write for gaps.
ESM_ALPHABET = (
    *("<cls>", "<pad>", "<eos>", "<unk>"),
    *STANDARD_RESIDUES,
    *"XBUZO.-",
    *("<null_1>", "<mask>"),
)
_CLS, _PAD, _EOS, _UNK, _MASK = _SPECIALS = ("<cls>", "<pad>", "<eos>", "<unk>", "<mask>")


class EsmTokenizer(HFTokenizer):
    """`HFTokenizer` with what masked language modelling of proteins needs to know.

    Encodes as transformers' EsmTokenizer: a token per residue between `<cls>` (also the id that begins
    a text, `bos_id`) and `<eos>`; tokens written out (`<mask>`) are read as such; blanks separate; a
    run of characters outside the alphabet, lower case among them, is one `<unk>`. Datasets decide
    about such characters before they encode, see `protein_dataset`.

    Attributes:
        unk_id: What stands for characters outside the alphabet.
        mask_id: The mask token.
        special_ids: `<cls>`, `<pad>`, `<eos>`, `<unk>` and `<mask>`: never masked, never drawn.
        standard_ids: The 20 amino acids' ids.
        residues: The characters of the alphabet.
        one_token_a_residue: Whether every token that is not written in ``<>`` is one character.
    """

    def __init__(
        self, vocabulary: Sequence[str], *, max_seq_len: int | None = None, name: str
    ) -> None:
        """Build the tokenizer; users call `esm_tokenizer`.

        Args:
            vocabulary: All tokens; the place of a token is its id.
            max_seq_len: See `HFTokenizer`.
            name: What error messages call this tokenizer.

        Raises:
            UserError: Special tokens or amino acids are missing, or tokens repeat.
        """
        missing = [t for t in (*_SPECIALS, *STANDARD_RESIDUES) if t not in vocabulary]
        if missing or len(set(vocabulary)) != len(vocabulary):
            what = f"lacks {', '.join(missing)}" if missing else "holds a token twice"
            raise UserError(f"{name} {what}; it must be an ESM alphabet, one token a line")
        ids = {token: place for place, token in enumerate(vocabulary)}
        tokenizer = Tokenizer(WordLevel(vocab=ids, unk_token=_UNK))
        # Tokens, or runs without one; blanks fall away.
        tokens = "|".join(re.escape(t) for t in sorted(vocabulary, key=len, reverse=True))
        tokenizer.pre_tokenizer = PreTokenizers(
            [WhitespaceSplit(), Split(Regex(tokens), behavior="isolated")]
        )
        tokenizer.decoder = Fuse()
        tokenizer.add_special_tokens(
            [AddedToken(text, special=True, normalized=False) for text in _SPECIALS]
        )
        tokenizer.post_processor = TemplateProcessing(
            single=f"{_CLS} $A {_EOS}",
            pair=f"{_CLS} $A {_EOS} $B:1 {_EOS}:1",
            special_tokens=[(_CLS, ids[_CLS]), (_EOS, ids[_EOS])],
        )
        specials = {
            "cls_token": _CLS,
            "pad_token": _PAD,
            "eos_token": _EOS,
            "unk_token": _UNK,
            "mask_token": _MASK,
        }
        config = {
            **specials,
            "tokenizer_class": "EsmTokenizer",
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        }
        super().__init__(
            tokenizer,
            # Here <cls> begins a text; transformers knows it by its own name only.
            config={**config, "bos_token": _CLS},
            chat_template=None,
            max_seq_len=max_seq_len,
            generated_files={
                "vocab.txt": "\n".join(vocabulary),
                "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
                "special_tokens_map.json": json.dumps(specials, indent=2) + "\n",
            },
            name=name,
        )
        self.unk_id = ids[_UNK]
        self.mask_id = ids[_MASK]
        self.special_ids = frozenset(ids[token] for token in _SPECIALS)
        self.standard_ids = tuple(ids[residue] for residue in STANDARD_RESIDUES)
        self._id_of = {token: place for token, place in ids.items() if len(token) == 1}
        self.residues = frozenset(self._id_of)
        self.one_token_a_residue = all(
            len(token) == 1 or token.startswith("<") for token in vocabulary
        )

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Token ids of a sequence; see the class.

        Args:
            text: Residues; tokens such as `<mask>` written out are read as such.
            add_bos: Begin with `<cls>`.
            add_eos: End with `<eos>`.

        Returns:
            The ids, never cut to `max_seq_len`.
        """
        if not self.one_token_a_residue or not self.residues.issuperset(text):
            return super().encode(text, add_bos=add_bos, add_eos=add_eos)
        # Residues and nothing else: looked up, which is some twenty times faster.
        ids = [self._id_of[residue] for residue in text]
        if add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids


def esm_tokenizer(path: str | Path | None = None, max_seq_len: int | None = None) -> EsmTokenizer:
    """Build the tokenizer of the ESM models.

    Args:
        path: A folder with a `vocab.txt`, one token a line, such as a published checkpoint's, or that
            file; None takes the built-in alphabet, which is the same for all published ESM-2 models.
        max_seq_len: The length that datasets cut samples to, `<cls>` and `<eos>` included; None = no
            limit.

    Raises:
        UserError: The file cannot be read, or is no ESM alphabet.
    """
    if path is None:
        return EsmTokenizer(ESM_ALPHABET, max_seq_len=max_seq_len, name="the ESM alphabet")
    file = expand_home(path)
    if file.is_dir():
        file = file / "vocab.txt"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"tokenizer.path={str(path)!r}: cannot read {file} ({error}); give a folder with an ESM "
            "model's vocab.txt, or null for the built-in alphabet"
        ) from error
    return EsmTokenizer([line.strip() for line in lines], max_seq_len=max_seq_len, name=str(file))
