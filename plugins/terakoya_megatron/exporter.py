"""Exports Megatron-LM's checkpoints: `iter_0000001/mp_rank_TT_PPP/model_optim_rng.pt` for each rank, without optimizer.

The importer `megatron` reads them, and so does Megatron-LM with `--load DIR --finetune --ckpt-format torch`. The files
contain Megatron's arguments, which `--use-checkpoint-args` reads.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PositiveInt

from terakoya.components import Exporter
from terakoya.errors import UserError
from terakoya.toolkit.formats.model_files import belongs_to_model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from terakoya_megatron.weights import Gpt

GELUS = {"gelu_new": True, "gelu_fast": True, "gelu_pytorch_tanh": True, "gelu": False}
"""Transformers' name of a GELU -> whether it is the tanh approximation, which Megatron's fused kernel computes."""

EXTRA_STATE_MODULES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Modules of a layer that have an extra state for number formats in a checkpoint; None is an empty one."""


class MegatronExporter(Exporter):
    """A Llama or a GPT-2 for Megatron-LM."""

    for_transformers: ClassVar[bool] = False

    tp: PositiveInt = 1
    """The tensor-parallel size of the checkpoint."""
    pp: PositiveInt = 1
    """The pipeline-parallel size of the checkpoint."""
    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine"
    """Whose names the layers have: Transformer Engine's, which fuse norms, or Megatron-Core's own."""
    make_vocab_size_divisible_by: PositiveInt = 128
    """The vocabulary is padded to a multiple of this times `tp`."""
    iteration: PositiveInt = 1
    """The checkpoint's number."""

    def export(self, models: Mapping[str, PreTrainedModel], tokenizer_folder: Path, out: Path) -> None:
        """Writes the only model of `models`, and the tokenizer into `out/tokenizer`. Raises UserError for several
        models, one that Megatron does not have, or sizes that `tp` and `pp` do not divide."""
        from terakoya.toolkit.formats import model_folder
        from terakoya_megatron import weights

        if len(models) != 1:
            raise UserError(
                f"format megatron: expected one model, got {', '.join(sorted(models))}; choose one with --only"
            )
        source = next(iter(models.values()))
        model = read_model(source)
        self._check_sizes(model)
        state = {name: value.detach() for name, value in source.state_dict().items()}
        full = weights.from_transformers(state, model)
        vocabulary = len(full[weights.WORD_EMBEDDINGS])
        padded = (weights.WORD_EMBEDDINGS, weights.OUTPUT)
        full |= {name: self._pad_vocabulary(full[name]) for name in padded if name in full}
        embeddings = full[weights.WORD_EMBEDDINGS]
        arguments = self._megatron_arguments(model, source.config, vocabulary, len(embeddings), embeddings.dtype)
        shards = {
            name: weights.split_shards(value, weights.split_rule(name, model), self.tp) for name, value in full.items()
        }
        for rank in range(self.tp):
            for stage in range(self.pp):
                name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if self.pp > 1 else "")
                folder = out / f"iter_{self.iteration:07d}" / name
                folder.mkdir(parents=True)
                own = self._stage_weights({name: shard[rank] for name, shard in shards.items()}, stage, model)
                content = {
                    "args": arguments,
                    "checkpoint_version": 3.0,
                    "iteration": self.iteration,
                    "model": {name: None if value is None else value.clone() for name, value in own.items()},
                }
                model_folder.write_torch_file(content, folder / "model_optim_rng.pt")
        (out / "latest_checkpointed_iteration.txt").write_text(str(self.iteration), encoding="utf-8")
        (out / "tokenizer").mkdir()
        for file in sorted(tokenizer_folder.iterdir()):
            if file.is_file() and not belongs_to_model(file):
                shutil.copyfile(file, out / "tokenizer" / file.name)

    def _check_sizes(self, model: Gpt) -> None:
        for size, description, divisor, name in (
            (model.heads, "attention heads", self.tp, "tp"),
            (model.groups, "heads of keys and values", self.tp, "tp"),
            (model.intermediate_size, "feed-forward size", self.tp, "tp"),
            (model.layers, "layers", self.pp, "pp"),
        ):
            if size % divisor:
                raise UserError(f"format megatron: {name} {divisor} does not divide the model's {description}, {size}")

    def _pad_vocabulary(self, weight: Tensor) -> Tensor:
        """Returns `weight` with its last row repeated up to Megatron's padded vocabulary, as Megatron's tools do."""
        import torch

        multiple = self.make_vocab_size_divisible_by * self.tp
        missing = -len(weight) % multiple
        return torch.cat([weight, weight[-1:].expand(missing, -1)])

    def _stage_weights(self, weights: Mapping[str, Tensor], stage: int, model: Gpt) -> dict[str, Tensor | None]:
        """Returns those of a tensor-parallel rank's `weights` that are in pipeline stage `stage`.

        Layers are numbered within the stage.
        """
        from terakoya_megatron import weights as names

        engine = self.transformer_impl == "transformer_engine"
        fused = {short: long for long, short in names.ALIASES.items()} if engine else {}
        count, last = model.layers // self.pp, stage == self.pp - 1
        own: dict[str, Tensor | None] = {}
        for name, value in weights.items():
            in_layer = names.IN_LAYER.fullmatch(name)
            if in_layer:
                layer = int(in_layer[1]) - stage * count
                if 0 <= layer < count:
                    end = f"{in_layer[2]}.{in_layer[3]}"
                    own[f"{names.LAYER}.{layer}.{fused.get(end, end)}"] = value
            elif last if name.startswith((names.FINAL_NORM, names.OUTPUT)) else stage == 0:
                own[name] = value
        if last and model.tied and stage > 0:
            own[names.OUTPUT] = weights[names.WORD_EMBEDDINGS]
        modules = [*EXTRA_STATE_MODULES, "self_attention.core_attention"] if engine else EXTRA_STATE_MODULES
        own |= {f"{names.LAYER}.{layer}.{module}._extra_state": None for layer in range(count) for module in modules}
        if last:
            own["output_layer._extra_state"] = None
        return own

    def _megatron_arguments(
        self, model: Gpt, config: PretrainedConfig, vocabulary: int, padded: int, dtype: Any
    ) -> argparse.Namespace:
        import torch

        is_llama = model.family == "llama"
        return argparse.Namespace(
            num_layers=model.layers,
            hidden_size=model.hidden_size,
            ffn_hidden_size=model.intermediate_size,
            num_attention_heads=model.heads,
            group_query_attention=model.groups != model.heads,
            num_query_groups=model.groups,
            kv_channels=model.head_size,
            max_position_embeddings=model.positions,
            seq_length=model.positions,
            position_embedding_type="rope" if is_llama else "learned_absolute",
            add_position_embedding=not is_llama,
            use_rotary_position_embeddings=is_llama,
            rotary_base=int(model.rope_theta) if model.rope_theta == int(model.rope_theta) else model.rope_theta,
            rotary_percent=1.0,
            rotary_interleaved=False,
            add_bias_linear=model.biases,
            add_qkv_bias=False,
            squared_relu=False,
            swiglu=is_llama,
            openai_gelu=False,
            bias_gelu_fusion=not is_llama and GELUS[model.activation],
            bias_swiglu_fusion=is_llama,
            normalization="RMSNorm" if is_llama else "LayerNorm",
            norm_epsilon=model.norm_epsilon,
            apply_layernorm_1p=False,
            apply_query_key_layer_scaling=False,
            untie_embeddings_and_output_weights=not model.tied,
            attention_dropout=float(getattr(config, "attn_pdrop", 0.0) or 0.0),
            hidden_dropout=float(getattr(config, "resid_pdrop", 0.0) or 0.0),
            init_method_std=model.initializer_range,
            num_experts=None,
            vocab_size=vocabulary,
            padded_vocab_size=padded,
            make_vocab_size_divisible_by=self.make_vocab_size_divisible_by,
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=None,
            expert_model_parallel_size=1,
            transformer_impl=self.transformer_impl,
            use_mcore_models=True,
            ckpt_format="torch",
            params_dtype=dtype,
            fp16=dtype == torch.float16,
            bf16=dtype == torch.bfloat16,
            iteration=self.iteration,
            consumed_train_samples=0,
            consumed_valid_samples=0,
            tokenizer_type="HuggingFaceTokenizer",
            bert_binary_head=False,
        )


