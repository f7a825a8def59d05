"""A Hugging Face folder as a :class:`~pytest_vram.sizing.shape.ModelShape`: configuration, weights and quantisation."""

from __future__ import annotations

from pathlib import Path

from pytest_vram.sizing import hf_layers, hf_quant, hf_weights, safetensors, sense
from pytest_vram.sizing.hf_config import Config, read_config
from pytest_vram.sizing.hf_feed_forward import expert_count
from pytest_vram.sizing.shape import ModelShape, Note, Tensor

_FLOATS = {"f32": 4, "f16": 2, "bf16": 2, "f64": 8}
_DTYPE_NAMES = {"float32": "f32", "float": "f32", "float16": "f16", "half": "f16", "bfloat16": "bf16", "float64": "f64"}


def read_shape(folder: Path) -> ModelShape:
    """Everything that decides the memory of the model in a folder, read from its files' headers.

    :raises BadModel: a folder without ``config.json``, or files that are damaged, missing or contradict themselves.
    """
    config = read_config(folder)
    folder = folder.parent if folder.name == "config.json" else folder
    layers = hf_layers.build(config)
    latent, recurrent = hf_layers.mla(config), hf_layers.ssm(config)
    quant = hf_quant.read(config)
    encoder = hf_layers.is_encoder(config)
    weights = safetensors.read_folder(folder)
    others: tuple[Path, ...] = ()
    if weights is None:
        others = tuple(sorted((*folder.glob("pytorch_model*.bin"), *folder.glob("consolidated*.pth"))))
        tensors = hf_weights.compute(config, layers, latent, recurrent, quant)
        _without_safetensors(config, folder, others)
    else:
        tensors = weights.tensors
    if not config.known:
        text = (
            f"{config.path}: model type {config.model_type!r} is not known here; its blocks are read as plain attention"
            " with a full cache, which windows, latent attention or recurrent blocks would change."
        )
        config.notes.append(Note(kind="unknown", bucket="kv", text=text))
    for tensor in tensors:
        if not tensor.known and weights is not None:
            text = f"{tensor.name} is of type {tensor.type}, which is not known: what its bytes become is not either."
            config.notes.append(Note(kind="unknown", bucket="weights", text=text))
            break
    meta = _meta(config, quant, tensors)
    experts = expert_count(config)
    if experts:
        meta["shared_expert_width"] = hf_weights.shared_width(config)
    leading = next((index for index, layer in enumerate(layers) if layer.experts), 0)
    name = config.outer.get("_name_or_path")
    windows = sum(1 for layer in layers if layer.window)
    made = ModelShape(
        source=str(folder),
        format="config" if weights is None else "safetensors",
        architecture=config.architecture,
        name=name if isinstance(name, str) and name else folder.name,
        known=config.known,
        layers=layers,
        extra_layers=config.integer("num_nextn_predict_layers", default=0),
        embedding=config.positive("hidden_size", "n_embd", "d_model"),
        vocabulary=config.integer("vocab_size", default=0),
        context=config.integer("max_position_embeddings", "n_positions", "seq_length", default=0),
        experts=experts,
        experts_used=_used(config) if experts else 0,
        expert_feed_forward=hf_weights.expert_width(config) if experts else 0,
        shared_experts=config.integer("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0)
        if experts
        else 0,
        leading_dense=leading,
        tied=hf_weights.tied(config),
        encoder=encoder,
        causal=not encoder,
        mla=latent,
        ssm=recurrent,
        swa_pattern=f"{windows} of {len(layers)}" if windows else "",
        quantization=quant.label if quant is not None and quant.known else (quant.method if quant else ""),
        tensors=tensors,
        files=weights.files if weights is not None else tuple(str(path) for path in others),
        file_bytes=weights.file_bytes if weights is not None else sum(path.stat().st_size for path in others),
        meta=meta,
        notes=config.all_notes(),
    )
    return sense.checked(made)


def _used(config: Config) -> int:
    return config.positive(
        "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "num_selects", default=1
    )


def _without_safetensors(config: Config, folder: Path, others: tuple[Path, ...]) -> None:
    if others:
        held = f"{folder} holds {others[0].name} and no safetensors; pickled weights are not read"
    else:
        held = f"{folder} holds no weights"
    text = f"{held}: the bytes of the weights are computed from the dimensions in config.json."
    config.notes.append(Note(kind="assumed", bucket="weights", text=text))
    if any(key in config.outer for key in ("vision_config", "audio_config", "vision_tower", "mm_vision_tower")):
        text = "the encoder of images or sound is not in the sum: its dimensions are not computed from config.json."
        config.notes.append(Note(kind="unknown", bucket="projector", text=text))


def _meta(
    config: Config, quant: hf_quant.Quant | None, tensors: tuple[Tensor, ...]
) -> dict[str, int | float | str | bool]:
    """Values that rules need and that have no field: the loaded number format and how weights are packed."""
    dtype = _DTYPE_NAMES.get(config.dtype, "")
    if not dtype:
        sums: dict[str, int] = {}
        for tensor in tensors:
            if tensor.type in _FLOATS:
                sums[tensor.type] = sums.get(tensor.type, 0) + tensor.bytes
        dtype = max(sums, key=lambda name: sums[name], default="bf16")
    meta: dict[str, int | float | str | bool] = {
        "model_type": config.model_type,
        "dtype": dtype,
        "dtype_bytes": _FLOATS[dtype],
    }
    if quant is not None:
        meta |= {"quant_method": quant.method, "quant_bits": quant.bits}
    meta |= _rope(config)
    for key in ("mamba_ssm_dtype", "ssm_state_dtype"):
        found = config.given(key)
        if isinstance(found, str):
            meta["state_dtype"] = found.removeprefix("torch.")
    return meta


def _rope(config: Config) -> dict[str, int | float | str | bool]:
    """By how much rotary scaling stretches the trained context, where engines stretch the configured length by it."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.given(key)
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
        if (
            not isinstance(rope, dict)
            or kind in (None, "default", "su", "longrope", "llama3")
            or "gemma3" in config.model_type
        ):
            continue
        found: dict[str, int | float | str | bool] = {}
        factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
        if isinstance(factor, int | float) and not isinstance(factor, bool) and 1 <= factor <= 1024:
            found["rope_factor"] = float(factor)
            if kind == "yarn" and type(original) is int and 0 < original < 1 << 40:
                found["rope_original"] = original
        return found
    return {}


def as_loaded(tensor: Tensor, dtype: str) -> int:
    """Bytes of a tensor after loading: whole numbers of another width are converted to the model's own format."""
    if tensor.type in _FLOATS and dtype in _FLOATS and tensor.type != dtype:
        return tensor.elements * _FLOATS[dtype]
    return tensor.bytes
