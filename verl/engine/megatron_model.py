"""One rank's part of a Llama-like model as Megatron-Core modules: its pipeline stage, its share of every matrix.

Only imported where the package megatron-core is installed. Micro-batches stay packed: the layout of segments travels to the
attention as Megatron's attention mask, positions as rotary angles, so that a group's prompt is computed once here as well.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from verl.core.errors import ConfigError, ModelError
from verl.engine.megatron_layout import HEAD, Place, array_name
from verl.models.attention import AttentionSpec
from verl.models.head_parallel import parallel_logprobs
from verl.models.lm import LM, Outputs
from verl.models.packed import Packed

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPES = ("default", "linear", "llama3")  # angles that depend on the position alone, amplitudes of 1


def check(lm: LM, tensor: int, pipeline: int) -> None:
    """Raises ModelError for a model that is not supported, ConfigError for sizes that do not divide it."""
    config = lm.config
    if config.model_type not in FAMILIES:
        raise ModelError(f"{config.model_type} ({lm.path!r}) is not trained with Megatron-Core; supported: {', '.join(FAMILIES)}. "
                         "Leave model.actor.megatron out to train it with FSDP")
    rope = config.rope_parameters["rope_type"]
    if config.hidden_act != "silu" or rope not in ROPES:
        raise ModelError(f"{lm.path!r}: activation {config.hidden_act!r} with rope_type {rope!r} is not trained with "
                         f"Megatron-Core; supported: silu with {', '.join(ROPES)}")
    for name, size, cut in (("num_attention_heads", config.num_attention_heads, tensor),
                            ("num_key_value_heads", config.num_key_value_heads, tensor),
                            ("intermediate_size", config.intermediate_size, tensor),
                            ("num_hidden_layers", config.num_hidden_layers, pipeline)):
        if size % cut:
            raise ConfigError(f"model.actor.megatron: {{tensor: {tensor}, pipeline: {pipeline}}} does not fit {lm.path!r}: its "
                              f"{name} of {size} is no multiple of {cut}")


def join_grid(tensor: int, pipeline: int, device: torch.device) -> Place:
    """Make Megatron's process groups over the default world, or find those made before; this rank's place among them."""
    if not dist.is_initialized():
        raise ConfigError("Megatron-Core trains over the ranks of an initialised torch.distributed world, and there is none")
    if dist.get_world_size() % (tensor * pipeline):
        raise ConfigError(f"model.actor.megatron: {{tensor: {tensor}, pipeline: {pipeline}}} needs a multiple of "
                          f"{tensor * pipeline} ranks, there are {dist.get_world_size()}; change trainer.placement or the sizes")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:  # the first from a build of torch without CUDA
        raise ConfigError(f"Megatron-Core computes on NVIDIA GPUs and this rank has none ({error}); leave "
                          "model.actor.megatron out: FSDP trains on CPUs as well") from error
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=False)
        if device.type == "cuda":  # sequence-parallel regions enter this generator's state, though nothing here draws from it
            tensor_parallel.model_parallel_cuda_manual_seed(0)
    made = (parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_world_size())
    if made != (tensor, pipeline):
        raise ConfigError(f"this process has groups for {{tensor: {made[0]}, pipeline: {made[1]}}} already and cannot have others "
                          f"for {{tensor: {tensor}, pipeline: {pipeline}}} as well; use one pair of sizes for all roles")
    return Place(parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank(),
                 parallel_state.get_pipeline_model_parallel_rank())


class RMSNorm(torch.nn.Module):
    """transformers' order of rounding: normalised in float32, then rounded, then scaled."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * F.rms_norm(wide, wide.shape[-1:], None, self.eps).to(x.dtype)


class PackedAttention(torch.nn.Module):
    """Core attention over packed segments: `attention_mask` is the micro-batch's layout. Padding behind it gets zeros."""

    def __init__(self, config: TransformerConfig, layer_number: int, attn_mask_type, attention_type: str, layers=(), **_):
        super().__init__()
        self.spec: AttentionSpec = layers[layer_number - 1]

    def forward(self, query, key, value, attention_mask: Packed, **_) -> torch.Tensor:
        n = len(attention_mask)
        out_THE = attention_mask.attend(self, query[:n, 0], key[:n, 0], value[:n, 0], self.spec)
        return F.pad(out_THE.flatten(1), (0, 0, 0, len(query) - n))[:, None]


