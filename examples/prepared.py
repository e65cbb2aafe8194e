"""Train a convolutional network on all processes that torchrun starts (torchrun --standalone --nproc-per-node 2 FILE).

`ddp.py` does so with DistributedDataParallel, `prepared.py` with `splitc.prepare`; they differ in ten lines.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils import data

import splitc

EPOCHS, BATCH = 3, 32  # examples of a batch on each process


def images(number: int) -> data.TensorDataset:
    """Synthetic images, and the classes that a fixed random network gives them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(number, 1, 16, 16, generator=generator)
    teacher = torch.randn(256, 10, generator=generator)
    return data.TensorDataset(inputs, (inputs.flatten(1) @ teacher).argmax(1))


def network() -> nn.Module:
    torch.manual_seed(0)
    features = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*features, nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))


def main() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    dataset = images(2048)
    model = network()
    loader = data.DataLoader(dataset, BATCH, shuffle=True, drop_last=True)
    worker, loader = splitc.prepare(model, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), F.cross_entropy, loader)
    for epoch in range(EPOCHS):
        losses = []
        for batch in loader:
            loss = worker.step(*batch)
            losses.append(loss.detach())
        mean = torch.stack(losses).mean().cpu()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean / dist.get_world_size():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
