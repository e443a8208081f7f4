"""Names of the files that make up a Hugging Face tokenizer; they lie beside a model's own."""

from __future__ import annotations

TEMPLATE_FILE = "chat_template.jinja"
#: Chat templates beside the default one, a file each.
TEMPLATES_FOLDER = "additional_chat_templates"
#: What is copied beside a model that is saved.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.json",
    TEMPLATE_FILE,
    TEMPLATES_FOLDER,
)
