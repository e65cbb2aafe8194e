"""Train with Lightning Fabric, which starts the processes, seeds and logs; splitc has the model and the data.

torchrun --standalone --nproc-per-node 2 examples/fabric.py
"""

import os

import torch
import torch.nn.functional as F
from ddp import BATCH, EPOCHS, images, network
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

import splitc


def main() -> None:
    fabric = Fabric(accelerator="auto", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "2")), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    loader = DataLoader(images(2048), BATCH, shuffle=True, drop_last=True)

    # In place of fabric.setup, fabric.setup_dataloaders, fabric.backward and fabric.clip_gradients:
    worker, loader = splitc.prepare(
        network(), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), F.cross_entropy, loader, clip_norm=5.0
    )
    for epoch in range(EPOCHS):
        losses = [worker.step(*batch) for batch in loader]
        fabric.print(f"epoch {epoch}: loss {torch.stack(losses).mean():.5f}")


if __name__ == "__main__":
    main()
