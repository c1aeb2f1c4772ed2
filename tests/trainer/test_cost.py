"""The cost model against what was measured, against real models, and against itself."""

import contextlib
import functools
import io
import re
import shlex
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer.tiny_runs import tiny_model
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config, T5Config

from verl.cli.main import main
from verl.core.errors import CapacityError, ConfigError
from verl.engine.native.config import NativeConfig
from verl.engine.native.engine import NativeEngine
from verl.engine.optimizer import MasterAdamW, OptimConfig
from verl.flow.devices import Device as Place
from verl.models import load_lm
from verl.models.load import LoraConfig
from verl.trainer.calibration import CALIBRATION, DEVICES, GIB, parse_devices
from verl.trainer.capacity import Layout, job_of, memory_plan, occupants, read_shapes
from verl.trainer.config import load_run
from verl.trainer.cost import Job, Parallel, Part, in_use, kv_slots, needed, rollout_parts, saved_per_token, train_parts
from verl.trainer.forecast import make_plan, plan_devices
from verl.trainer.shape import Shape, read_shape, shape_of
from verl.trainer.step_time import decode_step, generate, train_phases


def sizes(hidden: int, layers: int, heads: int, kv: int, inner: int, vocabulary: int, **more) -> dict:
    return dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
                intermediate_size=inner, vocab_size=vocabulary, **more)


CONFIGS = {
    "q05": Qwen2Config(**sizes(896, 24, 14, 2, 4864, 151936), tie_word_embeddings=True),
    "q15": Qwen2Config(**sizes(1536, 28, 12, 2, 8960, 151936), tie_word_embeddings=True),
    "l8": LlamaConfig(**sizes(4096, 32, 32, 8, 14336, 128256), tie_word_embeddings=False, max_position_embeddings=8192),
    "l70": LlamaConfig(**sizes(8192, 80, 64, 8, 28672, 128256), tie_word_embeddings=False, max_position_embeddings=8192),
    "l440": LlamaConfig(**sizes(16384, 60, 128, 8, 131072, 128256), tie_word_embeddings=False, max_position_embeddings=8192),
}
H200 = DEVICES["H200"]


@functools.cache
def shape(name: str) -> Shape:
    return shape_of(CONFIGS[name])


# -- measured --------------------------------------------------------------------------------------------------------------
# One row a measurement. Device memory in use at its peak on one H200; GRPO, 64 prompts x 8, prompt 256, response 1024.

HOLES = 0.5  # share of the activations that lay in holes when micro-batches had several sizes, before 4127021 let segments grow


@dataclass(frozen=True)
class Step:
    shape: str
    micro: int  # tokens of the largest micro-batch that the budget made of rows of 1024 behind prompts of 256
    gib: float
    source: str
    generate_s: float
    train_s: float | None  # None: held up by copies, a cause that is gone
    holes: bool = False
    beside: float = 0.0  # GiB of another run in the same process, whose pool was never given back
    kv_tokens: int = 64 * (512 * 16 + 64 * 4 + 8)


MEASURED = [
    Step("q05", 42240, 56.90, "step.h200.jsonl c2858b1, budget 40% of memory: 40 rows, 5 prompts", 3.404, 4.512),
    Step("q05", 16128, 38.7, "LOG, a whole GRPO step: 16,384 tokens", 3.4, 5.1, holes=True),
    Step("q05", 12800, 29.6, "LOG, between micro-batches: 12% of memory, 12 rows", 3.4, None),
    Step("q15", 20480, 111.35, "step.h200.jsonl c2858b1, 40% of memory: 19 rows, behind q05", 6.412, 10.819, holes=True,
         beside=6.19),
    Step("q15", 16128, 91.6, "LOG, a whole GRPO step: 16,384 tokens", 6.4, 11.0, holes=True),
    Step("q15", 5632, 59.72, "step.h200.jsonl c2858b1, note 6144 tokens", 6.394, 12.414, holes=True),
    Step("q15", 5632, 59.7, "LOG, between micro-batches: 12% of memory, third step", 6.4, None, holes=True),
]
ROLLOUTS = [  # shape, GiB, tokens/s, prefill seconds: rollout.h200.jsonl 44738c5, a pool of all that 512 sequences can use
    ("q05", 10.5, 152_717, 0.09), ("q15", None, 81_048, 0.114), ("l8", 105.1, 21_898, 0.447)]


