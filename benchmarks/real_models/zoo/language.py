"""Transformers with their own outputs: transformers, x-transformers."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.real_models.case import Case, Entry
from benchmarks.real_models.losses import CLASSES, images, labels, of_logits, tokens, tokens_loss

VOCABULARY = 99
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
VIT: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def _made(model: str, config: str, options: dict[str, Any]) -> Any:
    package = importlib.import_module("transformers")
    return getattr(package, model)(getattr(package, config)(**options))


def causal(model: str, config: str, n: int, labelled: bool = False, length: int = 12, **options: Any) -> Case:
    """A model that predicts tokens.  labelled: it is given labels and returns its own loss."""
    module = _made(model, config, options)
    ids = tokens(n, length, VOCABULARY)
    if labelled:
        return Case(module, {"input_ids": ids, "labels": ids.clone()})
    return Case(module, {"input_ids": ids}, tokens(n, length, VOCABULARY), of_logits)


def classifier(model: str, config: str, n: int, **options: Any) -> Case:
    """A model that classifies sequences, some of which are padded."""
    module = _made(model, config, {**options, "num_labels": CLASSES})
    ids = tokens(n, 12, VOCABULARY)
    mask = ids.new_ones(n, 12)
    mask[::2, 9:] = 0
    return Case(module, {"input_ids": ids, "attention_mask": mask}, labels(n), of_logits)


def images_of(model: str, config: str, n: int, **options: Any) -> Case:
    """A model that classifies images."""
    module = _made(model, config, {**options, "num_labels": CLASSES})
    return Case(module, {"pixel_values": images(n, 32)}, labels(n), of_logits)


def _wav2vec2(n: int, head: str = "sequence") -> Case:
    options = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "conv_dim": (16, 16),
        "conv_stride": (5, 4),
        "conv_kernel": (10, 8),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "apply_spec_augment": False,
        "layerdrop": 0.0,
        "vocab_size": 20,
        "classifier_proj_size": 16,
        "num_labels": CLASSES,
    }
    waves = torch.randn(n, 800)
    if head == "ctc":
        module = _made("Wav2Vec2ForCTC", "Wav2Vec2Config", options)
        return Case(module, {"input_values": waves, "labels": torch.randint(1, 20, (n, 4))})
    module = _made("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", options)
    return Case(module, {"input_values": waves}, labels(n), of_logits)


def _whisper(n: int) -> Case:
    options = {
        "vocab_size": VOCABULARY,
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "max_target_positions": 24,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        **{k: v for k, v in BART.items() if k not in ("vocab_size", "max_position_embeddings")},
    }
    module = _made("WhisperForConditionalGeneration", "WhisperConfig", options)
    return Case(module, {"input_features": torch.randn(n, 8, 32), "labels": tokens(n, 6, VOCABULARY)})


def in_batch(output: Any, target: Tensor) -> Tensor:
    """CLIP's loss: each text against all images of the batch."""
    logits = output.logits_per_text
    wanted = torch.arange(logits.shape[0], device=logits.device)
    cross_entropy = torch.nn.functional.cross_entropy
    return (cross_entropy(logits, wanted) + cross_entropy(logits.t(), wanted)) / 2 + 0 * target.sum()


def _clip(n: int) -> Case:
    package = importlib.import_module("transformers")
    text = package.CLIPTextConfig(**{k: v for k, v in SMALL.items() if k != "pad_token_id"}, eos_token_id=98)
    vision = package.CLIPVisionConfig(**VIT, intermediate_size=48)
    config = package.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
    inputs = {"input_ids": tokens(n, 12, VOCABULARY), "pixel_values": images(n, 32)}
    return Case(package.CLIPModel(config), inputs, torch.zeros(n), in_batch)


def _timeseries(n: int) -> Case:
    options = {
        "num_input_channels": 3,
        "context_length": 32,
        "patch_length": 8,
        "patch_stride": 8,
        "prediction_length": 8,
        "d_model": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 24,
    }
    module = _made("PatchTSTForPrediction", "PatchTSTConfig", options)
    return Case(module, {"past_values": torch.randn(n, 32, 3), "future_values": torch.randn(n, 8, 3)})


def x_transformer(n: int) -> Case:
    """A decoder with rotary positions."""
    package = importlib.import_module("x_transformers")
    layers = package.Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True)
    module = package.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=16, attn_layers=layers)
    return Case(module, tokens(n, 12, VOCABULARY), tokens(n, 12, VOCABULARY), tokens_loss)


