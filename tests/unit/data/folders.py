"""Small tokenizer folders, trained on the spot, as Hugging Face checkpoints have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from tokenizers.processors import Sequence, TemplateProcessing

CORPUS = [
    "The quick brown fox jumps over the lazy dog. What time is it in London?",
    "It is 10:00 AM in London. Be brief. Who wrote Hamlet? Shakespeare wrote Hamlet.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))",
    "Größe, naïve café, 東京 and a snowman ☃ are not ASCII.",
] * 5

# The templates below are written as published checkpoints write theirs.
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
CHATML_DEFAULT_SYSTEM = (
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n"
    "{%- else %}\n"
    "    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}\n"
    "{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'user' or message.role == 'assistant' or not loop.first %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + "
    "'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% endif %}"
    "{% endfor %}"
)
# The reasoning of all but the last assistant turn is dropped, so earlier turns read otherwise in a
# longer conversation, as in Qwen3.
REASONING = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{%- for message in messages %}"
    "{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_SPECIAL_TOKENS = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

SPECIALS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|im_start|>",
    "<|im_end|>",
]


def byte_level_folder(
    folder: Path,
    *,
    post_processor_adds_bos: bool = True,
    config: dict[str, Any] | None = None,
) -> Path:
    """A byte-level BPE tokenizer like Llama 3's or Qwen's."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    processors: list[Any] = [ByteLevelProcessor(trim_offsets=True)]
    if post_processor_adds_bos:
        bos = "<|begin_of_text|>"
        processors.append(
            TemplateProcessing(
                single=f"{bos}:0 $A:0",
                pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
                special_tokens=[(bos, tokenizer.token_to_id(bos))],
            )
        )
    tokenizer.post_processor = Sequence(processors)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is None:
        config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    write_config(folder, {"tokenizer_class": "PreTrainedTokenizerFast", **config})
    return folder


def metaspace_folder(folder: Path, *, config: dict[str, Any] | None = None) -> Path:
    """A sentencepiece-like BPE tokenizer like Llama 2's or Mistral's: word pieces begin with ▁."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(CORPUS), trainer)
    state = json.loads(tokenizer.to_str())
    # Byte tokens are ordinary vocabulary, only the three are special.
    state["added_tokens"] = [
        t for t in state["added_tokens"] if t["content"] in ("<unk>", "<s>", "</s>")
    ]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is None:
        config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_config(folder, {"tokenizer_class": "PreTrainedTokenizerFast", **config})
    return folder


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def set_template(folder: Path, template: str) -> Path:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    write_config(folder, {**config, "chat_template": template})
    return folder