def job(name: str, micro: int = 4096, **more) -> Job:
    s = shape(name)
    return Job(s, s.parameters, prompts=64, group=8, prompt=256, response=1024, micro=micro, **more)


def one_device(job: Job, memory: float = H200.memory) -> list[Part]:
    here = (Place(0),)
    return occupants(job, Layout(here, here, Parallel(), 1, {}), memory)[0][2]


def bytes_of(parts: list[Part], name: str) -> float:
    return sum(part.bytes for part in parts if part.name == name)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.shape}-{row.micro}-{row.gib}")
def test_measured_steps(row):
    """Peak within 5%, phases within 10% (training: 12%)."""
    known = job(row.shape, row.micro, kv_tokens=row.kv_tokens)
    parts = one_device(known)
    predicted = in_use(parts) / GIB + HOLES * row.holes * bytes_of(parts, "activations") / GIB + row.beside
    assert predicted == pytest.approx(row.gib, rel=0.05), row.source
    assert sum(p.seconds for p in generate(known, H200, 1, row.kv_tokens)) == pytest.approx(row.generate_s, rel=0.1), row.source
    if row.train_s is not None:
        assert sum(p.seconds for p in train_phases(known, H200, Parallel())) == pytest.approx(row.train_s, rel=0.12), row.source


@pytest.mark.parametrize("name, gib, rate, prefill_s", ROLLOUTS)
def test_measured_rollouts(name, gib, rate, prefill_s):
    known = job(name, kv_tokens=1 << 40)
    parts = [Part("context", CALIBRATION.context), Part("weights", 2 * shape(name).parameters), *rollout_parts(known, 0.0)]
    if gib is not None:
        assert in_use(parts) / GIB == pytest.approx(gib, rel=0.05)
    prefill, decode = generate(known, H200, 1, kv_slots(known, 0.0))
    assert 512 * 1024 / (prefill.seconds + decode.seconds) == pytest.approx(rate, rel=0.1)
    assert prefill.seconds == pytest.approx(prefill_s, rel=0.3)


def test_measured_small_batches():
    """rollout.h200.jsonl 44738c5, q05-shapes: launches bound what few sequences get."""
    for rows, rate in ((1, 600.6), (8, 4537.0)):
        small = Job(shape("q05"), shape("q05").parameters, 1, rows, 256, 256, 1)
        assert rows / decode_step(small, H200, rows) == pytest.approx(rate, rel=0.1)


# -- real models -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, total", [
    ("q05", 494_032_768), ("q15", 1_543_714_304), ("l8", 8_030_261_248), ("l70", 70_553_706_496)])
def test_counts_of_known_models(name, total):
    """As the models' own cards and transformers count them."""
    assert shape(name).parameters == total
    assert (shape(name).head == 0) == CONFIGS[name].tie_word_embeddings


@pytest.mark.parametrize("config", [
    LlamaConfig(**sizes(32, 2, 4, 2, 64, 96)), Qwen2Config(**sizes(32, 3, 4, 2, 48, 80), tie_word_embeddings=True),
    GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64),
    MixtralConfig(**sizes(32, 2, 4, 2, 48, 96), num_local_experts=4, num_experts_per_tok=2)], ids=lambda c: c.model_type)
def test_counts_of_real_modules(config):
    module, s = AutoModelForCausalLM.from_config(config), shape_of(config)
    assert s.parameters == sum(p.numel() for p in module.parameters())
    assert s.embedding == module.get_input_embeddings().weight.numel()
    stack = next(m for m in module.modules() if isinstance(m, torch.nn.ModuleList))
    assert s.blocks == sum(p.numel() for p in stack.parameters()) and s.layers == len(stack)
    if config.model_type == "mixtral":
        experts = sum(p.numel() for n, p in stack.named_parameters() if ".experts." in n)
        assert s.active == s.blocks - experts // 2
    else:
        assert s.active == s.blocks


