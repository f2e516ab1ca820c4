"""A dense decoder trained by plain PyTorch: FSDP2, compiled blocks, fused AdamW. An opponent of `against_others`.

Run under torchrun with a `Task` as its argument. Weights are fp32, products bf16. Blocks are compiled on GPUs only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.opponents.task import Task, measure, start

KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]  # of attention, the fastest first


class Attention(nn.Module):
    """Causal attention with grouped key and value heads and rotary positions: [batch, tokens, hidden]."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.size = task.head_size
        self.query = nn.Linear(task.hidden, task.heads * self.size, bias=False)
        self.key = nn.Linear(task.hidden, task.kv_heads * self.size, bias=False)
        self.value = nn.Linear(task.hidden, task.kv_heads * self.size, bias=False)
        self.out = nn.Linear(task.heads * self.size, task.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        grouped = q.shape[1] != k.shape[1]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        y: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    """Attention and SwiGLU, each after an RMS norm and beside a residual: [batch, tokens, hidden]."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(task.hidden), nn.RMSNorm(task.hidden)
        self.attention = Attention(task)
        self.gate, self.up = (nn.Linear(task.hidden, task.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(task.ffn, task.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        h = self.ffn_norm(x)
        y: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return y


class Decoder(nn.Module):
    """Embedding, blocks, norm and head: token ids [batch, tokens] -> logits [batch, tokens, vocabulary]."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.embedding = nn.Embedding(task.vocab, task.hidden)
        self.blocks = nn.ModuleList(Block(task) for _ in range(task.layers))
        self.norm = nn.RMSNorm(task.hidden)
        self.head = nn.Linear(task.hidden, task.vocab, bias=False)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [batch, heads, tokens, size] turned by their positions."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of logits [batch, tokens, vocabulary] over labels [batch, tokens]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def main() -> None:
    task, device = Task.given(), start()
    with torch.device(device):
        model = Decoder(task)
        angles = torch.outer(
            torch.arange(task.seq), 500_000.0 ** -(torch.arange(0, task.head_size, 2) / task.head_size)
        )
        ids = torch.randint(task.vocab, (task.micro_batch, task.seq + 1))
    parameters = sum(p.numel() for p in model.parameters())
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.02)
    loss = cross_entropy
    if device.type == "cuda":
        loss = torch.compile(cross_entropy)
        for block in model.blocks:
            block.compile()
    mesh = init_device_mesh(device.type, (task.world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    cos, sin, alone = angles.cos(), angles.sin(), task.world == 1

    def step() -> None:
        optimizer.zero_grad()
        for i in range(task.microbatches):
            last = i == task.microbatches - 1
            if alone:  # nothing to gather or reduce between micro-batches
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
                model.set_reshard_after_backward(last)
            (loss(model(ids[:, :-1], cos, sin), ids[:, 1:]) / task.microbatches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    with sdpa_kernel(KERNELS, set_priority=True):  # torch takes another order where Transformer Engine can be imported
        measure(step, device, parameters)


if __name__ == "__main__":
    main()
