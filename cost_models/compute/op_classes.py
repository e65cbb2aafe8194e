"""What kind of work an op is, so that it is priced at the rate that such ops reach.

What has a FLOP formula is a convolution, attention or a matrix product; the rest is bound by memory, but not all of it
alike: a processor that adds two tensors as fast as it reads them takes many times as long for a pool, an exponential
or a random number.  Those have classes of their own, which are "memory" where a device has no number for them.
An op that is in none of the lists is priced by its bytes too, and `known` tells that this is a guess.
"""

from __future__ import annotations

import torch

from splitc.cost_models.compute.op_bytes import name_of


def op_class(func: torch._ops.OpOverload, computes: bool) -> str:
    """The class of an op; `computes`: it has a FLOP formula."""
    name = name_of(func)
    if computes:
        return "conv" if "conv" in name else "attention" if "attention" in name else "matmul"
    word = name.removeprefix("_")
    if word in _MATH:
        return "math"
    if word in _RANDOM:
        return "random"
    if "batch_norm" in word:
        return "batch_norm"
    if "_pool" in word or word.startswith(("upsample", "grid_sampler")):
        return "max_pool" if "max" in word else "pool"
    return "memory"


def known(func: torch._ops.OpOverload) -> bool:
    """Whether an op without a FLOP formula is known to be bound by memory."""
    name = name_of(func)
    if "::" in name:
        return False
    if torch.Tag.pointwise in func.tags or torch.Tag.inplace_view in func.tags or op_class(func, False) != "memory":
        return True
    word = name.removeprefix("_")
    for ending in ("_copy", "_backward_data", "_backward", "_forward"):
        word = word.removesuffix(ending)
    return word in _BY_MEMORY or word.startswith(("foreach_", "fused_"))


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RANDOM = _words("""
    bernoulli rand rand_like randn randn_like randint randint_like randperm normal uniform random exponential geometric
    log_normal cauchy multinomial native_dropout fused_dropout
""")
_MATH = _words("""
    exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh sigmoid erf
    erfc erfinv lgamma digamma pow softmax safe_softmax log_softmax logsumexp logaddexp log_sigmoid_forward gelu silu
    mish elu softplus binary_cross_entropy binary_cross_entropy_with_logits thnn_fused_lstm_cell thnn_fused_gru_cell
    gelu_backward silu_backward mish_backward softplus_backward log_sigmoid_backward log_softmax_backward_data
""")
_BY_MEMORY = _words("""
    to to_copy copy clone contiguous cat stack split split_with_sizes chunk unbind select slice narrow diagonal repeat
    tile roll flip rot90 constant_pad_nd pad reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d tril triu pixel_shuffle pixel_unshuffle channel_shuffle zeros zeros_like ones
    ones_like full full_like new_zeros new_ones new_full eye arange linspace scalar_tensor zero fill sum nansum mean
    prod amax amin aminmax max min argmax argmin all any var var_mean std std_mean norm linalg_vector_norm softmax
    cumsum cumprod count_nonzero bincount trace embedding embedding_dense embedding_bag embedding_bag_dense
    embedding_bag_per_sample_weights embedding_bag_forward_only index index_select index_put index_add index_copy
    index_fill index_reduce unsafe_index unsafe_index_put gather scatter scatter_add scatter_reduce take put
    masked_select masked_scatter masked_fill value_selecting_reduction nll_loss nll_loss2d mse_loss l1_loss
    smooth_l1_loss huber_loss soft_margin_loss kl_div multi_margin_loss multilabel_margin_loss native_layer_norm
    native_group_norm fused_rms_norm rms_norm weight_norm_interface prelu_kernel glu im2col col2im unfold nonzero
    searchsorted bucketize where complex view_as_real view_as_complex local_scalar_dense assert_async
""")
