"""Messages and collectives as text, and their bytes."""

from __future__ import annotations

import torch

from splitc.ir.wire_op import Payload, What, WireOp


def test_a_payload_is_named_by_what_travels() -> None:
    for payload, text in [
        (Payload(What.CUT, "cut0", "conv", "fc", rows=(2, 4)), "cut0.conv.fc[2:4]"),
        (Payload(What.CUT_GRADIENT, "cut0", "conv", "fc", rows=(2, 4)), "d_cut0.conv.fc[2:4]"),
        (Payload(What.ENTRY, "cut0", "fc", microbatch=1), "entry cut0[1]"),
        (Payload(What.NODE, "fc6_whole", "fc"), "fc.fc6_whole[0]"),
        (Payload(What.NODE_GRADIENT, "fc6_whole", "fc"), "d_fc.fc6_whole[0]"),
        (Payload(What.LATE, "fc6", "all"), "X, E all.fc6[0]"),
        (Payload(What.BUCKET, role="conv", bucket=1), "conv.bucket1"),
        (Payload(What.PUSH, "fc6.weight", "worker", rows=(0, 3)), "push fc6.weight[0:3]"),
        (Payload(What.PULL, "fc6.bias", "worker", rows=(0, 3), more=2), "pull fc6.bias[0:3] and 2 more"),
        (Payload(What.TIED, "embed.weight"), "tied embed.weight"),
        (Payload(What.LOSS), "loss"),
    ]:
        assert str(payload) == text


def test_payloads_of_every_kind_have_texts_of_their_own() -> None:
    assert len({str(Payload(what, "x", "fc", "conv", bucket=0)) for what in What}) == len(What)


def test_an_operation_has_the_bytes_of_its_shape_and_names_its_peers() -> None:
    op = WireOp("send", Payload(What.CUT, "cut0", "conv", "fc", rows=(0, 2)), (3,), (2, 6), torch.float16, 24.0)
    assert op.nbytes == 24 and str(op) == "send cut0.conv.fc[0:2] (2, 6) torch.float16 to 3"
    loss = WireOp("collective", Payload(What.LOSS), (0, 1), (), torch.float64)
    assert loss.nbytes == 8 and str(loss) == "collective loss () torch.float64 of ranks 0, 1"
