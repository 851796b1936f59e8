"""A tiny Llama with random weights, its tokenizer, and the few sentences that it learns: a word follows another."""

from __future__ import annotations

from pathlib import Path

_WORDS = "<pad> <s> </s> <unk> what follows a b c d".split()

#: 128 sentences.
SENTENCES = [f"what follows {word} {after}" for word, after in zip("abcd", "bcda")] * 32


def save(folder: Path, hidden_size: int) -> None:
    """Write a model and its tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(_WORDS)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": len(_WORDS)}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **ids)).save_pretrained(folder)
