"""Train on the workers of Ray Train: `prepared.py` with the processes, and their restarts, left to Ray.

    python -m pip install "splitc[ray]"
    python ray_train.py --workers 2                      # on this machine, or on the cluster of RAY_ADDRESS
    python ray_train.py --workers 8 --gpus --restarts 3

Ray gives every worker its rank and where all meet; `splitc.prepare` plans for them, and measures their network.
Checkpoints go into a folder that all workers see, from which the next start goes on.
"""

import argparse
from pathlib import Path

import ray.train
import torch
import torch.nn.functional as F
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.utils import data

import splitc

BATCH = 32  # examples of a batch on each worker


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


def train(config: dict) -> None:
    """What every worker runs; its process group is there already."""
    loader = data.DataLoader(images(1024), BATCH, shuffle=True, drop_last=True)
    options = {"device": None if config["gpus"] else "cpu", **config["options"]}
    worker, loader = splitc.prepare(
        network(), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), F.cross_entropy, loader, **options
    )
    folder = Path(config["checkpoints"])
    if any(folder.glob("step-*")):
        worker.resume(folder)
    while loader.epoch < config["epochs"]:
        epoch, losses = loader.epoch, []
        for batch in loader:
            losses.append(worker.step(*batch).detach())
        worker.save(folder)
        loss = torch.stack(losses).mean().item()
        ray.train.report({"epoch": epoch, "loss": loss})
        if worker.rank.index == 0:
            print(f"epoch {epoch}: loss {loss:.5f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each worker")
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--checkpoints", default="checkpoints", help="a folder that all workers see")
    parser.add_argument("--cluster", help="of splitc; without, it measures")
    args = parser.parse_args()
    config = {"epochs": args.epochs, "gpus": args.gpus, "checkpoints": str(Path(args.checkpoints).absolute())}
    trainer = TorchTrainer(
        train,
        train_loop_config={**config, "options": {"cluster": args.cluster} if args.cluster else {}},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if args.gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=args.restarts)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
