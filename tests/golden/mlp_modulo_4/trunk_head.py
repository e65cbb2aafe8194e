"""Roles "trunk" and "head" of MLP: ranks 0 to 3 of 4.  Written by splitc 0.1.0; yours to edit.

in       images  (4, 20)                float32  read by this role
         target  (4,)                   int64    read by this role
         target  (4,)                   int64    gathered over groups of 2 ranks
         cut0    (4, 16)                float32  gathered over groups of 2 ranks
out      loss
holds    805 parameters, 3.22 kB
predicts 25.7 kFLOP, 100 us of compute in a step on v100-10gbe
plan     476557b6e413
"""

import torch
import torch.nn.functional as F
from torch import nn

PLAN = "476557b6e413"


class Stage(nn.Module):
    """Parameter names are those of the original model, so its checkpoints load."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.ModuleDict({
            "0": nn.Linear(20, 16),
            "1": nn.Linear(16, 33),  # sharded, see rankN.py
        })
        self.output = nn.Linear(33, 10)  # sharded, see rankN.py

    def forward_trunk(self, comm, images):
        relu = F.relu(self.hidden["0"](images.flatten(1)))  # (4, 16)  mlp.py:31
        return relu

    def weigh_head(self, comm, target):
        loss_weight = comm.global_weight(target, ignore_index=0, own=True).wait()  # ()  loss
        return loss_weight

    def forward_head(self, comm, cut0):
        relu_1 = F.relu(self.hidden["1"](cut0))             # (4, 33/2)  mlp.py:31
        output_part = F.linear(relu_1, self.output.weight)  # (4, 10)    mlp.py:32
        output_sum = comm.reduce_from_group(output_part)    # (4, 10)    partial -> replicate, 160 B
        output = output_sum + self.output.bias              # (4, 10)    mlp.py:32
        return output

    def loss_head(self, comm, output, target, loss_weight):
        loss = F.cross_entropy(output, target, ignore_index=0, reduction="sum")  # ()  loss
        loss_1 = loss / loss_weight                                              # ()
        return loss_1

    def output_head(self, comm, output):
        output_own = comm.slice_batch(output)  # (4, 10)  replicate -> batch
        return output_own


TRUNK_BUCKETS = (  # gradients all-reduced together, in the order of backward
    (  # 1.34 kB
        "hidden.0.bias",
        "hidden.0.weight",
    ),
)


HEAD_BUCKETS = (  # gradients all-reduced together, in the order of backward
    (  # 1.88 kB
        "output.bias",
        "output.weight",
        "hidden.1.bias",
        "hidden.1.weight",
    ),
)


def step(trunk, head, stage, images, target):
    """Forward and backward of one batch; the gradients are left in `.grad`, summed."""
    losses, d_cut0 = [], []
    cut0 = stage.forward_trunk(trunk, images)
    loss_weight = stage.weigh_head(head, target)                            # what the loss divides by
    for k in head.microbatches():
        target_group = head[k].modulo(head[k].piece(target))        # all-gather: a microbatch of all ranks of the group
        # all-gather: a microbatch of all ranks of the group
        cut0_group = head[k].modulo(head[k].piece(cut0).detach()).requires_grad_()
        loss = stage.loss_head(head[k], stage.forward_head(head[k], cut0_group), target_group, loss_weight)
        losses.append(loss.detach())
        with head[k].all_reduce(stage, HEAD_BUCKETS):                      # 1.88 kB in 1 bucket, in the last microbatch
            loss.backward()
        d_cut0.append(head[k].reduce_scatter(cut0_group.grad, to="batch"))  # reduce-scatter over the group
    total = head.sum_loss(sum(losses))                                      # the global loss
    with trunk.all_reduce(stage, TRUNK_BUCKETS):                            # 1.34 kB in 1 bucket, during backward
        cut0.backward(torch.cat(d_cut0))
    return total.wait()


def evaluate(trunk, head, stage, images, target):
    """The loss of one batch, forward only."""
    cut0 = stage.forward_trunk(trunk, images)
    loss_weight = stage.weigh_head(head, target)  # what the loss divides by
    target_group = head.modulo(target)            # all-gather: the examples of all ranks of the group
    cut0_group = head.modulo(cut0)                # all-gather: the examples of all ranks of the group
    loss = stage.loss_head(head, stage.forward_head(head, cut0_group), target_group, loss_weight)
    total = head.sum_loss(loss)                   # the global loss
    return total.wait()


def predict(trunk, head, stage, images):
    """The model's output for this rank's examples, forward only."""
    cut0 = stage.forward_trunk(trunk, images)
    cut0_group = head.modulo(cut0)  # all-gather: the examples of all ranks of the group
    cut1 = stage.output_head(head, stage.forward_head(head, cut0_group))
    return cut1
