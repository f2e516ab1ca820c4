"""Price one layout of Llama 3 8B from first principles, step by step, without the cost model of the planner.

The layout: 8 H100 in one node as tp 2, pp 2, dp 2, with sequence parallelism and the distributed optimizer, in bf16.
`python -m megaloom.examples.scripts.price_by_hand` prints the seconds of one optimizer step and the bytes of each
pipeline rank. The planner predicts equal numbers. Read this file before you read `planner/cost`.
"""

from __future__ import annotations

from megaloom.planner.hardware.cluster_names import cluster

# The model: Llama 3 8B. All numbers of elements below are those of one device.
LAYERS, HIDDEN, HEADS, KV_HEADS, CHANNELS, FF, VOCAB = 32, 4096, 32, 8, 128, 14336, 128256
# The workload: 64 sequences of 8,192 tokens a step, one sequence a micro-batch.
SEQ, BATCH = 8192, 64
# The layout. Each data-parallel copy runs BATCH / DP micro-batches.
TP, PP, DP = 2, 2, 2
MICROBATCHES = BATCH // DP
BF16, FP32 = 2, 4  # bytes of an element

MACHINE = cluster("8xH100")
GPU = MACHINE.slowest  # power limits the clock of each device a little differently; all wait for the slowest one
LINK = MACHINE.intra  # all 8 devices share one node, so all traffic is on NVLink

# How the runtime runs a layer, as measured on an H200. A memory-bound kernel of the kind moves its tensors this many
# times, forward and backward; "gradient" adds a micro-batch's weight gradient to the main gradient, backward, where no
# product does that.
PASSES = {
    "lookup": (1.0, 1.0),
    "normalize": (1.7, 2.6),
    "rope": (1.3, 1.4),
    "gate": (1.0, 2.0),
    "add": (1.5, 1.5),
    "gradient": (1.0, 1.7),
}
LAUNCH = 3.5 * GPU.launch_seconds  # seconds of the host for each kernel
BETWEEN = 600 * GPU.launch_seconds  # seconds of the host between two steps
ALLOCATED = 1 / 0.94  # torch's allocator reserves this factor more than it hands out


def product(m: int, k: int, n: int) -> tuple[float, float, int, int]:
    """Return seconds and kernels, forward and backward, of y[m, n] = x[m, k] w[k, n].

    A roofline: the longer of arithmetic and memory traffic. Forward has one product; backward has two, dx = dy w^T and
    dw = x^T dy. Each has 2 m k n FLOPs and moves the three matrices.
    """
    traffic = BF16 * (m * k + k * n + m * n) / GPU.moves
    peak = GPU.flops["bf16"] * GPU.sustained * GPU.flops_efficiency
    each = [max(2 * m * k * n / (peak * filled(*shape)), traffic) for shape in ((m, n, k), (m, k, n), (k, n, m))]
    return each[0], each[1] + each[2], 1, 2


