"""Models as people write their first own ones: short files with loops, lists, dicts and ties. `NAME(…, loss)`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.common import CLASSES, VOCABULARY, Built, images, tokens


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


# --- minGPT -----------------------------------------------------------------------------------------------------------


class NewGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class MinAttention(nn.Module):
    def __init__(self, width: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(sequence, sequence)).view(1, 1, sequence, sequence))
        self.heads, self.width = heads, width

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.width, dim=2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MinBlock(nn.Module):
    def __init__(self, width: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = MinAttention(width, heads, sequence)
        self.mlp = nn.ModuleDict({
            "c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width),
            "act": NewGELU(), "dropout": nn.Dropout(0.1),
        })  # fmt: skip
        m = self.mlp
        self.mlpf = lambda x: m.dropout(m.c_proj(m.act(m.c_fc(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class MinGPT(nn.Module):
    def __init__(self, width: int, heads: int, sequence: int, layers: int) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(VOCABULARY, width), "wpe": nn.Embedding(sequence, width), "drop": nn.Dropout(0.1),
            "h": nn.ModuleList([MinBlock(width, heads, sequence) for _ in range(layers)]),
            "ln_f": nn.LayerNorm(width),
        })  # fmt: skip
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device).unsqueeze(0)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def mingpt(batch: int = 4, sequence: int = 8, layers: int = 3, loss: bool = True) -> Built:
    return MinGPT(32, 4, sequence, layers), tuple(tokens(batch, sequence) for _ in range(1 + loss))


# --- vision -----------------------------------------------------------------------------------------------------------


class SmallViT(nn.Module):
    def __init__(self, size: int, patch: int, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.attn = nn.ModuleList([nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(layers)])
        self.mlps = nn.ModuleList([Residual(width) for _ in range(layers)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        for attn, norm, mlp in zip(self.attn, self.norms, self.mlps, strict=True):
            y = norm(x)
            x = mlp(x + attn(y, y, y, need_weights=False)[0])
        logits = self.head(x[:, 0])
        return logits if labels is None else F.cross_entropy(logits, labels)


def small_vit(batch: int = 4, size: int = 16, layers: int = 2, loss: bool = True) -> Built:
    labels = (torch.randint(0, CLASSES, (batch,)),) if loss else ()
    return SmallViT(size, 4, 32, layers), (images(batch, size), *labels)


class BasicBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y)


def small_resnet(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    blocks = [BasicBlock(8, 8, 1), BasicBlock(8, 8, 1), BasicBlock(8, 16, 2), BasicBlock(16, 16, 1)]
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    body = nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))
    labels = (torch.randint(0, CLASSES, (batch,)),) if loss else ()
    return WithLoss(body), (images(batch, size), *labels)


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.model(x)
        return logits if labels is None else nn.CrossEntropyLoss()(logits, labels)


def root_sequential(batch: int = 8, loss: bool = True) -> Built:
    """No class at all; with a loss, the last layer gives it."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().mean()

    layers = [nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 6)]
    return nn.Sequential(*layers, *([Mean()] if loss else [])), (torch.randn(batch, 12),)


# --- pairs, autoencoders, tables, graphs ------------------------------------------------------------------------------


