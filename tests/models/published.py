"""Models as their authors published them, without a library: `NAME(batch, ..., loss)`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.common import CLASSES, VOCABULARY, Built, tokens

# --- nanoGPT: github.com/karpathy/nanoGPT, model.py -----------------------------------------------------------------


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, context: int, dropout: float, flash: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout, self.flash = heads, width, dropout, flash
        if not flash:
            self.register_buffer("bias", torch.tril(torch.ones(context, context)).view(1, 1, context, context))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            dropout = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = self.attn_dropout(F.softmax(att, dim=-1))
            y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        output: Tensor = self.resid_dropout(self.c_proj(y))
        return output


class Block(nn.Module):
    def __init__(self, width: int, heads: int, context: int, dropout: float, flash: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, context, dropout, flash)
        layers = {"c_fc": nn.Linear(width, 4 * width), "gelu": nn.GELU(), "c_proj": nn.Linear(4 * width, width)}
        self.mlp = nn.Sequential(*layers.values(), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, context: int, dropout: float, flash: bool) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(VOCABULARY, width), "wpe": nn.Embedding(context, width)}
        blocks = nn.ModuleList([Block(width, heads, context, dropout, flash) for _ in range(layers)])
        parts |= {"drop": nn.Dropout(dropout), "h": blocks, "ln_f": nn.LayerNorm(width)}
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                torch.nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * layers))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :])
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def _nanogpt(batch: int, sequence: int, layers: int, loss: bool, flash: bool) -> Built:
    model = NanoGPT(32, 4, layers, 64, 0.1, flash)
    return model, tuple(tokens(batch, sequence) for _ in range(1 + loss))


def nanogpt_slow(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Without flash attention: a causal mask as a buffer."""
    return _nanogpt(batch, sequence, layers, loss, flash=False)


