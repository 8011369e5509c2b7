"""The table of how a user writes each ATen operator. An operator that isn't here is written by its own name.

`{0}` is an operand, `{name}` an attribute, `{a|2}` attribute a or else operand 2, `{*}` all operands, `{*name}` the
items of a tuple, `{device}` the device. `<name=x>` is a keyword argument, left out where it is absent, None or x;
`<@name=x>` the same as a positional one; `<2>` and `<name:2>` an operand, left out where it is absent.
"""

from __future__ import annotations

# Operators that `torch.NAME` takes with the arguments of their schemas.
_BY_TORCH = (
    "adaptive_max_pool1d add addcdiv addcmul addmv addr alpha_dropout argsort avg_pool1d baddbmm bernoulli bilinear",
    "bucketize celu column_stack copysign cosine_similarity count_nonzero cross cummax cummin diag diag_embed",
    "diagonal dist dot dstack embedding_bag erfc erfinv feature_alpha_dropout feature_dropout fill fmod gradient",
    "grid_sampler gru hardshrink hstack index_fill index_put index_reduce inner isclose isin kron kthvalue lerp",
    "lgamma linspace logaddexp logcumsumexp logit lstm max max_pool1d max_pool3d maximum median meshgrid min",
    "minimum mode multinomial nan_to_num nansum norm outer pairwise_distance poisson_nll_loss positive prod",
    "quantile renorm rnn_relu rnn_tanh rot90 scatter_reduce searchsorted signbit slice_scatter sort std std_mean",
    "take take_along_dim tile trace var var_mean vstack xlogy",
)
BY_TORCH = frozenset(" ".join(_BY_TORCH).split())

