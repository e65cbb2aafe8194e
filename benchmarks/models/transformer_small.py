"""A language model of two narrow blocks between two tables of 4000 tokens.

One of the models of `python -m benchmarks.accuracy`.
"""

from torch import Tensor, nn

from examples import transformer

VOCABULARY, TIME = 4000, 64

loss = transformer.next_token_loss


def model() -> nn.Module:
    """2.4 M parameters, 1.5 M of them in the two tables."""
    return transformer.transformer(VOCABULARY, width=192, depth=2, heads=4, time=TIME)


def example(batch: int = 8) -> tuple[Tensor]:
    """One rank's batch of token sequences."""
    return transformer.example(batch, TIME, VOCABULARY)


def target(batch: int = 8) -> Tensor:
    """The token that follows each of them."""
    return transformer.target(batch, TIME, VOCABULARY)
