"""Classifiers of images: torchvision, timm, efficientnet-pytorch, pytorchcv."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch

from benchmarks.real_models.case import Case, Entry
from benchmarks.real_models.losses import CLASSES, classes, images, labels


def _torchvision(name: str, size: int, n: int, **options: Any) -> Case:
    models = importlib.import_module("torchvision.models")
    module = getattr(models, name)(weights=None, num_classes=CLASSES, **options)
    return Case(module, images(n, size), labels(n), classes)


def _swin(n: int) -> Case:
    models = importlib.import_module("torchvision.models.swin_transformer")
    module = models.SwinTransformer([4, 4], 16, [1, 2], [2, 4], [4, 4], stochastic_depth_prob=0.1, num_classes=CLASSES)
    return Case(module, images(n, 64), labels(n), classes)


def _timm(name: str, size: int, n: int, **options: Any) -> Case:
    timm = importlib.import_module("timm")
    module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    return Case(module, images(n, size), labels(n), classes)


def _naflexvit(n: int) -> Case:
    timm = importlib.import_module("timm")
    module = timm.create_model("naflexvit_base_patch16_gap", num_classes=CLASSES, depth=2, embed_dim=48, num_heads=4)
    coordinates = torch.stack([torch.arange(6) // 3, torch.arange(6) % 3], dim=1).expand(n, 6, 2).clone()
    valid = torch.ones(n, 6, dtype=torch.bool)
    valid[::2, 4:] = False
    batch = {"patches": torch.randn(n, 6, 768), "patch_coord": coordinates, "patch_valid": valid}
    return Case(module, (batch,), labels(n), classes)


def _efficientnet(n: int) -> Case:
    package = importlib.import_module("efficientnet_pytorch")
    module = package.EfficientNet.from_name(
        "efficientnet-b0", num_classes=CLASSES, image_size=64, drop_connect_rate=0.0
    )
    return Case(module, images(n, 64), labels(n), classes)


def _pytorchcv(name: str, size: int, n: int, **options: Any) -> Case:
    provider = importlib.import_module("pytorchcv.model_provider")
    return Case(provider.get_model(name, pretrained=False, **options), images(n, size), labels(n), classes)


def _entry(package: str, make: Any, *args: Any, shows: str = "", **options: Any) -> Entry:
    return Entry(package, partial(make, *args, **options), shows)


MODELS = {
    "alexnet": _entry("torchvision", _torchvision, "alexnet", 64),
    "resnet18": _entry("torchvision", _torchvision, "resnet18", 64),
    "densenet121": _entry("torchvision", _torchvision, "densenet121", 64),
    "mobilenet_v3_small": _entry("torchvision", _torchvision, "mobilenet_v3_small", 64, shows="float32 in verify"),
    "shufflenet_v2": _entry("torchvision", _torchvision, "shufflenet_v2_x0_5", 64, shows="float32 in verify"),
    "efficientnet_b0": _entry("torchvision", _torchvision, "efficientnet_b0", 64, shows="stochastic depth"),
    "squeezenet": _entry("torchvision", _torchvision, "squeezenet1_1", 64),
    "mnasnet": _entry("torchvision", _torchvision, "mnasnet0_5", 64),
    "googlenet": _entry(
        "torchvision", _torchvision, "googlenet", 64, aux_logits=False, init_weights=False, shows="output object"
    ),
    "swin": _entry("torchvision", _swin, shows="DropPath"),
    "timm_resnet10t": _entry("timm", _timm, "resnet10t", 64),
    "timm_vit": _entry(
        "timm", _timm, "vit_tiny_patch16_224", 64, img_size=64, depth=2, drop_path_rate=0.1, shows="DropPath"
    ),
    "timm_convnext": _entry("timm", _timm, "convnext_atto", 64, depths=(1, 1, 2, 1), drop_path_rate=0.1),
    "timm_cait": _entry(
        "timm", _timm, "cait_xxs24_224", 64, img_size=64, depth=2, embed_dim=64, num_heads=2, shows="class attention"
    ),
    "timm_beit": _entry("timm", _timm, "beit_base_patch16_224", 64, img_size=64, depth=2, embed_dim=48, num_heads=4),
    "timm_naflexvit": _entry("timm", _naflexvit, shows="a dict as input"),
    "timm_regnet": _entry("timm", _timm, "regnetx_002", 64),
    "timm_mobilevit": _entry("timm", _timm, "mobilevit_xxs", 64),
    "timm_ghostnet": _entry("timm", _timm, "ghostnet_050", 64),
    "efficientnet_pytorch_b0": _entry("efficientnet-pytorch", _efficientnet, shows="custom autograd.Function"),
    "pytorchcv_preresnet10": _entry("pytorchcv", _pytorchcv, "preresnet10", 224, num_classes=CLASSES),
}