class Seq2Seq(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.encoder = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.GRU(2 * width, width, batch_first=True)
        self.attention = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(2 * width, VOCABULARY)

    def forward(self, src: Tensor, tgt: Tensor, labels: Tensor | None = None) -> Tensor:
        memory, hidden = self.encoder(self.source(src))
        x = self.target(tgt)
        context = memory.mean(1, keepdim=True).expand(-1, x.shape[1], -1)
        y, _ = self.decoder(torch.cat([x, context], -1), hidden[-1:])
        scores = torch.bmm(self.attention(y), memory.transpose(1, 2)).softmax(-1)
        logits = self.out(torch.cat([y, scores @ memory], -1))
        return logits if labels is None else F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


def seq2seq(batch: int = 4, source: int = 6, target: int = 8, loss: bool = True) -> Built:
    labels = (tokens(batch, target),) if loss else ()
    return Seq2Seq(24), (tokens(batch, source), tokens(batch, target), *labels)


class VAE(nn.Module):
    def __init__(self, features: int, hidden: int, latent: int, loss: bool) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = (
            nn.Linear(features, hidden), nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        )  # fmt: skip
        self.fc3, self.fc4 = nn.Linear(latent, hidden), nn.Linear(hidden, features)
        self.loss = loss

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        return mu + torch.randn_like(logvar) * torch.exp(0.5 * logvar)

    def forward(self, x: Tensor) -> Tensor:
        mu, logvar = self.encode(x)
        logits = self.fc4(F.relu(self.fc3(self.reparameterize(mu, logvar))))
        if not self.loss:
            return logits
        reconstruction = F.binary_cross_entropy_with_logits(logits, torch.sigmoid(x), reduction="sum")
        return reconstruction - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def vae(batch: int = 8, loss: bool = True) -> Built:
    return VAE(20, 16, 4, loss), (torch.randn(batch, 20),)


class GCN(nn.Module):
    """Kipf and Welling 2016 with a dense adjacency matrix."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        sizes = [(features, hidden), (hidden, hidden), (hidden, CLASSES)]
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(a, b) * 0.1) for a, b in sizes])
        self.biases = nn.ParameterDict({f"layer {i}": nn.Parameter(torch.zeros(b)) for i, (_, b) in enumerate(sizes)})

    def forward(self, x: Tensor, adjacency: Tensor, labels: Tensor | None = None) -> Tensor:
        a = adjacency + torch.eye(adjacency.shape[0], device=x.device)
        d = a.sum(1).rsqrt()
        a = d[:, None] * a * d[None, :]
        for i, w in enumerate(self.weights):
            x = a @ (x @ w) + self.biases[f"layer {i}"]
            if i + 1 < len(self.weights):
                x = F.dropout(F.relu(x), 0.5, self.training)
        return x if labels is None else F.cross_entropy(x, labels)


def gcn(nodes: int = 12, loss: bool = True) -> Built:
    labels = (torch.randint(0, CLASSES, (nodes,)),) if loss else ()
    return GCN(6, 16), (torch.randn(nodes, 6), torch.rand(nodes, nodes).round(), *labels)


class DLRM(nn.Module):
    """Naumov et al. 2019: tables, a bottom and a top stack, and dot products between all pairs."""

    def __init__(self, tables: int, rows: int, width: int, dense: int) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList([nn.Embedding(rows + i, width) for i in range(tables)])
        self.bot_l = nn.Sequential(nn.Linear(dense, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top_l = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor, clicks: Tensor | None = None) -> Tensor:
        x = self.bot_l(dense)
        rows = [table(sparse[:, i]) for i, table in enumerate(self.emb_l)]
        t = torch.stack([x, *rows], dim=1)
        z = torch.bmm(t, t.transpose(1, 2))
        li, lj = torch.tril_indices(z.shape[1], z.shape[2], offset=-1)
        y = self.top_l(torch.cat([x, z[:, li, lj]], dim=1)).squeeze(1)
        return y if clicks is None else F.binary_cross_entropy_with_logits(y, clicks)


def dlrm(batch: int = 8, tables: int = 3, loss: bool = True) -> Built:
    clicks = (torch.rand(batch).round(),) if loss else ()
    return DLRM(tables, 16, 8, 4), (torch.randn(batch, 4), torch.randint(0, 16, (batch, tables)), *clicks)


class Translator(nn.Module):
    """nn.Transformer with its own embeddings and masks, as in the tutorial."""

    def __init__(self, width: int, longest: int) -> None:
        super().__init__()
        self.src_tok_emb, self.tgt_tok_emb = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        angles = torch.arange(longest).unsqueeze(1) * torch.exp(-torch.arange(0, width, 2) * math.log(1e4) / width)
        self.register_buffer("pos", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
        self.transformer = nn.Transformer(width, 4, 2, 2, 48, batch_first=True)
        self.generator = nn.Linear(width, VOCABULARY)

    def forward(self, src: Tensor, tgt: Tensor, labels: Tensor | None = None) -> Tensor:
        mask = torch.triu(torch.full((tgt.shape[1], tgt.shape[1]), float("-inf")), diagonal=1)
        x, y = self.src_tok_emb(src) + self.pos[: src.shape[1]], self.tgt_tok_emb(tgt) + self.pos[: tgt.shape[1]]
        logits = self.generator(self.transformer(x, y, tgt_mask=mask, tgt_is_causal=True))
        return logits if labels is None else F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def translator(batch: int = 4, source: int = 6, target: int = 8, loss: bool = True) -> Built:
    labels = (tokens(batch, target),) if loss else ()
    return Translator(32, 16), (tokens(batch, source), tokens(batch, target), *labels)


# --- what holds modules, and how they are called ----------------------------------------------------------------------


class Stages(nn.Module):
    """A list of lists, each stage with an exit; the state of all exits is summed."""

    def __init__(self, width: int, stages: int, depth: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.ModuleList([Residual(width) for _ in range(depth)]) for _ in range(stages)])
        self.exits = nn.ModuleList([nn.Linear(width, CLASSES) for _ in range(stages)])

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = []
        for stage, leave in zip(self.stages, self.exits, strict=True):
            for block in stage:
                x = block(x)
            logits.append(leave(x))
        if labels is None:
            return torch.stack(logits).mean(0)
        return sum(F.cross_entropy(y, labels) for y in logits) / len(logits)


def nested_lists(batch: int = 8, loss: bool = True) -> Built:
    labels = (torch.randint(0, CLASSES, (batch,)),) if loss else ()
    return Stages(12, 2, 3), (torch.randn(batch, 12), *labels)


class Heads(nn.Module):
    """Named branches, some of them no Python names, and one that is shared."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, width), nn.Tanh())
        self.branches = nn.ModuleDict({"in": Residual(width), "3x3": Residual(width), "class": Residual(width)})
        self.pair = nn.ModuleDict({"left": nn.Linear(width, 5), "right": nn.Linear(width, 5)})

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        x = self.trunk(x)
        y = sum(branch(x) for branch in self.branches.values())
        y = self.pair["left"](y) * self.pair["right"](self.branches["in"](y))
        return y if target is None else F.mse_loss(y, target)


def module_dict(batch: int = 8, loss: bool = True) -> Built:
    target = (torch.randn(batch, 5),) if loss else ()
    return Heads(12), (torch.randn(batch, 8), *target)


class Siamese(nn.Module):
    """One encoder called on two inputs, one block called in a loop, and a decoder tied to the encoder."""

    def __init__(self, width: int, turns: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.Sequential(Residual(width), Residual(width))
        self.again, self.turns = Residual(width), turns
        self.decode = nn.Linear(width, VOCABULARY, bias=False)
        self.decode.weight = self.embed.weight

    def encode(self, ids: Tensor) -> Tensor:
        x = self.encoder(self.embed(ids))
        for _ in range(self.turns):
            x = self.again(x)
        return x

    def forward(self, first: Tensor, second: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.decode(self.encode(first) * self.encode(second))
        return logits if labels is None else F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def shared_twice(batch: int = 4, sequence: int = 6, loss: bool = True) -> Built:
    return Siamese(16, 3), tuple(tokens(batch, sequence) for _ in range(2 + loss))


class Carried(nn.Module):
    """Blocks that hand on two values, take a mask and their number, and give side outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.gate, self.state = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, state: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate = torch.sigmoid(self.gate(x)) * keep
        state = torch.tanh(self.state(state)) + gate
        return x + self.mix(x * gate) + state, state, gate.mean()


class TwoValues(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([Carried(width) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, ...] | Tensor:
        x = self.embed(ids)
        keep, state = (ids != 0).unsqueeze(-1), torch.zeros_like(x)
        penalties = []
        for layer in self.layers:
            x, state, penalty = layer(x, state, keep)
            penalties.append(penalty)
        logits = self.head(x)
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1)) + 0.01 * torch.stack(penalties).sum()
        return loss, logits, state


def two_values(batch: int = 4, sequence: int = 6, layers: int = 3, loss: bool = True) -> Built:
    return TwoValues(16, layers), tuple(tokens(batch, sequence) for _ in range(1 + loss))


class Universal(nn.Module):
    """ALBERT-like: groups of layers repeated, with an int counter, a mask and a per-step embedding."""

    def __init__(self, width: int, turns: int) -> None:
        super().__init__()
        self.embed, self.steps = nn.Embedding(VOCABULARY, width), nn.Embedding(turns, width)
        self.group, self.turns = nn.ModuleList([Residual(width), Residual(width)]), turns
        self.register_buffer("scale", torch.linspace(0.5, 1.0, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids) * self.scale
        for step in range(self.turns):
            x = x + self.steps.weight[step]
            for layer in self.group:
                x = layer(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return logits if labels is None else F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def universal(batch: int = 4, sequence: int = 6, turns: int = 3, loss: bool = True) -> Built:
    return Universal(16, turns), tuple(tokens(batch, sequence) for _ in range(1 + loss))


class Blocks(nn.Module):
    """The shortest language model that has a loop."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList([Residual(16) for _ in range(layers)])
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if labels is None else F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def blocks(batch: int = 4, sequence: int = 6, layers: int = 2, loss: bool = True) -> Built:
    return Blocks(layers), tuple(tokens(batch, sequence) for _ in range(1 + loss))
