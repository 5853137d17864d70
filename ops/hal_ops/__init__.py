"""Operators of DeepSeek V4: contracts whose bodies are the references. Importing this package declares all of them."""

from hal_ops.attention import index_topk, page_rows, query_norm_rope, sparse_attention, write_kv, write_rows
from hal_ops.collective import all_gather, all_reduce
from hal_ops.compress import compress, compress_entries
from hal_ops.linear import (
    embed,
    grouped_linear,
    linear_dense,
    linear_fp4,
    linear_fp8,
    linear_fp32,
    linear_int8,
    lm_head,
    matmul_fp4,
    matmul_fp8,
    matmul_int8,
)
from hal_ops.mhc import hc_enter, hc_head, hc_mix, hc_post, hc_pre
from hal_ops.moe import (
    gate_hash,
    gate_topk,
    grouped_matmul_dense,
    grouped_matmul_fp4,
    grouped_matmul_fp8,
    grouped_matmul_int8,
    moe_combine,
    moe_experts,
    moe_sort,
    shared_expert,
    swiglu,
)
from hal_ops.norm import head_rms_norm, rms_norm
from hal_ops.quant import fake_quant_fp4, fake_quant_fp8, hadamard, quant_act_fp8, quant_act_int8
from hal_ops.rotary import rope
from hal_ops.sampling import penalize, sample
from hal_ops.weight import Weight, linear

__all__ = [
    "Weight",
    "all_gather",
    "all_reduce",
    "compress",
    "compress_entries",
    "embed",
    "fake_quant_fp4",
    "fake_quant_fp8",
    "gate_hash",
    "gate_topk",
    "grouped_linear",
    "grouped_matmul_dense",
    "grouped_matmul_fp4",
    "grouped_matmul_fp8",
    "grouped_matmul_int8",
    "hadamard",
    "hc_enter",
    "hc_head",
    "hc_mix",
    "hc_post",
    "hc_pre",
    "head_rms_norm",
    "index_topk",
    "linear",
    "linear_dense",
    "linear_fp4",
    "linear_fp8",
    "linear_fp32",
    "linear_int8",
    "lm_head",
    "matmul_fp4",
    "matmul_fp8",
    "matmul_int8",
    "moe_combine",
    "moe_experts",
    "moe_sort",
    "page_rows",
    "penalize",
    "quant_act_fp8",
    "quant_act_int8",
    "query_norm_rope",
    "rms_norm",
    "rope",
    "sample",
    "shared_expert",
    "sparse_attention",
    "swiglu",
    "write_kv",
    "write_rows",
]
