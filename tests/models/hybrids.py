"""Language models with state spaces, linear attention or experts: `NAME(batch, sequence, layers, loss)`."""

from __future__ import annotations

from typing import Any

import transformers as hf

from tests.models.common import Built, language
from tests.models.decoders import GROUPED, HEADS, _sizes

STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 4}


def _causal(name: str, layers: int, batch: int, sequence: int, loss: bool, **more: Any) -> Built:
    """`name`: of the classes, without `Config` and `ForCausalLM`. Experts in the form without a loop."""
    config = getattr(hf, f"{name}Config")(**_sizes(layers, **more))
    config._experts_implementation = "batched_mm"
    return language(getattr(hf, f"{name}ForCausalLM")(config), batch, sequence, loss)


def minimax(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Lightning attention in blocks in every other layer; experts."""
    kinds = ["full_attention" if i % 2 else "linear_attention" for i in range(layers)]
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 4}
    return _causal("MiniMax", layers, batch, sequence, loss, **GROUPED, **experts, layer_types=kinds, head_dim=8)


def lfm2(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Short convolutions between two gates, attention in every other layer."""
    kinds = ["full_attention" if i % 2 else "conv" for i in range(layers)]
    return _causal("Lfm2", layers, batch, sequence, loss, **GROUPED, layer_types=kinds, block_auto_adjust_ff_dim=False)


def qwen3_next(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Gated delta rule in chunks, gated attention in every other layer; routed and shared experts."""
    kinds = ["full_attention" if i % 2 else "linear_attention" for i in range(layers)]
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    linear |= {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts |= {"shared_expert_intermediate_size": 16}
    return _causal("Qwen3Next", layers, batch, sequence, loss, **GROUPED, **linear, **experts, layer_types=kinds)


def falcon_h1(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Attention and a state space side by side in every layer."""
    return _causal("FalconH1", layers, batch, sequence, loss, **GROUPED, **STATES, mamba_d_ssm=64, head_dim=8)


def bamba(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """State spaces, and attention in the last layer."""
    return _causal("Bamba", layers, batch, sequence, loss, **GROUPED, **STATES, attn_layer_indices=[layers - 1])


def zamba2(batch: int = 4, sequence: int = 8, layers: int = 3, loss: bool = True) -> Built:
    """State spaces, and one attention block that several layers share, with adapters of each."""
    kinds = ["hybrid" if i % 2 else "mamba" for i in range(layers)]
    states = {"mamba_d_state": 8, "mamba_ngroups": 2, "n_mamba_heads": 8, "chunk_size": 4, "adapter_rank": 4}
    states |= {"use_mamba_kernels": False, "num_key_value_heads": HEADS}
    return _causal("Zamba2", layers, batch, sequence, loss, **states, layers_block_type=kinds)


def jamba(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """A selective scan, then attention; experts in every other layer."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    states = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
    return _causal("Jamba", layers, batch, sequence, loss, **GROUPED, **experts, **states)


def recurrent_gemma(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """A gated linear recurrence, step by step, and attention in a window."""
    kinds = {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 4, "head_dim": 8}
    return _causal("RecurrentGemma", layers, batch, sequence, loss, **GROUPED, **kinds)


def glm4_moe(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """The first layer dense, then experts chosen by sigmoids and a bias; half of a head is rotated."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    experts |= {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "head_dim": 8}
    return _causal("Glm4Moe", layers, batch, sequence, loss, **GROUPED, **experts)


def deepseek_v2(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Latent attention with complex rotations, experts in groups."""
    attention = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    experts |= {"topk_method": "group_limited_greedy", "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    experts |= {"n_shared_experts": 1, "num_key_value_heads": HEADS, "head_dim": 4}
    return _causal("DeepseekV2", layers, batch, sequence, loss, **attention, **experts)


def minicpm3(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Latent attention, scaled embeddings and residuals."""
    attention = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    return _causal("MiniCPM3", layers, batch, sequence, loss, **attention, num_key_value_heads=HEADS)


def phimoe(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Two experts by a sparse mixer."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return _causal("Phimoe", layers, batch, sequence, loss, **GROUPED, **experts)


def nemotron(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Squared ReLU, layer norm whose weight is counted from one."""
    return _causal("Nemotron", layers, batch, sequence, loss, **GROUPED, head_dim=8)


def diffllama(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """The difference of two attentions."""
    return _causal("DiffLlama", layers, batch, sequence, loss, **GROUPED)


def xlstm(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """A matrix memory with exponential gates, in chunks."""
    sizes = _sizes(layers, num_heads=HEADS, chunk_size=4, mode="train", autocast_kernel_dtype="float32")
    for name in ("num_attention_heads", "intermediate_size", "max_position_embeddings"):
        sizes.pop(name)
    return language(hf.xLSTMForCausalLM(hf.xLSTMConfig(**sizes)), batch, sequence, loss)


def ernie4_5_moe(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """The first layer dense, then experts whose choice a bias of the statistics shifts, next to a shared one."""
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 16}
    experts |= {"moe_layer_start_index": 1, "moe_layer_end_index": layers - 1}
    return _causal("Ernie4_5_Moe", layers, batch, sequence, loss, **GROUPED, **experts)


def dots1(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Norms of queries and keys, attention in a window in every other layer; experts by sigmoids."""
    kinds = ["sliding_attention" if i % 2 else "full_attention" for i in range(layers)]
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    experts |= {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "head_dim": 8, "sliding_window": 4}
    return _causal("Dots1", layers, batch, sequence, loss, **GROUPED, **experts, layer_types=kinds)
