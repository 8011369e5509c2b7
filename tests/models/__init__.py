"""Real models at small sizes. `NAMES` says where each one is: `tests.models.FILE:NAME`."""

from __future__ import annotations

_FILES = {
    "decoders": "gpt2 gpt_neox opt bloom falcon phi llama mistral qwen2 qwen3 gemma2 "
    "mixtral qwen3_moe deepseek_v3 mamba2",
    "encoders": "bert roberta distilbert electra deberta albert",
    "pairs": "t5 bart whisper clip",
    "vision": "vit dinov2 swin convnext resnet",
    "plain": "lenet unet lstm transformer_encoder",
    "nanogpt": "nanogpt",
    "handwritten": "mingpt small_vit small_resnet root_sequential seq2seq vae gcn dlrm translator nested_lists "
    "module_dict shared_twice two_values universal blocks",
}
NAMES = {name: f"tests.models.{file}:{name}" for file, names in _FILES.items() for name in names.split()}