def filled(rows: int, columns: int, depth: int) -> float:
    """Return the share of the peak that a product reaches: its output tiles fill the multiprocessors in rounds."""
    best = 0.0
    for tall, wide, speed in ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.8)):
        tiles = -(-rows // tall) * -(-columns // wide)
        rounds = -(-tiles // GPU.units)
        best = max(best, speed * rows * columns / (rounds * GPU.units * tall * wide))
    return best * depth / (depth + 128)  # starting a tile costs as much as a depth of 128


def attention() -> tuple[float, float, int, int]:
    """Return seconds and kernels of causal flash attention: half of two products; backward, 2.5 times as much."""
    heads, kv = HEADS // TP, KV_HEADS // TP
    flops = 4 * heads * SEQ * SEQ * CHANNELS / 2
    reached = GPU.flops["bf16"] * GPU.sustained * GPU.attend_efficiency * SEQ / (SEQ + 330)
    traffic = BF16 * SEQ * CHANNELS * 2 * (heads + kv) / GPU.moves
    return max(flops / reached, traffic), max(2.5 * flops / reached, 1.5 * traffic), 1, 1


def memory_bound(kind: str, elements: int) -> tuple[float, float, float, float]:
    """Return seconds and kernels of a kernel that only moves memory. Backward moves half as much again."""
    forward, backward = PASSES[kind]
    traffic = BF16 * elements / GPU.moves
    return forward * traffic, backward * 1.5 * traffic, forward, backward


def ring(kind: str, nbytes: float, devices: int) -> float:
    """Return the seconds of a ring collective: every device passes on (n - 1) / n of the bytes, in n - 1 steps."""
    passes = 2 if kind == "all_reduce" else 1
    steps = passes * (devices - 1)
    wire = passes * nbytes * (devices - 1) / devices
    return LINK.latency + (steps - 1) * LINK.hop + wire / LINK.reached


class Node:
    """One layer on one device, for one micro-batch: seconds, bytes of saved activations, weight elements."""

    def __init__(self, kernels: list[tuple[float, float, float, float]], gathers: int, saved: int, params: int):
        """Add up a layer. gathers: its exchanges with the tensor-parallel rank, forward; see `exchange` below.

        Products read and write the main gradients of their weights; a kernel adds the gradients of other weights.
        """
        forward, backward, launched, launched_back = (sum(column) for column in zip(*kernels, strict=True))
        by_products = any(launches_back == 2 for *_, launches_back in kernels)  # of input and weight
        added = (2 * FP32 if by_products else PASSES["gradient"][1] * (BF16 + 2 * FP32)) * params / GPU.moves
        exchange = ring("all_gather", BF16 * SEQ * HIDDEN, TP)  # a reduce-scatter takes equally long
        back = {0: 0, 1: 1, 2: 3}[gathers]  # backward mirrors each exchange, and gathers the saved input once more
        self.forward: float = forward + gathers * exchange
        self.backward: float = backward + added + back * exchange
        self.saved, self.params, self.launches = saved, params, launched + launched_back


def layers() -> list[list[Node]]:
    """Return the segments of the model: nodes between two places where a pipeline stage may begin."""
    hidden = SEQ * HIDDEN // TP  # a hidden state, sharded over the sequence outside of products
    kv, ff, vocab = KV_HEADS * CHANNELS // TP, FF // TP, VOCAB // TP
    width = HIDDEN // TP
    # RMSNorm saves its input. The next layer saves the norm's output.
    norm = Node([memory_bound("normalize", 2 * hidden + HIDDEN)], 0, BF16 * hidden, HIDDEN)
    add = Node([memory_bound("add", 3 * hidden)], 0, 0, 0)
    # Attention saves its input, q and k after RoPE, v, the output and the log-sum-exp. Its q, k and v are parts of one
    # tensor, so q and k before RoPE stay with v.
    saved = BF16 * (3 * hidden + 2 * SEQ * kv) + FP32 * SEQ * HEADS // TP + BF16 * (hidden + SEQ * kv)
    qkv = [product(SEQ, HIDDEN, n) for n in (width, kv, kv)]
    ropes = [memory_bound("rope", 2 * SEQ * n) for n in (width, kv)]
    attend = Node(
        [*qkv, *ropes, attention(), product(SEQ, width, HIDDEN)], 2, saved, HIDDEN * (width + 2 * kv) + width * HIDDEN
    )
    # SwiGLU saves its input, gate, up and their product.
    gate = memory_bound("gate", 3 * SEQ * ff)
    mlp = Node(
        [product(SEQ, HIDDEN, ff), product(SEQ, HIDDEN, ff), gate, product(SEQ, ff, HIDDEN)],
        2,
        BF16 * (hidden + 3 * SEQ * ff),
        3 * HIDDEN * ff,
    )
    # The embedding saves the token ids, 8 bytes each. It reduce-scatters its output, and gathers the gradient.
    embed = Node([memory_bound("lookup", 2 * SEQ * HIDDEN)], 1, 8 * SEQ, vocab * HIDDEN)
    # The last product gathers its input, and has the loss: it moves 10 bytes of each logit, and all-reduces three
    # fp32 numbers a token. Its gather is mirrored by a reduce-scatter, after a second gather of the input.
    head = Node([product(SEQ, HIDDEN, vocab)], 1, BF16 * hidden, vocab * HIDDEN)
    loss = 10 * SEQ * vocab / 2 / GPU.moves
    head.forward += loss + 3 * ring("all_reduce", FP32 * SEQ, TP)
    head.backward += loss + ring("all_gather", BF16 * SEQ * HIDDEN, TP)
    return [[embed], *[[norm, attend, add], [norm, mlp, add]] * LAYERS, [norm, head]]


def split(segments: list[list[Node]]) -> list[list[Node]]:
    """Return the two stages whose slower one is fastest; between whole layers if that is at most 0.1 % slower."""

    def slowest(cut: int) -> float:
        first, second = (
            sum(n.forward + n.backward for s in half for n in s) for half in (segments[:cut], segments[cut:])
        )
        return max(first, second)

    best = min(range(1, len(segments)), key=slowest)
    whole = min(range(1, len(segments), 2), key=slowest)
    cut = whole if slowest(whole) <= 1.001 * slowest(best) else best
    return [[n for segment in half for n in segment] for half in (segments[:cut], segments[cut:])]


def one_forward_one_backward(forward: list[float], backward: list[float], send: float) -> list[float]:
    """Return when each rank ends its last backward pass under 1F1B. A rank sends before it goes on."""
    orders = []
    for rank in range(PP):
        warmup = min(PP - rank - 1, MICROBATCHES)
        order = [("F", i) for i in range(warmup)]
        for i in range(MICROBATCHES - warmup):
            order += [("F", warmup + i), ("B", i)]
        orders.append(order + [("B", i) for i in range(MICROBATCHES - warmup, MICROBATCHES)])
    arrived = {("F", 0, i): 0.0 for i in range(MICROBATCHES)}  # when a rank has the input of a pass
    free, done = [0.0] * PP, [0] * PP
    while any(done[r] < len(orders[r]) for r in range(PP)):
        for r in range(PP):
            while done[r] < len(orders[r]) and (orders[r][done[r]][0], r, orders[r][done[r]][1]) in arrived:
                direction, i = orders[r][done[r]]
                end = max(free[r], arrived[direction, r, i]) + (forward if direction == "F" else backward)[r]
                if direction == "F" and r == PP - 1:
                    arrived["B", r, i] = end
                elif (direction, r) != ("B", 0):
                    end += send
                    arrived[direction, r + (1 if direction == "F" else -1), i] = end
                free[r], done[r] = end, done[r] + 1
    return free


def exposed(nbytes: int, params: int, window: float) -> float:
    """Return the exposed seconds of a collective over the data-parallel ranks that computation overlaps.

    At least the last bucket, of 40 million elements, is exposed. What is hidden takes 16 multiprocessors meanwhile.
    """
    took = ring("reduce_scatter", nbytes * params, DP)
    seen = max(ring("reduce_scatter", nbytes * min(params, 40_000_000), DP), took - window)
    return seen + (took - seen) * 16 / GPU.units


def price() -> tuple[float, list[int]]:
    """Return the seconds of one optimizer step, and the peak bytes of each pipeline rank."""
    stages = split(layers())
    forward, backward = ([sum(getattr(n, name) for n in stage) for stage in stages] for name in ("forward", "backward"))
    params, saved = ([sum(getattr(n, name) for n in stage) for stage in stages] for name in ("params", "saved"))
    # The host launches kernels ahead of the device. If it took longer than they do, they would take its time.
    assert LAUNCH * sum(n.launches for stage in stages for n in stage) < sum(forward) + sum(backward)
    boundary = BF16 * SEQ * HIDDEN // TP  # bytes of the hidden state between the stages
    ends = one_forward_one_backward(forward, backward, LINK.latency + boundary / LINK.reached)

    # End of step: reduce-scatter fp32 gradients during the last backward pass, update the shards, all-gather bf16
    # weights during the next forward pass. Fused AdamW moves 40 bytes an element of a shard, and 6 more to make the
    # bf16 weight; fp32 gradients are set to zero. All ranks wait for the norm of all gradients, and for the host
    # between steps.
    reduced = max(end + exposed(FP32, n, b) for end, n, b in zip(ends, params, backward, strict=True))
    norm = ring("all_reduce", FP32, TP * PP * DP)
    update = [
        ((40 + 6) * n / DP + FP32 * n) / GPU.moves + norm + BETWEEN + exposed(BF16, n, f)
        for n, f in zip(params, forward, strict=True)
    ]
    seconds = reduced + max(update)

    # Memory: bf16 weights, fp32 gradients, and 12 bytes of optimizer state an element, which DP ranks share. Then the
    # CUDA context and the buffers of three communicators (tp, pp, dp), which no tensor holds.
    peaks = []
    for rank, n in enumerate(params):
        state = BF16 * n + FP32 * n + -(-12 * n // DP) + GPU.context_nbytes + 3 * LINK.group_nbytes
        # A rank has PP - rank micro-batches in flight; a later stage also saves the hidden state that it receives.
        in_flight = (PP - rank) * (saved[rank] + (boundary if rank else 0))
        # Transient at a backward pass: two gradients as large as the largest saved tensor. At the loss: the logits
        # and a copy, or their gradients and the weight's.
        logits, largest = SEQ * VOCAB // TP, SEQ * FF // TP
        loss = max((BF16 + 2) * logits, BF16 * (logits + VOCAB // TP * HIDDEN)) if rank == PP - 1 else 0
        # For the whole step: two cuBLAS workspaces, and three buffers of a hidden state for p2p sends.
        fixed = 2 * GPU.library_nbytes + 3 * boundary
        transient = max(in_flight + 2 * BF16 * largest, in_flight + loss) + fixed
        peaks.append(int(state + ALLOCATED * transient))
    return seconds, peaks


def main() -> None:
    """Print the price."""
    seconds, peaks = price()
    print(f"Llama 3 8B on 8 H100, tp {TP}, pp {PP}, dp {DP}: {seconds:.3f} s a step")
    for rank, nbytes in enumerate(peaks):
        print(f"pipeline rank {rank}: {nbytes / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
