"""Fine-tune language models on sequences too long for one device."""

__version__ = "0.1.0"
