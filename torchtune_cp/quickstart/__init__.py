"""The quickstart: fine-tunes a small pretrained model on long files, without any preparation."""
