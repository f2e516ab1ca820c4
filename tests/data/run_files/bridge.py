from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import ConfigContainer, TokenizerConfig, TrainingConfig


def config() -> ConfigContainer:
    return ConfigContainer(
        model=GPTModelProvider(
            num_layers=8,
            hidden_size=512,
            num_attention_heads=8,
            ffn_hidden_size=2048,
            seq_length=1024,
            tensor_model_parallel_size=2,
            position_embedding_type="rope",
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        train=TrainingConfig(micro_batch_size=1, global_batch_size=32),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=32000),
        mixed_precision="bf16_mixed",
    )
