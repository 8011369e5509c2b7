"""Causal language models of the library at small sizes: `NAME(batch, sequence, layers, loss)`."""

from __future__ import annotations

from typing import Any

import transformers as hf

from tests.models.common import VOCABULARY, Built, language

WIDTH, HEADS, INNER = 32, 4, 48
GROUPED = {"num_key_value_heads": 2}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}


def _sizes(layers: int, **more: Any) -> dict[str, Any]:
    """The names that most configurations share."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "intermediate_size": INNER, "max_position_embeddings": 64, "use_cache": False, **SPECIAL, **more,
    }  # fmt: skip


def gpt2(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    sizes = {"n_embd": WIDTH, "n_layer": layers, "n_head": HEADS, "n_positions": 64, "vocab_size": VOCABULARY}
    return language(hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **SPECIAL, use_cache=False)), batch, sequence, loss)


def gpt_neox(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    return language(hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_sizes(layers))), batch, sequence, loss)


def opt(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    sizes = _sizes(layers, ffn_dim=INNER, word_embed_proj_dim=WIDTH, layerdrop=0.0) | {"pad_token_id": 1}
    return language(hf.OPTForCausalLM(hf.OPTConfig(**sizes)), batch, sequence, loss)


def bloom(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """ALiBi in place of positions."""
    sizes = {"hidden_size": WIDTH, "n_layer": layers, "n_head": HEADS, "vocab_size": VOCABULARY}
    return language(hf.BloomForCausalLM(hf.BloomConfig(**sizes, **SPECIAL, use_cache=False)), batch, sequence, loss)


def falcon(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """One key and value head for all queries, attention and MLP in parallel."""
    sizes = _sizes(layers, multi_query=True, parallel_attn=True, new_decoder_architecture=False, bias=False)
    return language(hf.FalconForCausalLM(hf.FalconConfig(**sizes)), batch, sequence, loss)


def phi(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Rotary over half of a head, parallel attention and MLP."""
    return language(hf.PhiForCausalLM(hf.PhiConfig(**_sizes(layers))), batch, sequence, loss)


def llama(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Grouped queries, rotary positions, SwiGLU, RMS norm."""
    return language(hf.LlamaForCausalLM(hf.LlamaConfig(**_sizes(layers, **GROUPED))), batch, sequence, loss)


def mistral(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """A window that slides over the keys."""
    sizes = _sizes(layers, **GROUPED, sliding_window=4)
    return language(hf.MistralForCausalLM(hf.MistralConfig(**sizes)), batch, sequence, loss)


def qwen2(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    return language(hf.Qwen2ForCausalLM(hf.Qwen2Config(**_sizes(layers, **GROUPED))), batch, sequence, loss)


def qwen3(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Norms of queries and keys."""
    sizes = _sizes(layers, **GROUPED, head_dim=8)
    return language(hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes)), batch, sequence, loss)


