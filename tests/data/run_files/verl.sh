python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml actor_rollout_ref.model.path=Qwen/Qwen3-8B \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 data.train_batch_size=64 trainer.nnodes=1 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
  data.max_prompt_length=1024 data.max_response_length=1024 trainer.n_gpus_per_node=8