def read_model(source: PreTrainedModel) -> Gpt:
    """Returns `source` as Megatron describes it.

    Raises:
        UserError: it is neither a Llama nor a GPT-2, or Megatron would compute it differently.
    """
    from transformers import GPT2LMHeadModel, LlamaForCausalLM

    from terakoya_megatron.weights import Gpt

    config: Any = source.config
    name = type(source).__name__
    if not isinstance(source, LlamaForCausalLM | GPT2LMHeadModel):
        raise UserError(f"format megatron: supports LlamaForCausalLM and GPT2LMHeadModel, got {name}")
    shared: dict[str, Any] = {
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_attention_heads,
        "positions": config.max_position_embeddings,
        "tied": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
    }
    if isinstance(source, LlamaForCausalLM):
        rope = config.rope_parameters
        unsupported = (
            (config.hidden_act != "silu", f"hidden_act {config.hidden_act}"),
            (rope.get("rope_type") != "default", f"rotary positions of type {rope.get('rope_type')}"),
            (config.attention_bias != config.mlp_bias, "biases in some of its linear layers"),
        )
    else:
        unsupported = (
            (config.activation_function not in GELUS, f"activation_function {config.activation_function}"),
            (not config.scale_attn_weights, "attention that is not scaled"),
            (config.scale_attn_by_inverse_layer_idx, "attention that is scaled by the layer's number"),
        )
    for is_unsupported, feature in unsupported:
        if is_unsupported:
            raise UserError(f"format megatron: Megatron's arguments cannot describe {name} with {feature}")
    if isinstance(source, LlamaForCausalLM):
        return Gpt(
            family="llama",
            groups=config.num_key_value_heads,
            head_size=config.head_dim or config.hidden_size // config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            norm_epsilon=config.rms_norm_eps,
            rope_theta=rope["rope_theta"],
            biases=config.mlp_bias,
            activation="silu",
            **shared,
        )
    return Gpt(
        family="gpt2",
        groups=config.num_attention_heads,
        head_size=config.hidden_size // config.num_attention_heads,
        intermediate_size=config.n_inner or 4 * config.hidden_size,
        norm_epsilon=config.layer_norm_epsilon,
        rope_theta=10000.0,
        biases=True,
        activation=config.activation_function,
        **shared,
    )