def test_counts_of_an_encoder_decoder():
    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=3, num_heads=4, vocab_size=96)
    s = shape_of(config)
    assert s.layers == 5 and s.parameters == sum(p.numel() for p in AutoModelForSeq2SeqLM.from_config(config).parameters())


def test_adapters_state_and_cache_of_a_real_run(tmp_path):
    """The numbers that are arithmetic are exact: LoRA parameters, optimizer bytes, the sampler's pool."""
    tiny_model(tmp_path)
    s = read_shape(tmp_path)
    lm = load_lm(tmp_path, lora=LoraConfig(rank=3))
    assert s.lora(3) == sum(p.numel() for n, p in lm.parameters() if p.requires_grad)
    attention = read_shape(tmp_path, target=r".*\.[qv]_proj")
    lm = load_lm(tmp_path, lora=LoraConfig(rank=2, target=r".*\.[qv]_proj"))
    assert attention.lora(2) == sum(p.numel() for n, p in lm.parameters() if p.requires_grad)

    lm = load_lm(tmp_path, torch.bfloat16)
    optimizer = MasterAdamW(lm.parameters(), OptimConfig())
    sum(p.sum() for _, p in lm.parameters()).backward()
    plain = Job(s, s.parameters, 4, 2, 16, 16, 64, kv_tokens=256, sequences=8, kv_width=2)
    parts = one_device(plain)
    size = {"working weights": sum(p.nbytes for _, p in lm.parameters()),
            "float32 masters": sum(m.nbytes for m in optimizer.masters),
            "gradient sums": sum(g.nbytes for g in optimizer.gradients())}
    optimizer.step(1e-3, 1.0)
    size["moments"] = sum(t.nbytes for name, t in optimizer.state().items() if name.startswith("exp_avg"))
    assert {name: bytes_of(parts, name) for name in size} == size

    native = NativeEngine(lm, NativeConfig(kv_tokens=256, max_sequences=8, max_total_tokens=32, page_size=64))
    assert (native.memory.slots, native.memory.size) == (kv_slots(plain, 0.0), bytes_of(parts, "KV pool"))


# -- properties ------------------------------------------------------------------------------------------------------------