def x_autoregressive(n: int) -> Case:
    """A wrapper that shifts its input and returns the loss."""
    package = importlib.import_module("x_transformers")
    layers = package.Decoder(dim=32, depth=2, heads=4, alibi_pos_bias=True, ff_glu=True, attn_dropout=0.1)
    module = package.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=16, attn_layers=layers)
    return Case(package.AutoregressiveWrapper(module), tokens(n, 12, VOCABULARY))


def _entry(make: Any, *args: Any, shows: str = "", **options: Any) -> Entry:
    return Entry("transformers", partial(make, *args, **options), shows)


GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MAMBA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 4,
    "use_mambapy": False,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_key_value_heads": 2,
}

MODELS = {
    "bert": _entry(classifier, "BertForSequenceClassification", "BertConfig", **SMALL),
    "distilbert": _entry(
        classifier,
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        vocab_size=VOCABULARY,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=48,
    ),
    "roberta": _entry(causal, "RobertaForMaskedLM", "RobertaConfig", **SMALL, shows="positions by cumsum"),
    "albert": _entry(
        classifier, "AlbertForSequenceClassification", "AlbertConfig", **SMALL, embedding_size=16, shows="shared layers"
    ),
    "deberta_v2": _entry(
        classifier,
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        **SMALL,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        shows="scripted functions",
    ),
    "gpt2": _entry(causal, "GPT2LMHeadModel", "GPT2Config", **GPT2, tie_word_embeddings=False),
    "gpt2_labels": _entry(causal, "GPT2LMHeadModel", "GPT2Config", labelled=True, **GPT2, shows="labels and .loss"),
    "gpt_neox": _entry(causal, "GPTNeoXForCausalLM", "GPTNeoXConfig", **SMALL, shows="sizes of moved tensors"),
    "llama": _entry(causal, "LlamaForCausalLM", "LlamaConfig", **SMALL, shows="sizes of moved tensors"),
    "opt": _entry(
        causal,
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=48,
        max_position_embeddings=64,
        layerdrop=0.1,
        shows="LayerDrop",
    ),
    "bloom": _entry(
        causal, "BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4
    ),
    "mamba": _entry(causal, "MambaForCausalLM", "MambaConfig", **MAMBA, shows="is_compiling"),
    "mixtral": _entry(
        causal,
        "MixtralForCausalLM",
        "MixtralConfig",
        **SMALL,
        num_local_experts=4,
        num_key_value_heads=2,
        shows="is_compiling, experts",
    ),
    "qwen2_moe": _entry(
        causal,
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        **SMALL,
        **EXPERTS,
        shared_expert_intermediate_size=24,
        shows="is_compiling, experts",
    ),
    "switch_transformer": _entry(
        causal,
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        labelled=True,
        **T5,
        num_decoder_layers=2,
        num_experts=4,
        shows="is_compiling, experts",
    ),
    "t5": _entry(causal, "T5ForConditionalGeneration", "T5Config", labelled=True, **T5, shows="labels and .loss"),
    "bart": _entry(
        causal, "BartForConditionalGeneration", "BartConfig", labelled=True, **BART, shows="encoder and decoder"
    ),
    "whisper": _entry(_whisper, shows="speech, labels and .loss"),
    "wav2vec2": _entry(_wav2vec2, shows="weight norm"),
    "wav2vec2_ctc": _entry(partial(_wav2vec2, head="ctc"), shows="ctc_loss"),
    "hf_vit": _entry(images_of, "ViTForImageClassification", "ViTConfig", **VIT, intermediate_size=48),
    "hf_convnext": _entry(
        images_of,
        "ConvNextForImageClassification",
        "ConvNextConfig",
        hidden_sizes=[8, 12, 16, 24],
        depths=[1, 1, 1, 1],
        drop_path_rate=0.1,
        shows="DropPath",
    ),
    "clip": _entry(_clip, shows="B x B logits"),
    "patchtst": _entry(_timeseries, shows="time series"),
    "x_transformers_decoder": Entry("x-transformers", x_transformer, "sizes of moved tensors"),
    "x_transformers_autoregressive": Entry("x-transformers", x_autoregressive, "loss returned"),
}
