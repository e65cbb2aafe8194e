"""What was captured is compared with the model, and its loss is taken apart into sums and means over examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from splitc.capture.capture import capture
from splitc.capture.example.example import Example
from splitc.capture.trace.proxy import is_proxy
from splitc.capture.validate.reference_copy import Precision, ReferenceCopy
from splitc.capture.validate.validate import validate_capture
from tests.support.capturing import captured, refusal, validated
from tests.support.models import BATCH, CASES, CLASSES, Made, labels, made, vectors
from tests.support.sampling import in_tiers

Loss = Callable[[Tensor, Tensor], Tensor]
CE = F.cross_entropy
IGNORED = torch.tensor([0, 1, -100, 2, -100, 3])
WEIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])


def rows(width: int = 8) -> Tensor:
    return torch.randn(6, width)


def net(width: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, width))


def kinds(loss: Any, target: Tensor, width: int = CLASSES) -> list[str]:
    """The kinds of the terms of the loss."""
    return [term.kind for term in captured(net(width), rows(), target, loss).loss_terms]


def masked(out: Tensor, y: Tensor) -> Tensor:
    counted = y >= 0
    return (CE(out, y.clamp(min=0), reduction="none") * counted).sum() / counted.sum()


def numbers() -> Tensor:
    return torch.randn(6, CLASSES)


def shares() -> Tensor:
    return torch.rand(6, CLASSES).softmax(-1)


def bits() -> Tensor:
    return torch.rand(6, CLASSES).round()


def classes() -> Tensor:
    return torch.randint(CLASSES, (6,))


def ignored() -> Tensor:
    return IGNORED.clone()


LOSSES: dict[str, tuple[Any, Callable[[], Tensor], list[str]]] = {
    "cross_entropy": (CE, classes, ["weighted"]),
    "ignore_index": (nn.CrossEntropyLoss(), ignored, ["weighted"]),
    "class_weights": (nn.CrossEntropyLoss(weight=WEIGHT), ignored, ["weighted"]),
    "class_weights_by_position": (lambda o, y: CE(o, y, WEIGHT), classes, ["weighted"]),
    "label_smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1, weight=WEIGHT), ignored, ["weighted"]),
    "nll": (lambda o, y: F.nll_loss(o.log_softmax(-1), y), ignored, ["weighted"]),
    "soft_targets": (CE, shares, ["mean"]),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), classes, ["sum"]),
    "mean_of_each": (lambda o, y: CE(o, y, reduction="none").mean(), classes, ["mean"]),
    "sum_over_size": (lambda o, y: CE(o, y, reduction="sum") / o.size(0), classes, ["mean"]),
    "mse": (F.mse_loss, numbers, ["mean"]),
    "l1": (nn.L1Loss(), numbers, ["mean"]),
    "smooth_l1": (nn.SmoothL1Loss(beta=0.5), numbers, ["mean"]),
    "bce": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), bits, ["mean"]),
    "kl_batchmean": (lambda o, y: F.kl_div(o.log_softmax(-1), y, reduction="batchmean"), shares, ["mean"]),
    "squares": (lambda o, y: ((o - y) ** 2).sum(1).mean(), numbers, ["mean"]),
    "masked_mean": (masked, ignored, ["sum", "sum denominator"]),
    "auxiliary": (
        lambda o, y: CE(o, y) + 0.1 * o.pow(2).mean() - (o.abs().sum() / 7),
        classes,
        ["weighted", "mean", "sum"],
    ),
    "sum_of_list": (lambda o, y: sum([CE(o, y), F.multi_margin_loss(o, y)]) / 2, classes, ["weighted", "mean"]),
    "one_minus": (lambda o, y: 1 - F.cosine_similarity(o, y).mean(), numbers, ["mean"]),
    "scalar_mean": (lambda o, y: CE(o, y).mean().float() * 0.5, classes, ["weighted"]),
    "zero_sum": (lambda o, y: CE(o, y) + F.relu(o - 1e3).sum(), classes, ["weighted", "sum"]),
    "constant": (lambda o, y: CE(o, y) + torch.ones(3).sum(), classes, ["weighted", "mean"]),
}


@pytest.mark.slow
@in_tiers("cases", LOSSES, one_in=4)
def test_every_term_of_a_loss_is_a_sum_or_a_mean_over_examples(cases: list[Any]) -> None:
    for name in cases:
        loss, target, expected = LOSSES[name]
        assert kinds(loss, target()) == expected, name


def test_a_penalty_on_parameters_counts_once_however_many_ranks_add_it() -> None:
    program = captured(*CASES["own_loss"].make())
    assert [term.kind for term in program.loss_terms] == ["weighted", "mean", "mean"]


def test_a_parameter_that_is_a_term_and_a_factor_is_copied_for_the_term() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.fc(x).pow(2).mean() * torch.exp(-m.s) + m.s

    program = captured(Made(run, fc=nn.Linear(8, CLASSES), s=nn.Parameter(torch.tensor(0.3))), vectors()())
    (copied,) = [n for n in program.graph.nodes if n.target == "clone"]
    assert [(t.node, t.kind) for t in program.loss_terms] == [("mean", "mean"), (copied.name, "mean")]


@pytest.mark.slow
def test_the_first_examples_may_all_be_ignored() -> None:
    target = torch.tensor([-100, -100, -100, 1, 2, 3])
    assert [term.kind for term in validated(net(), rows(), target, CE).loss_terms] == ["weighted"]


@in_tiers("cases", [torch.bfloat16, torch.float16], one_in=2)
def test_sums_and_means_of_numbers_that_cancel_are_told_apart_in_half_precision(cases: list[Any]) -> None:
    for dtype in cases:
        model = nn.Linear(8, 64).to(dtype)
        for _ in range(3):
            x, y = rows().to(dtype), torch.randn(6, 64).to(dtype)
            for loss, kind in ((lambda o, y: (o * y).mean(), "mean"), (lambda o, y: (o * y).sum(), "sum")):
                assert [term.kind for term in validated(model, x, y, loss).loss_terms] == [kind]


@pytest.mark.slow
def test_a_weighted_mean_in_half_precision_is_recognised() -> None:
    model, x = net().bfloat16(), rows().bfloat16()
    assert [term.kind for term in captured(model, x, classes(), CE).loss_terms] == ["weighted"]


def in_batch_negatives(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out)
    return CE(z @ z.T, torch.arange(out.size(0)))


COUPLED: dict[str, tuple[Loss, Callable[[], Tensor], str]] = {
    "in_batch_negatives": (in_batch_negatives, classes, "examples: matmul has the batch in several dimensions"),
    "deviation": (lambda o, y: CE(o, y) + o.std(0).mean(), classes, "std is not known to be a sum or a mean"),
    "root": (
        lambda o, y: (o - y).pow(2).mean().sqrt(),
        numbers,
        "the loss couples examples: sqrt is no linear function of mean (HERE)",
    ),
    "largest": (lambda o, y: (o - y).pow(2).max(), numbers, "max_1 is not known to be a sum or a mean over examples"),
    "reversed": (
        lambda o, y: (o - o.flip(0)).pow(2).mean(),
        numbers,
        "what flip makes of an example depends on the other",
    ),
    "log": (lambda o, y: CE(o, y).log(), classes, "log is no sum of cross_entropy (HERE), which divides by a sum over"),
    "product": (lambda o, y: CE(o, y) * o.abs().mean(), classes, "mul is no sum of cross_entropy (HERE)"),
    "number": (lambda o, y: CE(o, y) + 1.0, classes, "add adds 1 to cross_entropy (HERE), which divides"),
    "dice": (
        lambda o, y: (o.sigmoid() * y).sum() / (o.sigmoid() + y).sum(),
        bits,
        "truediv is no linear function of sum_1 (HERE), which is over the whole batch",
    ),
    "not_finite": (lambda o, y: CE(o, y) + (-o.abs()).log().mean(), classes, "the loss is not finite on the example"),
    "term_read_twice": (
        lambda o, y: (a := o.pow(2).mean()) + (a * o).sum(),
        classes,
        "mul is no linear function of mean (HERE)",
    ),
}


@pytest.mark.slow
@in_tiers("cases", COUPLED, one_in=3)
def test_a_loss_that_couples_examples_is_refused_by_name_and_line(cases: list[Any]) -> None:
    for name in cases:
        loss, target, text = COUPLED[name]
        said = refusal(net(), rows(), target(), loss)
        line, _, said = said.partition(": ")
        assert line.startswith("test_validate.py:") and text.replace("HERE", line) in said, name


def test_a_root_over_the_batch_is_refused_where_the_examples_lose_alike() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).pow(2).mean(1).mean(0, keepdim=True).sqrt().sum()

    model = nn.Linear(8, 1)
    nn.init.zeros_(model.weight)
    said = refusal(model, rows(), torch.tensor([[20.0], [-20.2], [20.4], [20.2], [-20.0], [20.4]]), loss)
    assert "sqrt is no linear function of mean_1" in said


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, CLASSES)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) * (2 if self.calls > 100 else 1)


def test_a_number_that_every_call_changes_is_refused() -> None:
    model = Counting()
    assert "every call of Counting changes calls" in refusal(model, vectors()(), labels()(), CE)
    assert model.calls == 0


def test_a_cache_that_the_first_call_fills_is_none() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        if m.longest < x.size(1):
            m.longest, m.table = x.size(1), torch.arange(x.size(1)).float()
        return m.fc(x * m.table)

    model = Made(run, fc=nn.Linear(8, CLASSES), longest=0, table=None)
    captured(model, vectors()(), labels()(), CE)
    assert model.longest == 0


def test_a_graph_of_another_loss_is_refused() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.fc(x) * (2 if is_proxy(x) else 1)

    said = refusal(Made(run, fc=nn.Linear(8, CLASSES)), vectors()(), labels()(), CE)
    assert said.startswith("the captured graph computes a loss of ") and "where the model computes" in said


def test_a_lost_gradient_is_refused_by_the_parameters_name() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        hidden = m.a(x)
        return m.fc(hidden.detach() if is_proxy(x) else hidden)

    said = refusal(Made(run, a=nn.Linear(8, 8), fc=nn.Linear(8, CLASSES)), vectors()(), labels()(), CE)
    assert said.startswith("the gradient of a.bias differs between the model and its captured graph")


def test_a_backward_that_fails_is_the_users_to_mend() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x).exp()
        z = y * 2
        if not is_proxy(x):
            y.zero_()
        return m.fc(z + y)

    said = refusal(Made(run, a=nn.Linear(8, 8), fc=nn.Linear(8, CLASSES)), vectors()(), labels()(), CE)
    assert said.startswith("the backward of Made fails: one of the variables needed for gradient computation")


def test_a_model_that_fails_on_few_examples_is_told_its_line() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        if not is_proxy(x) and len(x) < 4:
            raise ValueError("four at least")
        return m.fc(x)

    said = refusal(Made(run, fc=nn.Linear(8, CLASSES)), vectors()(), labels()(), CE)
    assert "the model fails on 3 examples of its batch: ValueError: four at least" in said
    assert said.startswith("test_validate.py:")


def test_what_does_not_run_on_generic_data_is_validated_on_nearer_data_and_noted() -> None:
    def lengths(m: Any, x: Tensor) -> Tensor:
        assert is_proxy(x) or bool((x[:, 0] == 3).all()), "the first column is a constant"
        return m.fc(x)

    x = rows()
    x[:, 0] = 3
    (note,) = validated(made(lengths, fc=nn.Linear(8, CLASSES)), x, classes(), CE).notes
    assert note.startswith("Validated on rows of the example in another order, since it does not run on generic data: ")
    assert "the first column is a constant" in note
    (note,) = validated(
        made(lambda m, x: m.fc(x.log()), fc=nn.Linear(8, CLASSES)), torch.ones(6, 8), classes(), CE
    ).notes
    assert note.startswith("Validated on noise beside the whole numbers, masks and signs of the example")


def test_a_model_that_insists_on_float32_is_compared_in_it_bit_by_bit() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        eps = torch.finfo(x.dtype).eps
        return m.fc(x / (x.pow(2).sum(1, keepdim=True) + 1e5 * eps).sqrt())

    assert validated(made(run, fc=nn.Linear(8, CLASSES)), rows(), classes(), CE).notes == ()


@pytest.mark.slow
@in_tiers("cases", range(4), one_in=4)
def test_no_initialisation_of_a_convolutional_network_is_refused(cases: list[Any]) -> None:
    for seed in cases:
        torch.manual_seed(seed)
        program = validated(*CASES["alexnet"].make())
        assert not program.in_batch and [term.kind for term in program.loss_terms] == ["weighted"]


@in_tiers("cases", CASES, one_in=12)
def test_no_model_of_the_tests_couples_examples(cases: list[Any]) -> None:
    for name in cases:
        program = validated(*CASES[name].make())
        assert not program.in_batch and program.notes == (), name


def test_one_example_is_enough() -> None:
    assert captured(net(), torch.randn(1, 8), torch.tensor([2]), CE).batch == 1


@pytest.mark.slow
@in_tiers("cases", [torch.bfloat16, torch.float32, torch.float16], one_in=3)
def test_a_gradient_that_is_zero_by_mathematics_may_be_any_rounding_error(cases: list[Any]) -> None:
    """Softmax does not see what every key has: the gradient of k.bias is noise."""

    def run(m: Any, x: Tensor) -> Tensor:
        return m.fc(F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x), dropout_p=0.1).mean(1))

    for dtype in 3 * cases:
        children = {name: nn.Linear(8, 8) for name in ("q", "k", "v", "fc")}
        x, y = torch.randn(BATCH, 6, 8, dtype=dtype), torch.randint(8, (BATCH,))
        validated(Made(run, **children).to(dtype), x, y, CE)


class _Convolved(TorchDispatchMode):
    """Notes the examples of every convolution in float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.examples: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "conv" in str(func) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            self.examples.add(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_convolutions_unfold_one_example_at_a_time_in_float64() -> None:
    """Else a three-dimensional model takes several times the memory of its training."""
    model = nn.Sequential(nn.Conv3d(1, 3, 3), nn.ReLU(), nn.Conv3d(3, 2, 3), nn.Flatten(), nn.Linear(16, 4))
    example = Example.bind(model, torch.randn(2, 1, 6, 6, 6), torch.randint(4, (2,)), F.cross_entropy)
    reference = ReferenceCopy(capture(model, example), model, example, Precision.WIDE)
    with _Convolved() as seen:
        reference.loss(reference.values(example.tensors)).backward()
    assert seen.examples == {1}
    with _Convolved() as seen:
        validate_capture(capture(model, example), model, example)
    assert not seen.examples, "layers that map each example by itself run in float32, wherever parts are compared"
