"""Names of torch's functions, by what they do with the rows of images, for the watch of a loop."""

from __future__ import annotations

import re

LAYERS = {  # with images in the first dimension, they compute each row alone
    *("conv2d", "batch_norm", "linear", "relu", "relu_", "silu", "gelu", "hardswish", "hardsigmoid", "sigmoid", "tanh"),
    *("leaky_relu", "relu6", "hardtanh", "elu", "mish", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"),
}
TAKE_WEIGHTS = {  # functions of images and weights
    *("linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "prelu"),
}
STATISTICS = {"mean", "sum", "nanmean", "nansum"}
CONTRACTIONS = {"einsum", "dot", "vdot", "inner", "tensordot", "matmul", "__matmul__"}  # sums of products
NORMS = {"norm", "dist", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm"}  # of all numbers: roots of sums
LOSSES = re.compile(r".*_loss|cross_entropy|kl_div|binary_cross_entropy.*")  # a mean unless told otherwise
SCALE_FREE = {"sign", "sign_", "sgn", "normalize", "cosine_similarity", "layer_norm", "instance_norm", "group_norm"}

ELEMENTWISE = {"add", "add_", "__add__", "__iadd__", "mul", "mul_", "__mul__"}
DIVISIONS = {"div", "__truediv__", "true_divide", "divide", "div_", "__itruediv__", "true_divide_", "divide_"}
MULTIPLICATIONS = {"mul", "__mul__", "__rmul__", "multiply", "mul_", "__imul__", "multiply_"}
JOINS = {"cat", "concat", "concatenate", "stack", "vstack"}  # of several tensors
ADDITIONS = {  # of several tensors
    *("add", "sub", "__add__", "__radd__", "__sub__", "__rsub__", "add_", "sub_", "__iadd__", "__isub__"),
    *("__setitem__", *JOINS),
}
COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"}
LINEAR = {
    *("mean", "sum", "add", "sub", "neg", "__add__", "__radd__", "__sub__", "__rsub__", "__neg__", "stack", "cat"),
    *("mul", "__mul__", "__rmul__", "div", "__truediv__", "detach", "clone", "to", "float", "double", "__getitem__"),
    *("squeeze", "unsqueeze", "reshape", "view", "flatten", "lerp", "item", "__float__", "tolist", "backward", "size"),
    *("add_", "sub_", "mul_", "div_", "__iadd__", "__isub__", "__imul__", "__itruediv__", "multiply", "subtract"),
    *("half", "bfloat16", "type", "cpu", "cuda", "contiguous", "requires_grad_", "nansum", "nanmean", "expand"),
    *("matmul", "__matmul__", "__rmatmul__", "dot", "mv", "mm", "inner", "einsum", "tensordot", "unbind", "grad"),
    "__setitem__",
}
BENDS = {  # functions that are linear in parts, so that a value need not show where they bend
    *("abs", "clamp", "clamp_", "clamp_min", "clamp_max", "clip", "relu", "relu_", "leaky_relu", "hardtanh"),
    *("threshold", "maximum", "minimum", "fmax", "fmin", "max", "min", "amax", "amin", "median", "quantile"),
    *("where", "sign", "sort", "argsort", "topk", "argmax", "argmin", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("margin_ranking_loss", "lt", "le", "gt", "ge", "__lt__", "__le__", "__gt__", "__ge__"),
}

PUT_BACK = {  # rows where they were before a selection
    *("index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_", "scatter", "scatter_add"),
    "__setitem__",
}
LIKE_ANOTHER = {"to", "type_as", "expand_as", "view_as", "reshape_as"}  # the other tensor gives only type or shape
NEW_TENSORS = {  # of another one's type or shape, or what NumPy has made of one
    *("zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_empty", "__array_wrap__"),
}
READ_BY_PYTHON = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__"}
NOT_REPEATED = {  # functions with an effect beyond their result, or whose result does not depend on the images
    *("backward", "grad", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_"),
    *("__set__", "__reduce_ex__", "__deepcopy__", "__repr__", "__format__", "__dlpack__", "__len__", "size", "dim"),
    *("share_memory_", *READ_BY_PYTHON, *NEW_TENSORS),
}