def gemma2(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Soft caps of scores and logits, windows in every other layer, tied embeddings."""
    sizes = _sizes(layers, **GROUPED, head_dim=8, sliding_window=4, query_pre_attn_scalar=8)
    return language(hf.Gemma2ForCausalLM(hf.Gemma2Config(**sizes)), batch, sequence, loss)


def mixtral(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Four experts, two a token."""
    config = hf.MixtralConfig(**_sizes(layers, **GROUPED, num_local_experts=4, num_experts_per_tok=2))
    config._experts_implementation = "batched_mm"
    return language(hf.MixtralForCausalLM(config), batch, sequence, loss)


def qwen3_moe(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Many small experts."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = hf.Qwen3MoeConfig(**_sizes(layers, **GROUPED, **experts, head_dim=8))
    config._experts_implementation = "batched_mm"
    return language(hf.Qwen3MoeForCausalLM(config), batch, sequence, loss)


def deepseek_v3(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Latent attention; the first layer dense, then shared and routed experts in groups."""
    attention = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    experts = {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "n_shared_experts": 1,
    }  # fmt: skip
    config = hf.DeepseekV3Config(**_sizes(layers, **attention, **experts, num_key_value_heads=HEADS))
    config._experts_implementation = "batched_mm"
    return language(hf.DeepseekV3ForCausalLM(config), batch, sequence, loss)


def mamba2(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """A state space model: chunked scans."""
    states = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 4, "expand": 2}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": layers, "use_cache": False}
    return language(hf.Mamba2ForCausalLM(hf.Mamba2Config(**sizes, **states, **SPECIAL)), batch, sequence, loss)


def gemma3(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Two rotary bases: one of the layers with a window, one of the others."""
    sizes = _sizes(layers, **GROUPED, head_dim=8, sliding_window=4, query_pre_attn_scalar=8)
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return language(hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**sizes, layer_types=kinds)), batch, sequence, loss)


def gptj(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Rotary positions as a table of sines and cosines."""
    sizes = {"n_embd": WIDTH, "n_layer": layers, "n_head": HEADS, "n_positions": 64, "rotary_dim": 4}
    config = hf.GPTJConfig(**sizes, **SPECIAL, vocab_size=VOCABULARY, use_cache=False)
    return language(hf.GPTJForCausalLM(config), batch, sequence, loss)


def codegen(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Four blocks of query, value and key in one projection."""
    sizes = {"n_embd": WIDTH, "n_layer": layers, "n_head": HEADS, "n_positions": 64, "n_ctx": 64, "rotary_dim": 4}
    config = hf.CodeGenConfig(**sizes, **SPECIAL, vocab_size=VOCABULARY, use_cache=False)
    return language(hf.CodeGenForCausalLM(config), batch, sequence, loss)


def phi3(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Queries, keys and values in one projection, gate and up in another."""
    return language(hf.Phi3ForCausalLM(hf.Phi3Config(**_sizes(layers, **GROUPED))), batch, sequence, loss)


def stablelm(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Rotary over a quarter of a head, layer norm."""
    return language(hf.StableLmForCausalLM(hf.StableLmConfig(**_sizes(layers, **GROUPED))), batch, sequence, loss)


def cohere(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Attention and MLP in parallel, rotary pairs that stand side by side, scaled logits."""
    return language(hf.CohereForCausalLM(hf.CohereConfig(**_sizes(layers, **GROUPED))), batch, sequence, loss)


def granite(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Multipliers of embeddings, residuals and attention."""
    return language(hf.GraniteForCausalLM(hf.GraniteConfig(**_sizes(layers, **GROUPED))), batch, sequence, loss)


def olmo(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Layer norm without weights."""
    return language(hf.OlmoForCausalLM(hf.OlmoConfig(**_sizes(layers))), batch, sequence, loss)


def olmo2(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Norms behind attention and MLP."""
    return language(hf.Olmo2ForCausalLM(hf.Olmo2Config(**_sizes(layers))), batch, sequence, loss)


def starcoder2(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    sizes = _sizes(layers, **GROUPED, residual_dropout=0.1, embedding_dropout=0.1)
    return language(hf.Starcoder2ForCausalLM(hf.Starcoder2Config(**sizes)), batch, sequence, loss)


def mpt(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """ALiBi, a fused projection, no biases."""
    sizes = {"d_model": WIDTH, "n_layers": layers, "n_heads": HEADS, "max_seq_len": 64, "vocab_size": VOCABULARY}
    return language(hf.MptForCausalLM(hf.MptConfig(**sizes, use_cache=False)), batch, sequence, loss)


def gpt_oss(
    batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True, form: str = "batched_mm", experts: int = 4,
    intermediate_size: int = 48,
) -> Built:  # fmt: skip
    """Attention sinks, windows, and experts whose weights are stacked."""
    sizes = {"num_local_experts": experts, "num_experts_per_tok": 2, "sliding_window": 4, "head_dim": 8}
    config = hf.GptOssConfig(**{**_sizes(layers, **GROUPED, **sizes), "intermediate_size": intermediate_size})
    config._experts_implementation = form
    return language(hf.GptOssForCausalLM(config), batch, sequence, loss)


def olmoe(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Eight experts, norms of queries and keys over all heads."""
    config = hf.OlmoeConfig(**_sizes(layers, num_experts=8, num_experts_per_tok=2))
    config._experts_implementation = "batched_mm"
    return language(hf.OlmoeForCausalLM(config), batch, sequence, loss)


def mamba(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """A selective scan, one position after another."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": layers, "use_cache": False}
    config = hf.MambaConfig(**sizes, **SPECIAL, state_size=8, time_step_rank=4)
    return language(hf.MambaForCausalLM(config), batch, sequence, loss)


def rwkv(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Linear attention as a recurrence."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": layers, "context_length": 64}
    config = hf.RwkvConfig(**sizes, bos_token_id=0, eos_token_id=1, use_cache=False)
    return language(hf.RwkvForCausalLM(config), batch, sequence, loss)
