"""Generative models: lower bounds, critics, scores, flows and noise, whose losses take the output alone."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.paper_models.case import Batch, Paper, ids, normal

FEATURES, WIDTH = 8, 12


def plain(n: int, generator: torch.Generator) -> Batch:
    """Vectors."""
    return (normal(generator, n, FEATURES).sigmoid(),), None


def images(n: int, generator: torch.Generator) -> Batch:
    """Images of 8 x 8."""
    return (normal(generator, n, 1, 8, 8).sigmoid(),), None


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Vae(nn.Module):
    """Mean and deviation of a code, a sample of it, and what is made of that."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(FEATURES, WIDTH, 6), mlp(3, WIDTH, FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decoder(code), x, mean, log_variance


def elbo(found: tuple[Tensor, ...]) -> Tensor:
    """Summed over the batch, as in most implementations, and divided by its size."""
    scores, x, mean, log_variance = found
    likelihood = F.binary_cross_entropy_with_logits(scores, x, reduction="sum")
    return (likelihood - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())) / x.size(0)


class BetaVae(nn.Module):
    """A convolutional one; forward returns everything by name."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(
            nn.Linear(4, 64), nn.ReLU(), nn.Unflatten(1, (4, 4, 4)), nn.ConvTranspose2d(4, 1, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        deviation = (0.5 * log_variance).exp()
        return {
            "image": self.decoder(torch.randn_like(deviation) * deviation + mean),
            "kl": (-0.5 * (1 + log_variance - mean**2 - log_variance.exp())).sum(1).mean(),
            "x": x,
        }


def beta(found: dict[str, Tensor]) -> Tensor:
    """Squares, and the divergence four times."""
    return F.mse_loss(found["image"].sigmoid(), found["x"], reduction="sum") / len(found["x"]) + 4 * found["kl"]


class VqVae(nn.Module):
    """A code of a table, with straight-through gradients; forward is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(FEATURES, WIDTH, 4), mlp(4, WIDTH, FEATURES)
        self.codes = nn.Embedding(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        far = z.pow(2).sum(1, keepdim=True) + self.codes.weight.pow(2).sum(1) - 2 * z @ self.codes.weight.t()
        code = self.codes(far.argmin(1))
        made = self.decoder(z + (code - z).detach())
        return F.mse_loss(made, x) + F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())


class Critic(nn.Module):
    """Scores of real and generated examples, and of those between."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(FEATURES, WIDTH, 1)

    def forward(self, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(real), self.net(fake)


def critic(pair: tuple[Tensor, Tensor]) -> Tensor:
    """The distance of Wasserstein, with a small penalty of drift."""
    real, fake = pair
    return fake.mean() - real.mean() + 1e-3 * real.pow(2).mean()


def two(n: int, generator: torch.Generator) -> Batch:
    """Real and generated vectors."""
    return (normal(generator, n, FEATURES), normal(generator, n, FEATURES)), None


class Energy(nn.Module):
    """An energy of examples, low for data, high for noise that the model draws."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(FEATURES, WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.net(x), self.net(torch.randn_like(x))], 1)


def energy(found: Tensor) -> Tensor:
    """Contrast of both, and a penalty of their squares."""
    return (found[:, 0] - found[:, 1]).mean() + 0.1 * found.pow(2).mean()


class Score(nn.Module):
    """The score of noisy examples, at a level of noise for each."""

    levels: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(FEATURES + 1, WIDTH, FEATURES)
        self.register_buffer("levels", torch.tensor([1.0, 0.5, 0.1]))

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        sigma = self.levels[level].unsqueeze(1)
        noise = torch.randn_like(x)
        score = self.net(torch.cat([x + sigma * noise, sigma], 1))
        return 0.5 * ((score * sigma + noise) ** 2).sum(1)


def noisy(n: int, generator: torch.Generator) -> Batch:
    """Vectors and levels."""
    return (normal(generator, n, FEATURES), ids(generator, 3, n)), None


class Flow(nn.Module):
    """Affine couplings of halves; code and log determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(mlp(FEATURES // 2, WIDTH, FEATURES) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 1)
        total = x.new_zeros(x.size(0))
        for part in self.parts:
            scale, shift = part(a).chunk(2, 1)
            scale = scale.tanh()
            a, b, total = b * scale.exp() + shift, a, total + scale.sum(1)
        return torch.cat([a, b], 1), total


def likelihood(found: tuple[Tensor, Tensor]) -> Tensor:
    """Negative, under a normal distribution of the code."""
    code, determinant = found
    return -(torch.distributions.Normal(0.0, 1.0).log_prob(code).sum(1) + determinant).mean()


class Diffusion(nn.Module):
    """A small U-Net that predicts the noise at random times; forward is the loss."""

    alphas: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(10, 8)
        self.down, self.middle = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.norm = nn.Conv2d(16, 1, 3, padding=1), nn.GroupNorm(2, 8)
        self.register_buffer("alphas", torch.linspace(0.98, 0.9, 10).cumprod(0))

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, 10, (x.shape[0],))
        noise, alpha = torch.randn_like(x), self.alphas[t].view(-1, 1, 1, 1)
        h = F.silu(self.down(alpha.sqrt() * x + (1 - alpha).sqrt() * noise) + self.time(t)[:, :, None, None])
        low = F.interpolate(F.silu(self.norm(self.middle(F.avg_pool2d(h, 2)))), scale_factor=2)
        return F.mse_loss(self.up(torch.cat([h, low], 1)), noise)


MODELS = {
    "vae": Paper("Kingma, Welling, Auto-Encoding Variational Bayes, 2014", Vae, plain, elbo),
    "beta_vae": Paper("Higgins et al., beta-VAE, 2017", BetaVae, images, beta),
    "vq_vae": Paper("van den Oord, Vinyals, Kavukcuoglu, Neural Discrete Representation, 2017", VqVae, plain),
    "wgan_critic": Paper("Arjovsky, Chintala, Bottou, Wasserstein GAN, 2017", Critic, two, critic),
    "energy_model": Paper("Du, Mordatch, Implicit Generation with Energy-Based Models, 2019", Energy, plain, energy),
    "score_matching": Paper(
        "Song, Ermon, Estimating Gradients of the Data Distribution, 2019", Score, noisy, torch.mean
    ),
    "real_nvp": Paper("Dinh, Sohl-Dickstein, Bengio, Density Estimation Using Real NVP, 2017", Flow, plain, likelihood),
    "ddpm": Paper("Ho, Jain, Abbeel, Denoising Diffusion Probabilistic Models, 2020", Diffusion, images),
}
