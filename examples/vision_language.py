"""A vision tower and a language model, each on devices of its own: ViT with data parallelism on two, Llama with data
and tensor parallelism on four.

Features of the images are projected to the width of the text, stand before it, and the model predicts the text. Both
are built by transformers from configurations, small; nothing is downloaded.

autoshard plan examples/vision_language.py:build --mesh dp=2 --place-mesh 1:dp=2,tp=2 --hardware cpu-local \
    --out out/vision_language --verify --backend lockstep
torchrun --nproc-per-node 6 out/vision_language/train.py --backend gloo --steps 5
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

import autoshard

BATCH, WORDS, PICTURE = 4, 6, 16


class VisionLanguage(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

        super().__init__()
        seen = ViTConfig(
            hidden_size=width // 2, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=width,
            image_size=PICTURE, patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        said = LlamaConfig(
            vocab_size=64, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False, tie_word_embeddings=False,
        )  # fmt: skip
        self.vision = autoshard.place(ViTModel(seen, add_pooling_layer=False), "worker", 0)
        self.projector = autoshard.place(nn.Linear(width // 2, width), "worker", 1)
        self.language = autoshard.place(LlamaForCausalLM(said), "worker", 1)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        seen = self.projector(self.vision(images).last_hidden_state)
        text = self.language.get_input_embeddings()(words)
        logits = self.language(inputs_embeds=torch.cat([seen, text], 1)).logits
        predicted = logits[:, seen.shape[1] : -1]
        return functional.cross_entropy(predicted.flatten(0, 1).float(), words[:, 1:].flatten())


def build(width: int = 32, layers: int = 1, double: bool = False) -> tuple[VisionLanguage, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model, images = VisionLanguage(width, layers), torch.randn(BATCH, 3, PICTURE, PICTURE)
    words = torch.randint(0, 64, (BATCH, WORDS))
    return (model.double() if double else model), (images.double() if double else images, words)


def make_loader() -> Iterator[tuple[Tensor, Tensor]]:
    """The example batch again and again."""
    _, batch = build(double=True)
    while True:
        yield batch