INFIX = {
    "__and__": "&", "__or__": "|", "__xor__": "^", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^",
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floor_divide": "//", "remainder": "%", "pow": "**",
    "matmul": "@", "mm": "@", "bmm": "@", "mv": "@",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip

_METHODS = (
    "abs acos asin atan ceil clone contiguous cos cosh detach erf exp exp2 expm1 floor frac isfinite isinf isnan",
    "log log10 log1p log2 logical_not reciprocal round rsqrt sigmoid sign sin sinh sqrt square t tan tanh trunc",
)
_WITH_ONE = ("atan2 logical_and logical_or logical_xor",)
_FUNCTIONAL = ("hardsigmoid hardswish logsigmoid mish relu relu6 selu silu softsign tanhshrink",)
_CONV = "({0}, {1}<2><stride=1><padding=0><dilation=1><groups=1>)"
_NLL = "F.nll_loss({0}, {1}<weight:2><ignore_index=-100><reduction='mean'>)"
_LOSS = "F.{name}({{0}}, {{1}}<reduction='mean'>{more})"
_POOL = "({0}, {kernel_size}<stride=()><padding=0>"

TEMPLATES: dict[str, str] = {
    **{name: f"{{0}}.{name}()" for name in " ".join(_METHODS).split()},
    **{name: f"{{0}}.{name}({{1}})" for name in " ".join(_WITH_ONE).split()},
    **{name: f"F.{name}({{0}})" for name in " ".join(_FUNCTIONAL).split()},
    "_unsafe_view": "{0}.reshape({*size})",
    "adaptive_avg_pool1d": "F.adaptive_avg_pool1d({0}, {output_size})",
    "adaptive_avg_pool2d": "F.adaptive_avg_pool2d({0}, {output_size})",
    "addmm": "torch.addmm({0}, {1}, {2}<beta=1><alpha=1>)",
    "alias": "{0}",
    "all": "{0}.all(<@dim><keepdim=False>)",
    "amax": "{0}.amax({dim}<keepdim=False>)",
    "amin": "{0}.amin({dim}<keepdim=False>)",
    "any": "{0}.any(<@dim><keepdim=False>)",
    "arange": "torch.arange(<@start><@end><@step=1><dtype>, device={device})",
    "argmax": "{0}.argmax(<@dim><keepdim=False>)",
    "argmin": "{0}.argmin(<@dim><keepdim=False>)",
    "as_strided": "{0}.contiguous().as_strided({size}, {stride}<storage_offset=None>)",
    "avg_pool2d": f"F.avg_pool2d{_POOL}<ceil_mode=False><count_include_pad=True><divisor_override>)",
    "binary_cross_entropy": "F.binary_cross_entropy({0}, {1}<weight:2><reduction='mean'>)",
    "binary_cross_entropy_with_logits": "F.binary_cross_entropy_with_logits({0}, {1}<weight:2><reduction='mean'>"
    "<pos_weight:3>)",
    "bitwise_not": "~{0}",
    "broadcast_to": "{0}.expand({*size})",
    "cat": "torch.cat([{*}]<dim=0>)",
    "chunk": "{0}.chunk({chunks}<dim=0>)",
    "clamp": "{0}.clamp(<min><max><min:1><max:2>)",
    "clamp_min": "{0}.clamp(min={min})",
    "constant_pad_nd": "F.pad({0}, {pad}<value=0>)",
    "conv1d": f"F.conv1d{_CONV}",
    "conv2d": f"F.conv2d{_CONV}",
    "conv3d": f"F.conv3d{_CONV}",
    **{
        f"conv_transpose{n}d": f"F.conv_transpose{n}d"
        "({0}, {1}<2><stride=1><padding=0><output_padding=0><groups=1><dilation=1>)"
        for n in (1, 2, 3)
    },
    "cross_entropy_loss": "F.cross_entropy({0}, {1}<weight:2><ignore_index=-100>"
    "<reduction='mean'><label_smoothing=0.0>)",
    "cumprod": "{0}.cumprod({dim}<dtype>)",
    "cumsum": "{0}.cumsum({dim}<dtype>)",
    "diff": "torch.diff({0}<n=1><dim=-1><prepend:1><append:2>)",
    "dropout": "F.dropout({0}, {p}, training={train})",
    "einsum": "torch.einsum({equation}, {*})",
    "elu": "F.elu({0}<alpha=1>)",
    "embedding": "F.embedding({1}, {0}<padding_idx=-1><scale_grad_by_freq=False><sparse=False>)",
    "embedding_bags": "F.embedding_bag({1}, {0}<2><mode='mean'><per_sample_weights:3><padding_idx>)",
    "expand": "{0}.expand({*size})",
    "flatten": "{0}.flatten(<@start_dim=0><end_dim=-1>)",
    "flip": "{0}.flip({dims})",
    "full": "torch.full({size}, {fill_value}<dtype>, device={device})",
    "full_like": "torch.full_like({0}, {fill_value}<dtype>)",
    "gather": "{0}.gather({dim}, {1})",
    "gelu": "F.gelu({0}<approximate='none'>)",
    "glu": "F.glu({0}<dim=-1>)",
    "group_norm": "F.group_norm({0}, {num_groups}<weight:1><bias:2><eps=1e-05>)",
    "huber_loss": _LOSS.format(name="huber_loss", more="<delta=1.0>"),
    "l1_loss": _LOSS.format(name="l1_loss", more=""),
    "smooth_l1_loss": _LOSS.format(name="smooth_l1_loss", more="<beta=1.0>"),
    "soft_margin_loss": _LOSS.format(name="soft_margin_loss", more=""),
    "hardtanh": "F.hardtanh({0}, {min_val}, {max_val})",
    "index_add": "{0}.index_add({dim}, {1}, {2}<alpha=1>)",
    "index_copy": "{0}.index_copy({dim}, {1}, {2})",
    "index_select": "{0}.index_select({dim}, {1})",
    "instance_norm": "F.instance_norm({0}<running_mean:3><running_var:4><weight:1><bias:2><use_input_stats=True>"
    "<momentum=0.1><eps=1e-05>)",
    "layer_norm": "F.layer_norm({0}, {normalized_shape}<weight:1><bias:2><eps=1e-05>)",
    "leaky_relu": "F.leaky_relu({0}<@negative_slope=0.01>)",
    "lift_fresh_copy": "{0}",
    "linear": "F.linear({0}, {1}<2>)",
    "linear_in_out": "F.linear({0}, {1}.t()<2>)",
    "log_softmax": "F.log_softmax({0}, dim={dim}<dtype>)",
    "logsumexp": "{0}.logsumexp({dim}<keepdim=False>)",
    "masked_fill": "{0}.masked_fill({1}, {value|2})",
    "max_pool2d": f"F.max_pool2d{_POOL}<dilation=1><ceil_mode=False>)",
    "mean": "{0}.mean(<@dim><keepdim=False><dtype>)",
    "mse_loss": _LOSS.format(name="mse_loss", more=""),
    "narrow": "{0}.narrow({dim}, {start|1}, {length})",
    "neg": "-{0}",
    "new_full": "{0}.new_full({size}, {fill_value}<dtype>)",
    "new_ones": "{0}.new_ones({size}<dtype>)",
    "new_zeros": "{0}.new_zeros({size}<dtype>)",
    "nll_loss": _NLL,
    "nll_loss_nd": _NLL,
    "one_hot": "F.one_hot({0}, {num_classes})",
    "ones": "torch.ones({size}<dtype>, device={device})",
    "ones_like": "torch.ones_like({0}<dtype>)",
    "pad": "F.pad({0}, {pad}<mode='constant'><value>)",
    "permute": "{0}.permute({*dims})",
    "repeat": "{0}.repeat({*repeats})",
    "repeat_interleave": "{0}.repeat_interleave({repeats|1}<dim>)",
    "reshape": "{0}.reshape({*shape})",
    "pixel_shuffle": "F.pixel_shuffle({0}, {upscale_factor})",
    "pixel_unshuffle": "F.pixel_unshuffle({0}, {downscale_factor})",
    "prelu": "F.prelu({0}, {1})",
    "rms_norm": "F.rms_norm({0}, {normalized_shape}<weight:1><eps>)",
    "roll": "{0}.roll({shifts}, {dims})",
    "scalar_tensor": "torch.tensor({s}<dtype>, device={device})",
    "scaled_dot_product_attention": "F.scaled_dot_product_attention({0}, {1}, {2}<attn_mask:3>"
    "<dropout_p=0.0><is_causal=False><scale><enable_gqa=False>)",
    "scatter": "{0}.scatter({dim}, {1}, {value|2})",
    "scatter_add": "{0}.scatter_add({dim}, {1}, {2})",
    "select": "{0}.select({dim}, {index})",
    "select_scatter": "torch.select_scatter({0}, {1}, {dim}, {index})",
    "softmax": "F.softmax({0}, dim={dim}<dtype>)",
    "softplus": "F.softplus({0}<beta=1><threshold=20>)",
    "split": "{0}.split({split_size|split_sizes}<dim=0>)",
    "split_with_sizes": "{0}.split({split_sizes}<dim=0>)",
    "squeeze": "{0}.squeeze(<@dim>)",
    "stack": "torch.stack([{*}]<dim=0>)",
    "sum": "{0}.sum(<@dim=()><keepdim=False><dtype>)",
    "swapaxes": "{0}.transpose({axis0}, {axis1})",
    "topk": "{0}.topk({k}<dim=-1><largest=True><sorted=True>)",
    "transpose": "{0}.transpose({dim0}, {dim1})",
    "tril": "{0}.tril(<@diagonal=0>)",
    "triu": "{0}.triu(<@diagonal=0>)",
    "unbind": "{0}.unbind(<@dim=0>)",
    "unflatten": "{0}.unflatten({dim}, {sizes})",
    "unsqueeze": "{0}.unsqueeze({dim})",
    "view": "{0}.reshape({*size})",
    "zeros": "torch.zeros({size}<dtype>, device={device})",
    "zeros_like": "torch.zeros_like({0}<dtype>)",
}