@given(st.integers(1, 60_000), st.integers(1, 8), st.sampled_from(["q05", "l8"]), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_more_tokens_take_more_and_no_saving_costs(tokens, times, name, compiled, lora):
    small = job(name, tokens, compiled=compiled)
    small = replace(small, trained=small.actor.lora(16)) if lora else small
    assert needed(one_device(small)) <= needed(one_device(replace(small, micro=tokens * times)))
    assert needed(one_device(replace(small, checkpoint=True))) <= needed(one_device(small))
    assert bytes_of(one_device(replace(small, offload=True)), "moments") == 0
    longer = replace(small, response=small.response * times)
    assert bytes_of(one_device(small), "KV pool") <= bytes_of(one_device(longer), "KV pool")


@given(st.sampled_from([2, 4, 8, 64, 1024]))
@settings(deadline=None)
def test_sharding_divides_the_state(n):
    whole = train_parts(job("l8"), Parallel())
    for p in (Parallel(n, shard=n, gather="layer"), Parallel(n, tensor=n) if n <= 8 else Parallel(n, tensor=8, pipeline=n // 8)):
        cut = train_parts(job("l8"), p)
        for name in ("float32 masters", "moments", "gradient sums"):
            assert bytes_of(cut, name) * n == pytest.approx(bytes_of(whole, name))
    assert bytes_of(train_parts(job("l8"), Parallel(n, shard=n, gather="whole")), "gathered weights") == 2 * shape("l8").parameters


def test_tensor_parallelism_divides_the_wide_activations():
    s = shape("l8")
    one, eight = saved_per_token(s), saved_per_token(s, tensor=8)
    assert eight == one / 8
    assert saved_per_token(s, compiled=False) > one


# -- the command -----------------------------------------------------------------------------------------------------------

def config_file(directory, name: str, **trainer) -> str:
    CONFIGS[name].save_pretrained(directory / name)
    path = directory / f"{name}.yaml"
    words = "".join(f"  {key}: {value}\n" for key, value in {"algorithm": "grpo", "steps": 1000, **trainer}.items())
    path.write_text(f"trainer:\n{words}  rewards: [{{verifier: math}}]\n  sampling: {{max_tokens: 1024}}\n"
                    f"model:\n  actor: {{model_name_or_path: {directory / name}}}\ndata: {{max_prompt_tokens: 256}}\n")
    return str(path)


def typed(*argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return code, out.getvalue(), err.getvalue()


def test_a_plan_that_fits_is_printed(tmp_path):
    code, out, _ = typed("plan", config_file(tmp_path, "q15"), "trainer.rollout_batch_size=32", "--devices", "1xh200")
    assert code == 0
    for words in ("plan for 1xH200", "1.54B parameters", "a step: 32 x 8 answers of 1024", "working weights", "KV pool",
                  "GiB at a time", "actor forward and backward", "tokens/s"):
        assert words in out


def test_a_refusal_names_what_fits_and_that_runs(tmp_path):
    code, out, err = typed("plan", config_file(tmp_path, "l8"), "--devices", "1xH100")
    assert code == 1 and not out
    assert "does not fit on 1xH100" in err and "float32 masters" in err
    advised = re.findall(r"^  verl (plan .*?)   # ([\d.]+) GiB$", err, re.M)
    assert len(advised) == 3
    assert any("offload" in text for text, _ in advised) and any("lora.rank=16" in text for text, _ in advised)
    for text, gib in advised:
        again, plan, _ = typed(*shlex.split(text))
        assert again == 0 and f"at most {gib} GiB at a time" in plan


def test_nothing_near_fits(tmp_path):
    with pytest.raises(CapacityError, match="nothing near it fits"):
        plan_devices(config_file(tmp_path, "l440"), [], "1xA100")


def test_70b_on_1024_h100(tmp_path):
    """Every device holds a 1024th of the optimizer, a layer at a time and an eighth of a sampler; a step takes longer than its
    matrix products at the ceiling."""
    path = config_file(tmp_path, "l70", rollout_batch_size=1024)
    run = load_run(path, ["trainer.rollout.tensor_parallel_size=8", "trainer.micro_batch_tokens=2560",
                          "trainer.memory=[checkpoint]"])
    plan = make_plan(run.config, read_shapes(run.config), 1024, DEVICES["H100"])
    assert plan.fits and [(roles, count) for roles, count, _ in plan.groups] == [("trainer and sampler", 1024)]
    parts = plan.groups[0][2]
    assert bytes_of(parts, "moments") == pytest.approx(8 * shape("l70").parameters / 1024)
    assert bytes_of(parts, "sampler's weights") == pytest.approx(2 * shape("l70").parameters / 8)
    least = 6 * 70e9 * plan.job.computed / 1024 / DEVICES["H100"].matmul
    trained = next(p for p in plan.training if p.name == "actor forward and backward")
    assert least < trained.seconds < 10 * least
    assert 10 < plan.seconds < 300 and 100 < plan.tokens / plan.seconds / 1024 < 5000
    cut = load_run(path, ["trainer.rollout.tensor_parallel_size=8", "model.actor.megatron={tensor: 8, pipeline: 4}"])
    megatron = make_plan(cut.config, read_shapes(cut.config), 1024, DEVICES["H100"])
    assert megatron.layout.parallel == Parallel(1024, 8, 4) and "data 32" in megatron.layout.lines[0]


def test_roles_on_devices_of_their_own(tmp_path):
    config = load_run(config_file(tmp_path, "l8"), ["trainer.placement={actor: 'cuda:0-5', rollout: 'cuda:6-7'}",
                                                    "trainer.pipeline=ahead"]).config
    plan = make_plan(config, read_shapes(config), 8, H200)
    assert sorted((roles, count) for roles, count, _ in plan.groups) == [("sampler", 2), ("trainer", 6)]
    sampling, training = (sum(p.seconds for p in phases) for phases in (plan.sampling, plan.training))
    assert plan.seconds == max(sampling, training)
    received = plan.sampling[0]
    assert received.moved == 2 * shape("l8").parameters and received.seconds > 0
    with pytest.raises(ConfigError, match="tensor_parallel_size: 3 does not divide 2 devices"):
        three = load_run(config_file(tmp_path, "l8"), ["trainer.placement={actor: 'cuda:0-5', rollout: 'cuda:6-7'}",
                                                       "trainer.rollout.tensor_parallel_size=3"]).config
        make_plan(three, read_shapes(three), 8, H200)


def test_a_sampler_beside_a_training_on_the_same_device_needs_its_memory_too(tmp_path):
    words = ["trainer.placement={actor: 'cuda:0', rollout: 'host/cuda:0'}"]
    path = config_file(tmp_path, "q15")
    step, ahead = (make_plan(c, read_shapes(c), 1, H200) for c in (
        load_run(path, words).config, load_run(path, [words[0].replace("host/", ""), "trainer.rollout.workers=2",
                                                      "trainer.pipeline=ahead"]).config))
    assert [roles for roles, _, _ in ahead.groups] == ["trainer and sampler x 2"] and len(step.groups) == 2
    parts = ahead.groups[0][2]
    assert needed(parts) == sum(part.bytes for part in parts if part.when in ("always", "train"))
    assert bytes_of(parts, "sampler's weights") == 2 * bytes_of(parts, "working weights")
    assert ahead.seconds == pytest.approx(sum(p.seconds for p in (*ahead.sampling, *ahead.training)))  # one device: no overlap


def test_roles_add_their_weights(tmp_path):
    path = config_file(tmp_path, "l8", algorithm="ppo")
    config = load_run(path, ["trainer.algo.kl_coef=0.1", f"model.critic.model_name_or_path={tmp_path / 'l8'}",
                             f"model.reward_model.model_name_or_path={tmp_path / 'l8'}"]).config
    parts = memory_plan(config, read_shapes(config), 1000 * GIB, longest_prompt=256)
    assert bytes_of(parts, "critic's moments") == bytes_of(parts, "moments") > 0
    assert bytes_of(parts, "reference") == bytes_of(parts, "working weights")
    assert bytes_of(parts, "reward model") == bytes_of(parts, "reference") - 2 * shape("l8").head
    adapted = load_run(path, ["trainer.algo.kl_coef=0.1", "model.actor.lora.rank=8"]).config
    job = job_of(adapted, read_shapes(adapted), H200.memory)
    assert job.lora and job.referenced and job.reference is None


def test_show_plan_prints_the_memory_of_this_machine(tmp_path):
    tiny_model(tmp_path / "model")
    (tmp_path / "c.yaml").write_text(f"model: {{actor: {{model_name_or_path: {tmp_path / 'model'}}}}}\n")
    code, out, _ = typed("show", "plan", str(tmp_path / "c.yaml"))
    assert code == 0 and "working weights" in out and "GiB at a time" in out
    code, out, _ = typed("show", "plan", str(tmp_path / "c.yaml"), f"model.actor.model_name_or_path={tmp_path / 'none'}")
    assert code == 0 and "memory is not planned" in out
    code, out, _ = typed("plan", str(tmp_path / "c.yaml"), "trainer.sampling.max_tokens=64")
    assert code == 0 and ("plan for this CPU" in out or "plan for 1x" in out)


@pytest.mark.parametrize("text, words", [("8xB300", "nothing is known about 'B300'"), ("H200", "write it like"),
                                         ("0xH200", "write it like")])
def test_devices_that_are_none(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_devices(text)
