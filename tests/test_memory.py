"""Bytes of one rank."""

import torch

from cost_models.memory import gradient_nbytes, rank_memory, received_nbytes, returned_nbytes
from splitc.program import Holding, TensorSpec

WEIGHT = Holding("fc.weight", (10, 5), torch.float32, parameter=True, requires_grad=True)
FROZEN = Holding("embed.weight", (100,), torch.float32, parameter=True)
BUFFER = Holding("bn.running_mean", (5,), torch.float64, parameter=False)


def test_a_trainable_parameter_counts_with_its_gradient_and_optimizer_state():
    memory = rank_memory([WEIGHT], kept=1000, communication=30)
    assert (memory.parameters, memory.gradients, memory.optimizer_state) == (200, 200, 200)
    assert memory.total == 600 + 1000 + 30


def test_frozen_parameters_and_buffers_are_only_held():
    assert gradient_nbytes([FROZEN, BUFFER]) == 0
    assert rank_memory([FROZEN, BUFFER], kept=0).total == 400 + 40


def test_adam_holds_two_copies_and_plain_sgd_none():
    assert rank_memory([WEIGHT], 0, optimizer_copies=2).total == 800
    assert rank_memory([WEIGHT], 0, optimizer_copies=0).total == 400


def test_the_reader_of_a_cut_keeps_value_and_gradient_and_its_maker_the_gradient():
    cut = TensorSpec((1, 10), torch.float32, 0, requires_grad=True)
    assert received_nbytes(cut, 3) == 240
    assert returned_nbytes(cut, 3) == 120


def test_a_cut_without_gradient_is_kept_once():
    labels = TensorSpec((1,), torch.int64, 0)
    assert received_nbytes(labels, 3) == 24
    assert returned_nbytes(labels, 3) == 0
