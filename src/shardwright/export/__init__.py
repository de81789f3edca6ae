"""What other programs can use: Hugging Face directories."""

from shardwright.export.huggingface import save_pretrained

__all__ = ["save_pretrained"]
