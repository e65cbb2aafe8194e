"""Checkpoints of a run, on torch.distributed.checkpoint: under the model's own keys, for any plan of the model."""