def transformer_config(lm: LM, tensor: int, pipeline: int) -> TransformerConfig:
    """Megatron's description of a model of FAMILIES."""
    config = lm.config
    return TransformerConfig(
        num_layers=config.num_hidden_layers, hidden_size=config.hidden_size, ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads, num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        normalization="RMSNorm", layernorm_epsilon=config.rms_norm_eps, gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, add_qkv_bias=config.model_type == "qwen2", qk_layernorm=config.model_type == "qwen3",
        hidden_dropout=0.0, attention_dropout=0.0, bias_activation_fusion=False, apply_rope_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, perform_initialization=False,
        params_dtype=lm.dtype, pipeline_dtype=lm.dtype, bf16=lm.dtype is torch.bfloat16, fp16=lm.dtype is torch.float16,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, sequence_parallel=tensor > 1,
        calculate_per_token_loss=True,  # losses are sums whose coefficients are in them: never divided by micro-batches
        batch_p2p_sync=False)


class Stage:
    """This rank's modules, and how a packed micro-batch goes through them. `model` is what Megatron's schedules call.

    parameters: by their arrays' names in the layout (megatron_layout.py), not filled yet but for zeros.
    """

    def __init__(self, lm: LM, tensor: int, pipeline: int, place: Place, device: torch.device):
        self.device, self.tensor, self.rows = device, tensor, lm.head.rows
        self.first, self.last = place.pipeline == 0, place.pipeline == pipeline - 1
        self.group = parallel_state.get_tensor_model_parallel_group()
        named = dict(lm.module.named_parameters())
        tied = HEAD not in named
        config = transformer_config(lm, tensor, pipeline)
        layers = config.num_layers // pipeline
        spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
        attention = spec.submodules.self_attention.submodules
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
        attention.core_attention = ModuleSpec(module=PackedAttention, params={"layers": _attention_specs(lm)})
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        vocabulary = lm.module.get_input_embeddings().weight.shape[0]
        self.model = GPTModel(
            config, TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RMSNorm), -(-vocabulary // tensor) * tensor,
            lm.context, pre_process=self.first, post_process=self.last, position_embedding_type="none",
            share_embeddings_and_output_weights=tied and pipeline == 1)
        self.parameters = {array_name(n, place.pipeline * layers, tied): p for n, p in self.model.named_parameters()}
        for parameter in self.parameters.values():
            torch.nn.init.zeros_(parameter)
        rotary = type(lm.module.base_model.rotary_emb)(config=lm.config)
        self.frequencies = rotary.inv_freq.to(device)

    def forward(self, packed: Packed, length: int) -> torch.Tensor:
        """The stage's output [length / tensor, 1, D] for the micro-batch; `length`: its tokens and padding behind them."""
        pad = length - len(packed)
        x = self.model.embedding(F.pad(packed.ids_N, (0, pad))[None], None) if self.first else None
        angles = F.pad(packed.positions_N, (0, pad)).to(self.frequencies.dtype)[:, None] * self.frequencies
        return self.model.decoder(hidden_states=x, attention_mask=packed,
                                  rotary_pos_emb=torch.cat([angles, angles], -1)[:, None, None])

    def outputs(self, hidden: torch.Tensor, packed: Packed, temperature: float) -> Outputs:
        """Log-probs and entropies of the micro-batch's targets from the last stage's output, the same on its tensor ranks."""
        if self.tensor > 1:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        weight = self.model.output_layer.weight
        weight = self.model.shared_embedding_or_output_weight() if weight is None else weight
        return Outputs(*parallel_logprobs(hidden[packed.source_T, 0], weight, packed.targets_T, self.rows, temperature, self.group))


def _attention_specs(lm: LM) -> tuple[AttentionSpec, ...]:
    """What each layer of the transformers model asks of its attention. Mistral's window is the same in all layers."""
    window = getattr(lm.config, "sliding_window", None)
    modules = [layer.self_attn for layer in lm.module.base_model.layers]
    return tuple(AttentionSpec(float(m.scaling), getattr(m, "sliding_window", window)) for m in modules)
