"""Images to images, noise and volumes: segmentation-models-pytorch, monai, diffusers, vit-pytorch."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.real_models.case import Case, Entry
from benchmarks.real_models.losses import CLASSES, classes, energy, images, labels


def pixels(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of every pixel."""
    return F.cross_entropy(output, target)


def noise(output: Any, target: Tensor) -> Tensor:
    """Mean squared error of a predicted sample."""
    return F.mse_loss(output.sample, target)


def _segmentation(name: str, n: int, **options: Any) -> Case:
    package = importlib.import_module("segmentation_models_pytorch")
    module = getattr(package, name)(encoder_weights=None, classes=3, **options)
    return Case(module, images(n, 64), torch.randint(3, (n, 64, 64)), pixels)


def _monai(name: str, size: tuple[int, ...], n: int, **options: Any) -> Case:
    nets = importlib.import_module("monai.networks.nets")
    return Case(getattr(nets, name)(**options), torch.randn(n, 1, *size), torch.rand(n), energy)


def _diffusion(name: str, n: int, **options: Any) -> Case:
    package = importlib.import_module("diffusers")
    module = getattr(package, name)(**options)
    inputs: dict[str, Any] = {"sample": images(n, 16), "timestep": torch.randint(1000, (n,))}
    if "cross_attention_dim" in options:
        inputs["encoder_hidden_states"] = torch.randn(n, 5, options["cross_attention_dim"])
    return Case(module, inputs, images(n, 16), noise)


def _dit(n: int) -> Case:
    package = importlib.import_module("diffusers")
    module = package.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        sample_size=16,
        patch_size=4,
        num_embeds_ada_norm=1000,
        norm_num_groups=4,
    )
    inputs = {
        "hidden_states": images(n, 16),
        "timestep": torch.randint(1000, (n,)),
        "class_labels": torch.randint(10, (n,)),
    }
    return Case(module, inputs, images(n, 16), noise)


def _vae(n: int) -> Case:
    package = importlib.import_module("diffusers")
    module = package.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        norm_num_groups=4,
    )
    return Case(module, {"sample": images(n, 16)}, images(n, 16), noise)


def _lucidrains(file: str, name: str, n: int, size: int = 64, **options: Any) -> Case:
    module = getattr(importlib.import_module(f"vit_pytorch.{file}"), name)(**options)
    return Case(module, images(n, size), labels(n), classes)


def _entry(package: str, make: Any, *args: Any, shows: str = "", **options: Any) -> Entry:
    return Entry(package, partial(make, *args, **options), shows)


SMP = "segmentation-models-pytorch"
UNET: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 3,
    "out_channels": 3,
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}
PATCHES: dict[str, Any] = {
    "image_size": 64,
    "patch_size": 16,
    "num_classes": CLASSES,
    "dim": 32,
    "depth": 2,
    "heads": 4,
    "mlp_dim": 48,
}

MODELS = {
    "smp_unet": _entry(
        SMP, _segmentation, "Unet", encoder_name="resnet18", encoder_depth=3, decoder_channels=(16, 8, 8)
    ),
    "smp_fpn": _entry(SMP, _segmentation, "FPN", encoder_name="mobilenet_v2", shows="Dropout2d"),
    "smp_segformer": _entry(SMP, _segmentation, "Segformer", encoder_name="mit_b0", shows="DropPath"),
    "monai_unet": _entry(
        "monai",
        _monai,
        "UNet",
        (16, 16, 16),
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        channels=(4, 8),
        strides=(2,),
        num_res_units=1,
    ),
    "monai_unetr": _entry(
        "monai",
        _monai,
        "UNETR",
        (32, 32),
        in_channels=1,
        out_channels=2,
        img_size=(32, 32),
        spatial_dims=2,
        feature_size=8,
        hidden_size=32,
        mlp_dim=48,
        num_heads=4,
        shows="InstanceNorm",
    ),
    "monai_segresnet": _entry(
        "monai",
        _monai,
        "SegResNet",
        (32, 32),
        spatial_dims=2,
        init_filters=8,
        dropout_prob=0.1,
        blocks_down=(1, 1),
        blocks_up=(1,),
    ),
    "monai_swin_unetr": _entry(
        "monai",
        _monai,
        "SwinUNETR",
        (64, 64),
        in_channels=1,
        out_channels=2,
        spatial_dims=2,
        feature_size=12,
        depths=(1, 1, 1, 1),
        num_heads=(1, 2, 2, 4),
        shows="InstanceNorm",
    ),
    "diffusers_unet": _entry(
        "diffusers",
        _diffusion,
        "UNet2DModel",
        **UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        shows="output object",
    ),
    "diffusers_unet_conditioned": _entry(
        "diffusers",
        _diffusion,
        "UNet2DConditionModel",
        **UNET,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=12,
        attention_head_dim=4,
        shows="branch on the batch size",
    ),
    "diffusers_dit": _entry("diffusers", _dit, shows="class dropout by torch.rand"),
    "diffusers_vae": _entry("diffusers", _vae, shows="output object"),
    "vit_pytorch_vit": _entry("vit-pytorch", _lucidrains, "vit", "ViT", **PATCHES, dropout=0.1),
    "vit_pytorch_cait": _entry(
        "vit-pytorch",
        _lucidrains,
        "cait",
        "CaiT",
        **PATCHES,
        cls_depth=1,
        layer_dropout=0.1,
        shows="LayerDrop",
    ),
    "vit_pytorch_simple": _entry("vit-pytorch", _lucidrains, "simple_vit", "SimpleViT", **PATCHES),
    "vit_pytorch_crossformer": _entry(
        "vit-pytorch",
        _lucidrains,
        "crossformer",
        "CrossFormer",
        size=224,
        num_classes=CLASSES,
        dim=(32, 32, 32, 32),
        depth=(1, 1, 1, 1),
    ),
    "vit_pytorch_patch_dropout": _entry(
        "vit-pytorch",
        _lucidrains,
        "vit_with_patch_dropout",
        "ViT",
        **PATCHES,
        patch_dropout=0.25,
        shows="random choice of patches",
    ),
}
