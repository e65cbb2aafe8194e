"""Transformers with their own outputs: transformers, x-transformers."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from benchmarks.real_models.case import Case, Entry
from benchmarks.real_models.losses import CLASSES, labels, of_logits, tokens, tokens_loss

VOCABULARY = 99
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def hugging_face(model: str, config: str, n: int, labelled: bool = False, length: int = 12, **options: Any) -> Case:
    """A causal language model.  labelled: it is given labels and returns its own loss."""
    package = importlib.import_module("transformers")
    module = getattr(package, model)(getattr(package, config)(**options))
    ids = tokens(n, length, VOCABULARY)
    if labelled:
        return Case(module, {"input_ids": ids, "labels": ids})
    return Case(module, {"input_ids": ids}, tokens(n, length, VOCABULARY), of_logits)


def _bert(n: int) -> Case:
    package = importlib.import_module("transformers")
    module = package.BertForSequenceClassification(package.BertConfig(**SMALL, num_labels=CLASSES))
    ids = tokens(n, 12, VOCABULARY)
    mask = ids.new_ones(n, 12)
    mask[::2, 9:] = 0
    return Case(module, {"input_ids": ids, "attention_mask": mask}, labels(n), of_logits)


def _x_transformer(n: int) -> Case:
    package = importlib.import_module("x_transformers")
    layers = package.Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True)
    module = package.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=16, attn_layers=layers)
    return Case(module, tokens(n, 12, VOCABULARY), tokens(n, 12, VOCABULARY), tokens_loss)


def _entry(make: Any, *args: Any, shows: str = "", **options: Any) -> Entry:
    return Entry("transformers", partial(make, *args, **options), shows)


MODELS = {
    "bert": _entry(_bert),
    "gpt2": _entry(
        hugging_face,
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
    ),
    "llama": _entry(hugging_face, "LlamaForCausalLM", "LlamaConfig", **SMALL, shows="sizes of moved tensors"),
    "x_transformers_decoder": Entry("x-transformers", _x_transformer, "sizes of moved tensors"),
}
