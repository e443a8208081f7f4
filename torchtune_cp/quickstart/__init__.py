"""The quickstart: fine-tunes a small pretrained model on long files, with nothing to prepare."""
