"""Every key that a config of the field brings along loads and means what it says; what cannot be is refused."""

import pytest
from tiny_runs import workspace

from verl.core.errors import ConfigError
from verl.trainer.config import SHARDING, load_run
from verl.trainer.plan import Machine, minimum_problems, plan

CPU = Machine(gpus=0, gpu_name="", nccl=False, fsdp=True, cuda_graphs=False, vllm=False, flash_attention=False, ray=False)
SEEDS_KEYS = {
    "trainer": {"algorithm": "ppo", "rollout_batch_size": 128, "num_rollout_workers": 4, "use_vllm": True,
                "tensor_parallel_size": 2, "kv_cache_dtype": "fp8", "enable_chunked_prefill": True, "use_flash_attn": True,
                "ppo_epochs": 2, "clip_coef": 0.1, "vf_coef": 0.5, "kl_target": 0.02, "train_batch_size": 32,
                "gpu_memory_utilization": 0.8},
    "model": {"actor": {"model_name_or_path": "m", "use_fsdp": True, "fsdp_config": {"sharding_strategy": "FULL_SHARD"},
                        "device_map": "cuda:0-1"},
              "reward_model": {"model_name_or_path": "r", "device_map": "cuda:2"}, "critic": {"device_map": "cuda:3"}},
}


def test_every_key_of_the_field_means_its_one_setting():
    config = load_run(data=SEEDS_KEYS).config
    t = config.trainer
    assert (t.rollout.engine, t.rollout.workers, t.rollout.tensor_parallel_size, t.rollout.kv_cache_dtype) == ("vllm", 4, 2, "fp8")
    assert (t.algo.clip_low, t.algo.vf_coef, t.algo.kl_target, t.update_epochs, t.rollout.kv_memory) == (0.1, 0.5, 0.02, 2, 0.8)
    assert config.model.actor.use_flash_attn and config.model.actor.device_map == "cuda:0-1"
    assert config.trainer.updates_per_step == 8  # 128 samples / 32, twice


def test_what_this_machine_lacks_is_one_line_each_and_an_error_when_strict():
    lines = plan(load_run(data=SEEDS_KEYS).config, CPU)
    for setting in ("rollout.engine", "rollout.workers: 4", "tensor_parallel_size: 2", "kv_cache_dtype: fp8", "use_fsdp",
                    "use_flash_attn"):
        assert sum(setting in line for line in lines) == 1, (setting, lines)
    with pytest.raises(ConfigError, match="strict"):
        plan(load_run(data=SEEDS_KEYS, overrides=["trainer.strict=true"]).config, CPU)


@pytest.mark.parametrize("strategy", SHARDING)
def test_every_sharding_strategy_loads(strategy):
    config = load_run(overrides=[f"model.actor.fsdp_config.sharding_strategy={strategy}"]).config
    assert config.model.actor.fsdp_config.sharding_strategy == strategy


@pytest.mark.parametrize("overrides, words", [
    (["trainer.use_vllm=true", "trainer.rollout.engine=native"], "trainer.rollout.engine"),
    (["trainer.group_size=1"], "at least 2"),
    (["trainer.algorithm=rloo", "trainer.group_size=1"], "at least 2"),
    (["trainer.sampling.temperature=0"], "above 0"),
    (["trainer.algorithm=grppo"], "grpo"),
    (["trainer.rollout.kv_cache_dtype=int4"], "fp8"),
    (["model.actor.fsdp_config.sharding_strategy=FULL"], "FULL_SHARD"),
    (["trainer.optim.schedule=cosin"], "cosine"),
    (["trainer.num_rollout_worker=2"], "num_rollout_workers"),
    (["data.eval_size=5", "data.eval=x.jsonl"], "eval_size"),
    (["trainer.algo.gamma=0.9"], "gamma"),
    (["trainer.rewards=[{weight: 1.0}]"], "exactly one"),
    (["trainer.save.keep_last=0"], "at least 1"),
    (["trainer.save.every=-1"], "at least 0"),
    (["trainer.eval.every=-1"], "at least 0"),
    (["trainer.eval.samples=0"], "at least 1"),
    (["trainer.eval.top_p=0"], "top_p"),
    (["model.actor.megatron={tensr: 2}"], "allowed: tensor, pipeline"),
    (["model.actor.megatron={tensor: 2}", "model.actor.lora.rank=4"], "leave one out"),
    (["trainer.memory=[offlaod]"], "allowed: checkpoint, offload"),
    (["data.sampler=random"], "in_order"),
    (["data.split={tain: a}"], "allowed: train, eval"),
    (["trainer.seed=-1"], "at least 0"),
    (["trainer.samples_every=-1"], "at least 0"),
    (["trainer.epochs=0"], "above 0"),
])
def test_impossible_settings_are_refused_with_the_way_out(overrides, words):
    with pytest.raises(ConfigError) as error:
        load_run(overrides=overrides)
    assert words in str(error.value), error.value


def test_numbers_paths_and_origins(tmp_path):
    path = workspace(tmp_path)
    loaded = load_run(path, ["trainer.optim.lr=1e-6"])
    assert loaded.config.trainer.optim.lr == 1e-6 and loaded.origins["trainer.optim.lr"] == "override"
    assert loaded.config.data.train == str(tmp_path / "train.jsonl") and loaded.config.trainer.output_dir == tmp_path / "out"
    assert loaded.config.trainer.base_dir == tmp_path and loaded.origins["trainer.steps"].startswith("run.yaml:")


def test_this_environment_meets_the_stated_minima():
    assert minimum_problems() == []
