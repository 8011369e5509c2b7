"""Real models at small sizes. `NAMES` says where each one is: `tests.models.FILE:NAME`."""

from __future__ import annotations

from importlib.util import find_spec

_FILES = {
    "decoders": "gpt2 gpt_neox opt bloom falcon phi llama mistral qwen2 qwen3 gemma2 "
    "mixtral qwen3_moe deepseek_v3 mamba2 gemma3 gptj codegen phi3 stablelm cohere granite olmo olmo2 starcoder2 mpt "
    "gpt_oss olmoe mamba rwkv",
    "encoders": "bert roberta distilbert electra deberta albert "
    "mpnet modernbert roformer squeezebert xlnet longformer convbert nystromformer",
    "pairs": "t5 bart whisper clip mbart pegasus m2m100 siglip blip llava qwen2_vl",
    "vision": "vit dinov2 swin convnext resnet deit beit segformer detr mobilenet_v2 regnet videomae",
    "speech": "wav2vec2 hubert spectrogram_transformer sew dac",
    "plain": "lenet unet lstm transformer_encoder",
    "nanogpt": "nanogpt",
    "handwritten": "mingpt small_vit small_resnet root_sequential seq2seq vae gcn dlrm translator nested_lists "
    "module_dict shared_twice two_values universal blocks",
    "published": "nanogpt_slow meta_llama dlrm_bags gcn_dense graphsage gat seq2seq_gru seq2seq_lstm vae_normal "
    "wavenet transformer pointnet deepfm nerf",
    "timm_models": "timm_vit timm_eva02 timm_swin timm_mixer timm_convnextv2 timm_efficientnet timm_mobilenetv3 "
    "timm_densenet timm_vgg timm_resnext timm_cait timm_levit",
    "diffusion": "diffusers_unet diffusers_unet_condition diffusers_dit diffusers_vae diffusers_sd3",
    "adapters": "lora_llama lora_gpt2 dora_bert",
    "hybrids": "minimax lfm2 qwen3_next falcon_h1 bamba zamba2 jamba recurrent_gemma glm4_moe deepseek_v2 minicpm3 "
    "phimoe nemotron diffllama xlstm ernie4_5_moe dots1",
    "series": "esm canine layoutlm lilt perceiver fnet mobilebert big_bird rembert patchtst patchtsmixer timesfm "
    "time_series_transformer funnel decision_transformer autoformer informer",
    "scenes": "hiera pvt_v2 focalnet swinv2 cvt poolformer mobilevit dinov3 vjepa2 timesformer vivit dpt mask2former "
    "rt_detr yolos grounding_dino sam2 hifi_gan swin2sr glpn clipseg owlvit",
    "papers": "retnet tab_transformer graphormer xcit twins",
    "papers_images": "googlenet deeplab_v3 maxvit flux sana wan",
}
NAMES = {name: f"tests.models.{file}:{name}" for file, names in _FILES.items() for name in names.split()}
_TRANSFORMERS = ("decoders", "encoders", "pairs", "vision", "speech", "hybrids", "series", "scenes")
_LIBRARIES = dict.fromkeys(_TRANSFORMERS, ("transformers",)) | {
    "timm_models": ("timm", "torchvision"),
    "diffusion": ("diffusers",),
    "adapters": ("transformers", "peft"),
}


def missing_library(name: str) -> str:
    """The first library that the model `name` needs and that is not installed; else an empty text."""
    file = NAMES[name].partition(":")[0].rpartition(".")[2]
    return next((library for library in _LIBRARIES.get(file, ()) if find_spec(library) is None), "")