# --- Llama as Meta published it: rotary positions are complex numbers, a plain attribute of the model ---------------


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> Tensor:
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    freqs = torch.outer(torch.arange(end), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(1, xq_.shape[1], 1, xq_.shape[-1])
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        normalized = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return normalized.type_as(x) * self.weight


class LlamaBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normal = self.attention_norm(x)
        split = (batch, length, self.heads, self.head_dim)
        xq, xk = apply_rotary_emb(self.wq(normal).view(split), self.wk(normal).view(split), freqs_cis)
        queries, keys = xq.transpose(1, 2), xk.transpose(1, 2)
        values = self.wv(normal).view(split).transpose(1, 2)
        scores = torch.matmul(queries, keys.transpose(2, 3)) / math.sqrt(self.head_dim) + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(queries)
        x = x + self.wo(torch.matmul(scores, values).transpose(1, 2).contiguous().view(batch, length, -1))
        normal = self.ffn_norm(x)
        output: Tensor = x + self.w2(F.silu(self.w1(normal)) * self.w3(normal))
        return output


class MetaLlama(nn.Module):
    def __init__(self, dim: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(LlamaBlock(dim, heads, 2 * dim) for _ in range(layers))
        self.norm, self.output = RMSNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)
        self.freqs_cis = precompute_freqs_cis(dim // heads, context * 2)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        length = ids.shape[1]
        h = self.tok_embeddings(ids)
        mask = torch.triu(torch.full((length, length), float("-inf"), device=ids.device), diagonal=1).type_as(h)
        freqs_cis = self.freqs_cis.to(h.device)[:length]
        for layer in self.layers:
            h = layer(h, freqs_cis, mask)
        logits: Tensor = self.output(self.norm(h)).float()
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def meta_llama(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    return MetaLlama(32, 4, layers, 16), tuple(tokens(batch, sequence) for _ in range(1 + loss))


# --- DLRM: Naumov et al. 2019, arXiv:1906.00091 ---------------------------------------------------------------------


class DLRM(nn.Module):
    """Embedding bags and an MLP; dot products of all pairs; an MLP on top."""

    def __init__(self, tables: int = 4, rows: int = 40, width: int = 8, dense: int = 12) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bot_l = nn.Sequential(nn.Linear(dense, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top_l = nn.Sequential(nn.Linear(pairs + width, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
        row, column = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("row", row)
        self.register_buffer("column", column)

    def forward(self, dense: Tensor, sparse: Tensor, clicks: Tensor | None = None) -> Tensor:
        bottom = self.bot_l(dense)
        bags = [table(sparse[:, i]) for i, table in enumerate(self.emb_l)]
        joined = torch.stack([bottom, *bags], dim=1)
        products = torch.bmm(joined, joined.transpose(1, 2))[:, self.row, self.column]
        scores: Tensor = self.top_l(torch.cat([bottom, products], dim=1)).squeeze(1)
        return scores if clicks is None else F.binary_cross_entropy(scores, clicks)


def dlrm_bags(batch: int = 8, loss: bool = True) -> Built:
    clicks = (torch.rand(batch),) if loss else ()
    return DLRM(), (torch.randn(batch, 12), torch.randint(0, 40, (batch, 4, 3)), *clicks)


# --- graphs: features of nodes, edges as two rows of indices --------------------------------------------------------


class GCN(nn.Module):
    """Kipf and Welling 2017, arXiv:1609.02907, with a dense normalised adjacency."""

    def __init__(self, inputs: int = 12, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, width, bias=False), nn.Linear(width, CLASSES, bias=False)

    def forward(self, x: Tensor, adjacency: Tensor, labels: Tensor | None = None) -> Tensor:
        degree = adjacency.sum(dim=1).clamp(min=1).rsqrt()
        normal = degree[:, None] * adjacency * degree[None, :]
        h = F.dropout(F.relu(normal @ self.first(x)), 0.1, self.training)
        logits: Tensor = normal @ self.second(h)
        return logits if labels is None else F.cross_entropy(logits, labels)


def gcn_dense(nodes: int = 24, loss: bool = True) -> Built:
    adjacency = (torch.rand(nodes, nodes) < 0.2).float()
    labels = (torch.randint(0, CLASSES, (nodes,)),) if loss else ()
    return GCN(), (torch.randn(nodes, 12), adjacency, *labels)


class GraphSAGE(nn.Module):
    """Hamilton et al. 2017, arXiv:1706.02216: the mean of the neighbours by index_add."""

    def __init__(self, inputs: int = 12, width: int = 16) -> None:
        super().__init__()
        sizes = [(inputs, width), (width, CLASSES)]
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in sizes)
        self.other = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in sizes)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor | None = None) -> Tensor:
        source, target = edges[0], edges[1]
        count = torch.zeros(x.shape[0], 1).index_add(0, target, torch.ones(target.shape[0], 1)).clamp(min=1)
        for number, (self_layer, other) in enumerate(zip(self.own, self.other, strict=True)):
            summed = torch.zeros(x.shape[0], x.shape[1]).index_add(0, target, x[source])
            x = self_layer(x) + other(summed / count)
            x = F.relu(x) if number == 0 else x
        return x if labels is None else F.cross_entropy(x, labels)


def graphsage(nodes: int = 24, edges: int = 80, loss: bool = True) -> Built:
    labels = (torch.randint(0, CLASSES, (nodes,)),) if loss else ()
    return GraphSAGE(), (torch.randn(nodes, 12), torch.randint(0, nodes, (2, edges)), *labels)


class GAT(nn.Module):
    """Velickovic et al. 2018, arXiv:1710.10903, over a dense mask of edges."""

    def __init__(self, inputs: int = 12, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(inputs, heads * width, bias=False), nn.Linear(heads * width, CLASSES)
        self.source, self.target = (nn.Parameter(torch.randn(heads, width) * 0.1) for _ in range(2))
        self.heads = heads

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor | None = None) -> Tensor:
        h = self.project(x).unflatten(-1, (self.heads, -1))
        scores = (h * self.source).sum(-1)[:, None, :] + (h * self.target).sum(-1)[None, :, :]
        scores = F.leaky_relu(scores, 0.2).masked_fill(~edges[:, :, None], -1e9)
        mixed = torch.einsum("ijh,jhd->ihd", scores.softmax(dim=1), h).flatten(1)
        logits: Tensor = self.head(F.elu(mixed))
        return logits if labels is None else F.cross_entropy(logits, labels)


def gat(nodes: int = 24, loss: bool = True) -> Built:
    edges = torch.rand(nodes, nodes) < 0.3
    labels = (torch.randint(0, CLASSES, (nodes,)),) if loss else ()
    return GAT(), (torch.randn(nodes, 12), edges, *labels)


# --- others ---------------------------------------------------------------------------------------------------------


class Seq2Seq(nn.Module):
    """Bahdanau et al. 2015, arXiv:1409.0473: a GRU reads, another writes and attends to what was read."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.query, self.key, self.score = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.head = nn.Linear(2 * width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        memory, last = self.encoder(self.source(source))
        states, _ = self.decoder(self.target(target), last)
        energy = torch.tanh(self.query(states)[:, :, None] + self.key(memory)[:, None])
        weights = self.score(energy).squeeze(-1).softmax(dim=-1)
        logits: Tensor = self.head(torch.cat([states, weights @ memory], dim=-1))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def seq2seq_gru(batch: int = 4, sequence: int = 6, loss: bool = True) -> Built:
    return Seq2Seq(), tuple(tokens(batch, sequence) for _ in range(2 + loss))


class LSTMTranslator(nn.Module):
    """Sutskever et al. 2014, arXiv:1409.3215: the last state of one LSTM begins another."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.encoder = nn.LSTM(width, width, 2, batch_first=True, dropout=0.1)
        self.decoder = nn.LSTM(width, width, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        _, state = self.encoder(self.source(source))
        states, _ = self.decoder(self.target(target), state)
        logits: Tensor = self.head(states)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def seq2seq_lstm(batch: int = 4, sequence: int = 6, loss: bool = True) -> Built:
    return LSTMTranslator(), tuple(tokens(batch, sequence) for _ in range(2 + loss))


class VAE(nn.Module):
    """Kingma and Welling 2014, arXiv:1312.6114."""

    def __init__(self, inputs: int = 64, width: int = 32, latent: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, width), nn.ReLU())
        self.mean, self.logvar = nn.Linear(width, latent), nn.Linear(width, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, inputs), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        mean, logvar = self.mean(h), self.logvar(h)
        latent = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
        decoded = self.decoder(latent)
        error = F.binary_cross_entropy(decoded, x, reduction="sum")
        return error - 0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())


def vae_normal(batch: int = 8, loss: bool = True) -> Built:
    return VAE(), (torch.rand(batch, 64),)


class WaveNet(nn.Module):
    """van den Oord et al. 2016, arXiv:1609.03499: dilated convolutions with gates, weight norm."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.dilated = nn.ModuleList(norm(nn.Conv1d(width, 2 * width, 2, dilation=2**i)) for i in range(layers))
        self.out = nn.ModuleList(norm(nn.Conv1d(width, width, 1)) for _ in range(layers))
        self.head = nn.Conv1d(width, VOCABULARY, 1)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(ids).transpose(1, 2)
        total = torch.zeros_like(x)
        for number, (dilated, out) in enumerate(zip(self.dilated, self.out, strict=True)):
            value, gate = dilated(F.pad(x, (2**number, 0))).chunk(2, dim=1)
            step = out(torch.tanh(value) * torch.sigmoid(gate))
            x, total = x + step, total + step
        logits: Tensor = self.head(F.relu(total))
        return logits if labels is None else F.cross_entropy(logits, labels)


def wavenet(batch: int = 4, samples: int = 16, loss: bool = True) -> Built:
    return WaveNet(), tuple(tokens(batch, samples) for _ in range(1 + loss))


class AnnotatedTransformer(nn.Module):
    """Vaswani et al. 2017, arXiv:1706.03762: nn.Transformer, and positions as a sinusoidal buffer."""

    def __init__(self, width: int = 32, layers: int = 2, context: int = 32) -> None:
        super().__init__()
        position = torch.arange(context).unsqueeze(1)
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        pe = torch.zeros(1, context, width)
        pe[0, :, 0::2], pe[0, :, 1::2] = torch.sin(position * rate), torch.cos(position * rate)
        self.register_buffer("pe", pe)
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.transformer = nn.Transformer(width, 4, layers, layers, 48, batch_first=True)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x, y = (self.embedding(ids) + self.pe[:, : ids.shape[1]] for ids in (source, target))
        logits: Tensor = self.head(self.transformer(x, y, tgt_mask=mask, tgt_is_causal=True))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def transformer(batch: int = 4, sequence: int = 8, loss: bool = True) -> Built:
    return AnnotatedTransformer(), tuple(tokens(batch, sequence) for _ in range(2 + loss))


class PointNet(nn.Module):
    """Qi et al. 2017, arXiv:1612.00593: an MLP for each point, the largest of all."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 16), (16, 32)]
        self.points = nn.Sequential(
            *(layer for a, b in sizes for layer in (nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()))
        )
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, points: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.points(points).amax(dim=2))
        return F.log_softmax(logits, dim=1) if labels is None else F.nll_loss(F.log_softmax(logits, dim=1), labels)


def pointnet(batch: int = 8, points: int = 20, loss: bool = True) -> Built:
    labels = (torch.randint(0, CLASSES, (batch,)),) if loss else ()
    return PointNet(), (torch.randn(batch, 3, points), *labels)


class DeepFM(nn.Module):
    """Guo et al. 2017, arXiv:1703.04247: pairs by the square of a sum, and an MLP, over one embedding."""

    def __init__(self, fields: int = 5, rows: int = 20, width: int = 8) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.arange(fields) * rows)
        self.linear, self.factors = nn.Embedding(fields * rows, 1), nn.Embedding(fields * rows, width)
        self.deep = nn.Sequential(nn.Linear(fields * width, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, fields: Tensor, clicks: Tensor | None = None) -> Tensor:
        where = fields + self.offsets
        factors = self.factors(where)
        pairs = 0.5 * (factors.sum(1).pow(2) - factors.pow(2).sum(1)).sum(1, keepdim=True)
        logits = (self.linear(where).sum(1) + pairs + self.deep(factors.flatten(1))).squeeze(1)
        return logits if clicks is None else F.binary_cross_entropy_with_logits(logits, clicks)


def deepfm(batch: int = 8, loss: bool = True) -> Built:
    clicks = (torch.rand(batch),) if loss else ()
    return DeepFM(), (torch.randint(0, 20, (batch, 5)), *clicks)


class NeRF(nn.Module):
    """Mildenhall et al. 2020, arXiv:2003.08934: frequencies of a position, an MLP with a skip."""

    def __init__(self, width: int = 32, levels: int = 4) -> None:
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(levels), persistent=False)
        inputs = 3 + 6 * levels
        self.first, self.second = nn.Linear(inputs, width), nn.Linear(width + inputs, width)
        self.head = nn.Linear(width, 4)

    def forward(self, points: Tensor, colours: Tensor | None = None) -> Tensor:
        angles = (points[..., None] * self.bands).flatten(-2)
        x = torch.cat([points, angles.sin(), angles.cos()], dim=-1)
        h = F.relu(self.second(torch.cat([F.relu(self.first(x)), x], dim=-1)))
        raw: Tensor = self.head(h)
        density, colour = F.relu(raw[..., 3:]), torch.sigmoid(raw[..., :3])
        pixels = (colour * density.softmax(dim=1)).sum(dim=1)
        return pixels if colours is None else F.mse_loss(pixels, colours)


def nerf(batch: int = 8, samples: int = 6, loss: bool = True) -> Built:
    colours = (torch.rand(batch, 3),) if loss else ()
    return NeRF(), (torch.randn(batch, samples, 3), *colours)
