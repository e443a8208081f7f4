"""A real pretrained model: the whole of it, on real text, against transformers."""

import os
import sys
import typing
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open

from torchtune_cp.models import auto_model, to_hf_name

_FOLDER = Path(
    os.environ.get(
        "TORCHTUNE_CP_SMOLLM2",
        Path(__file__).parents[3] / ".quickstart" / "SmolLM2-135M-Instruct",
    )
)


@pytest.mark.slow
@pytest.mark.skipif(
    not (_FOLDER / "config.json").is_file(),
    reason=f"no model in {_FOLDER}: run `make quickstart`, or name a folder in TORCHTUNE_CP_SMOLLM2",
)
def test_smollm2_loss_on_real_text_is_that_of_transformers():
    reference = transformers.AutoModelForCausalLM.from_pretrained(_FOLDER, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(_FOLDER)
    text = Path(typing.__file__).read_text(encoding="utf-8")
    tokens = torch.tensor([tokenizer.encode(text, add_special_tokens=False)[:2048]])

    model = auto_model(_FOLDER)
    family = model.config.family
    with torch.no_grad():
        by_file = {}
        for file in _FOLDER.glob("*.safetensors"):
            with safe_open(file, "pt") as weights:
                by_file.update({name: weights.get_tensor(name) for name in weights.keys()})  # noqa: SIM118
        for name, parameter in model.named_parameters():
            parameter.copy_(by_file[to_hf_name(family, name)])
        expected = reference(tokens, use_cache=False).logits
        actual = model(tokens)

    loss, expected_loss = (
        F.cross_entropy(logits[0, :-1], tokens[0, 1:]).item() for logits in (actual, expected)
    )
    print(f"loss {loss:.4f}, transformers {expected_loss:.4f}")
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    if sys.version_info[:3] == (3, 11, 7):  # the text is this version's typing.py
        assert loss == pytest.approx(2.3530, abs=1e-4)
