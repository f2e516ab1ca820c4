"""Flags of slime and miles that change no training step: what is not here, and is none of Megatron-LM, is refused.

Sources: slime/utils/arguments.py and miles/utils/arguments.py with their backends', until June 2026.
"""

from __future__ import annotations

_PREFIXES = (
    *("--sglang-", "--rollout-", "--eval-", "--wandb-", "--ci-", "--save-", "--load-debug-", "--update-weight"),
    *("--tb-", "--router-", "--prefill-", "--ref-", "--log-", "--profile-", "--memory-", "--mlflow-", "--tensorboard-"),
    *("--buffer-", "--dump", "--session-", "--miles-router-", "--slime-router-", "--prometheus-", "--opd-", "--tis-"),
    *("--debug-train-", "--check-", "--critic-lr", "--mini-ft-", "--p2p-transfer-", "--mooncake-"),
)
"""Beginnings of flags of generation, logs, checkpoints, and of what is taught."""
_FLAGS = """
advantage-estimator apply-chat-template apply-chat-template-kwargs async-data-buffer-capacity-factor
async-max-concurrent-samples async-unused-samples-handler balance-by-flops balance-data chat-template-path colocate
control-server-port custom-advantage-function-path custom-async-data-buffer-path
custom-convert-samples-to-train-data-path custom-eval-rollout-log-function-path custom-generate-function-path
custom-loss-function-path custom-pg-loss-reducer-function-path custom-reward-post-process-path custom-rm-path
custom-rollout-log-function-path custom-tis-function-path custom-update-weight-post-write-path
data-pad-size-multiplier data-source-path delay-split-train-data-by-dp disable-compute-advantages-and-returns
disable-grpo-std-normalization disable-rewards-normalization disable-rollout-global-dataset
disable-rollout-trim-samples disable-wandb-random-suffix disable-weights-backuper dynamic-sampling-filter-path
enable-event-analyzer enable-witness entropy-coef env-report eps-clip eps-clip-c eps-clip-high
fetch-trajectory-retry-times ft-components fully-async gamma get-mismatch-metrics group-rm hf-checkpoint http-proxy
input-key keep-old-actor kl-coef kl-loss-coef kl-loss-type label-key lambd load-forge-rollout-data loss-mask-type
loss-type low-memory-resume mask-offpolicy-in-partial-rollout max-weight-staleness megatron-to-hf-mode metadata-key
mfu-peak-tflops min-batch-collection-ratio model-name multimodal-keys n-samples-per-eval-prompt normalize-advantages
num-epoch num-gpus-per-node num-rollout object-store-backend observe-training-entropy offload offload-rollout
offload-rollout-level offload-train offload-train-disk-chunk-mb offload-train-disk-dir offload-train-target
no-offload-train no-offload-rollout opsm-delta over-sampling-batch-size partial-rollout pause-generation-mode
pin-rollout-manager-to-head prompt-data recompute-logprobs-via-prefill release-train reset-optimizer-states reward-key
rm-type rm-url skip-actor-forward-only skip-eval-before-train start-rollout-id tito-allowed-append-roles tito-model
tool-key train-env-vars train-memory-margin-bytes use-distributed-post use-dynamic-batch-size use-fault-tolerance
use-kl-loss use-miles-router use-mlflow use-opd use-opsm use-prometheus use-rollout-entropy use-rollout-logprobs
use-rollout-routing-replay use-routing-replay use-session-server use-slime-router use-tensorboard use-tis
use-unbiased-kl use-wandb value-clip witness-buffer-size
"""
_HARMLESS = frozenset(f"--{name}" for name in _FLAGS.split())
_USUAL = {"--train-backend": "megatron", "--qkv-format": "thd"}
"""Flags with the value that is read: other values are another framework, and batches that are not packed."""


VALUED = frozenset(
    f"--{name}"
    for name in (
        *(
            "wandb-key",
            "wandb-project",
            "wandb-group",
            "wandb-team",
            "wandb-host",
            "hf-checkpoint",
            "ref-load",
            "rm-url",
        ),
        *("prompt-data", "eval-prompt-data", "save-interval", "num-rollout", "rollout-function-path", "custom-rm-path"),
    )
)
"""Flags that take one value, which may be that of a variable that is not known."""


def changes_no_step(name: str, value: str) -> bool:
    """Return whether a flag of slime with this value changes no training step that Megatron-LM makes."""
    return name in _HARMLESS or name.startswith(_PREFIXES) or _USUAL.get(name) == value
