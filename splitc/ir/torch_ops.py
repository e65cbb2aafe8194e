"""What splitc knows of torch's ops by their names: one record for all ops of a kind, "names: traits".

A name is that of a function or method in a graph, or of the op below it without `aten::` and underscores at its ends.

    F, torch, operator, method           maps each element by itself, as a function of that module, or as a method
    each                                 a loss of each element, then their reduction
    quotient, product, sum, negation     arithmetic that is linear in an operand
    join                                 puts several tensors together
    kept, moved                          linear; may stand between a sum over examples and the loss; moves elements
    reduction                            sums over elements, perhaps of several examples
    factory                              beginnings of the names of what makes tensors of sizes
    shape_only, no_tensor                reads only the shape or dtype of what it is given; returns no tensor
    cast                                 keeps the shape
    same_numbers, view                   for whole numbers: keeps them, or puts them elsewhere
    fresh                                its result shares no memory with other tensors
    math, random, memory                 what bounds it: exponentials and their like, random numbers, bytes
    across                               looks at more than the one dim that it is given
    unread, no_bytes                     reads nothing of what it is given; moves no bytes: it sets memory aside
"""

from __future__ import annotations


def ops_with(*traits: str) -> frozenset[str]:
    """The names of the ops that have one of some traits."""
    return frozenset(name for trait in traits for name in _NAMES[trait])


_TABLE = """
    celu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid relu6 selu softshrink softsign tanhshrink: F
    threshold: F
    relu: F torch method
    sigmoid tanh: F torch method math
    elu gelu mish silu softplus: F math
    rsqrt sqrt: torch method
    clamp_max clamp_min logical_and logical_not logical_or maximum minimum: torch method
    eq ge gt le lt ne: torch operator method
    and_ invert or_: operator
    mul: torch operator method product
    add sub: torch operator method sum
    neg: torch operator method negation
    abs clamp square: torch method
    div: torch method quotient
    exp: torch method math
    true_divide: torch quotient
    acos asin atan cos expm1 log log1p sin tan: torch method math
    truediv: operator quotient
    pow: operator torch method math
    divide: quotient
    multiply: product
    rsub subtract: sum
    negative: negation
    concat hstack vstack: join moved
    cat stack: join moved memory across
    mean sum: kept reduction memory
    to: kept shape_only cast same_numbers memory
    bfloat16 detach double float half type: kept cast
    clone: kept cast same_numbers fresh memory
    contiguous: kept cast same_numbers memory
    flatten reshape squeeze unsqueeze view: kept view
    T broadcast_to diag: moved
    dot einsum inner linear matmul mm mv tensordot: moved reduction
    trace: moved reduction memory
    expand_as view_as: moved shape_only
    expand getitem movedim permute swapaxes t transpose unflatten: moved view
    chunk index_select narrow select split unbind: moved view memory
    diagonal flip repeat roll tile: moved memory
    addmm baddbmm bmm cross_entropy linear_cross_entropy vdot: reduction
    binary_cross_entropy binary_cross_entropy_with_logits: each reduction math
    bincount count_nonzero index_add kl_div nansum scatter_add: reduction memory
    full ones zeros: factory fresh memory
    empty: factory fresh no_bytes
    new_full new_ones new_zeros: factory memory unread
    new_empty: factory no_bytes
    type_as: cast shape_only
    reshape_as: shape_only
    device dtype shape size: no_tensor
    bool: cast
    int long: cast same_numbers
    ravel tensor_split: view
    full_like ones_like zeros_like: torch fresh memory unread
    empty_like: fresh no_bytes
    acosh asinh atan2 atanh cosh digamma erf erfc erfinv exp2 gelu_backward lgamma log10: math
    log2 log_sigmoid_backward log_sigmoid_forward log_softmax log_softmax_backward_data logaddexp: math
    logsumexp mish_backward safe_softmax silu_backward sinh softplus_backward thnn_fused_gru_cell: math
    thnn_fused_lstm_cell: math
    softmax: math memory
    fused_dropout multinomial native_dropout rand randint randn randperm: random
    bernoulli cauchy exponential geometric log_normal normal rand_like randint_like randn_like random: random unread
    uniform: random unread
    all amax amin aminmax any arange argmax argmin assert_async bucketize channel_shuffle col2im complex: memory
    constant_pad_nd copy cumprod cumsum embedding embedding_bag embedding_bag_dense embedding_bag_forward_only: memory
    embedding_bag_per_sample_weights embedding_dense eye fused_rms_norm gather glu huber_loss im2col index: memory
    index_copy index_fill index_put index_reduce l1_loss linalg_vector_norm linspace local_scalar_dense: memory
    masked_fill: torch method memory
    masked_scatter masked_select max min mse_loss multi_margin_loss multilabel_margin_loss: memory
    native_group_norm native_layer_norm nll_loss nll_loss2d nonzero norm pad pixel_shuffle pixel_unshuffle: memory
    prelu_kernel prod put reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d: memory
    replication_pad2d replication_pad3d rms_norm rot90 scalar_tensor scatter scatter_reduce searchsorted slice: memory
    smooth_l1_loss soft_margin_loss split_with_sizes std std_mean take to_copy tril triu unfold unsafe_index: memory
    unsafe_index_put value_selecting_reduction var var_mean view_as_complex view_as_real weight_norm_interface: memory
    where: torch method memory
    fill zero: memory unread
    renorm unique_consecutive unique_dim: across
    empty_permuted empty_strided indices lift lift_fresh new_empty_strided resize values: no_bytes
"""

_NAMES: dict[str, set[str]] = {}
for _names, _traits in (line.split(": ") for line in _TABLE.strip().splitlines()):
    for _trait in _traits.split():
        _NAMES.setdefault(_trait, set()).update(_names.split())
