"""Tiny configurations of packages: transformers, diffusers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.paper_models.case import Batch, Paper, ids, normal

VOCABULARY = 40


class Named(nn.Module):
    """A model of a package, called by names, of whose output one part is asked for."""

    def __init__(
        self, package: str, model: str, config: str, names: tuple[str, ...], output: str, **options: Any
    ) -> None:
        super().__init__()
        found = importlib.import_module(package)
        self.inner = (
            getattr(found, model)(getattr(found, config)(**options)) if config else getattr(found, model)(**options)
        )
        self.names, self.output = names, output

    def called(self, *inputs: Tensor) -> Tensor:
        """The part of the output, of inputs in the order of their names."""
        found: Tensor = getattr(self.inner(**dict(zip(self.names, inputs, strict=True))), self.output)
        return found


class One(Named):
    """A model of one input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.called(x)


class Two(Named):
    """A model of two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.called(x, y)


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
}


def tokens(n: int, generator: torch.Generator) -> Batch:
    """Tokens, and one wanted for each."""
    return (4 + ids(generator, VOCABULARY - 4, n, 7),), 4 + ids(generator, VOCABULARY - 4, n, 7)


def labelled_tokens(n: int, generator: torch.Generator) -> Batch:
    """Tokens with labels, of which some are ignored; the model returns the loss."""
    labels = 4 + ids(generator, VOCABULARY - 4, n, 6)
    return (4 + ids(generator, VOCABULARY - 4, n, 7), labels.masked_fill(ids(generator, 4, n, 6) == 0, -100)), None


def images(n: int, generator: torch.Generator) -> Batch:
    """Images and classes."""
    return (normal(generator, n, 3, 16, 16),), ids(generator, 2, n)


def speech(n: int, generator: torch.Generator) -> Batch:
    """Waves and classes."""
    return (normal(generator, n, 400),), ids(generator, 2, n)


def noisy(n: int, generator: torch.Generator) -> Batch:
    """Images, times, and noise."""
    return (normal(generator, n, 3, 16, 16), ids(generator, 1000, n)), normal(generator, n, 3, 16, 16)


def by_token(scores: Tensor, target: Tensor) -> Tensor:
    """Mean over all tokens."""
    return F.cross_entropy(scores.view(-1, scores.size(-1)), target.view(-1))


HF = "transformers"
UNET: dict[str, Any] = {
    "sample_size": 16,
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 4,
}


def _bert() -> nn.Module:
    return One(HF, "BertForMaskedLM", "BertConfig", ("input_ids",), "logits", **SMALL)


def _gpt2() -> nn.Module:
    return One(
        HF,
        "GPT2LMHeadModel",
        "GPT2Config",
        ("input_ids",),
        "logits",
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=2,
    )


def _t5() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return Two(
        HF, "T5ForConditionalGeneration", "T5Config", ("input_ids", "labels"), "loss", **sizes, decoder_start_token_id=0
    )


def _bart() -> nn.Module:
    return Two(HF, "BartForConditionalGeneration", "BartConfig", ("input_ids", "labels"), "loss", **ENCODER_DECODER)


def _vit() -> nn.Module:
    sizes = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    return One(
        HF, "ViTForImageClassification", "ViTConfig", ("pixel_values",), "logits", **sizes, image_size=16, patch_size=8
    )


def _wav2vec2() -> nn.Module:
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    more = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8}
    masks = {"mask_time_prob": 0.0, "layerdrop": 0.0}
    return One(
        HF,
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        ("input_values",),
        "logits",
        **SMALL,
        **convolutions,
        **more,
        **masks,
    )


def _unet() -> nn.Module:
    return Two("diffusers", "UNet2DModel", "", ("sample", "timestep"), "sample", **UNET)


MODELS = {
    "bert": Paper("Devlin et al., BERT, 2019", _bert, tokens, by_token, package=HF),
    "gpt2": Paper(
        "Radford et al., Language Models are Unsupervised Multitask Learners, 2019", _gpt2, tokens, by_token, package=HF
    ),
    "t5": Paper("Raffel et al., Exploring the Limits of Transfer Learning, 2020", _t5, labelled_tokens, package=HF),
    "bart": Paper("Lewis et al., BART, 2020", _bart, labelled_tokens, package=HF),
    "vit": Paper("Dosovitskiy et al., An Image is Worth 16x16 Words, 2021", _vit, images, F.cross_entropy, package=HF),
    "wav2vec2": Paper("Baevski et al., wav2vec 2.0, 2020", _wav2vec2, speech, F.cross_entropy, package=HF),
    "unet2d": Paper(
        "Song et al., Score-Based Generative Modeling, 2021", _unet, noisy, F.mse_loss, package="diffusers"
    ),
}
