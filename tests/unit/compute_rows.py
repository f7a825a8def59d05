"""The table of dry runs in ``tests/data/compute-buffers.csv.gz`` as shapes, settings and placements."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

from pytest_vram.sizing import ggml
from pytest_vram.sizing.compute import compute_buffers
from pytest_vram.sizing.options import Device, Era, LlamaOptions, Placement
from pytest_vram.sizing.shape import Layer, Mla, ModelShape, Ssm, Tensor

Row = dict[str, str]
MIB = 1 << 20
TABLE = Path(__file__).parents[1] / "data" / "compute-buffers.csv.gz"


def rows() -> list[Row]:
    """All of them."""
    with gzip.open(TABLE, "rt", newline="") as file:
        return list(csv.DictReader(file))


def _size(row: Row, key: str) -> int:
    return int(float(row[key])) if row[key] else 0


class Files:
    """Tensors of a file that nobody wrote."""

    def __init__(self, matrix: str) -> None:
        self.matrix = matrix
        self.tensors: list[Tensor] = []
        self.labels: list[str] = []

    def add(self, label: str, name: str, *dims: int, type: str = "") -> None:
        known = ggml.BY_NAME[type or ("f32" if len(dims) == 1 else self.matrix)]
        if dims[0] % known.block:
            known = ggml.BY_NAME["q8_0" if dims[0] % 32 == 0 else "f16"]
        count = 1
        for dim in dims:
            count *= dim
        self.tensors.append(Tensor(name=name, dims=dims, type=known.name, bytes=count // known.block * known.bytes))
        self.labels.append(label)


def _more_bits(index: int, count: int) -> bool:
    """Which blocks of the usual Q4_K_M mixture have a larger type for ``ffn_down`` and ``attn_v``."""
    eighth = count // 8
    return index < eighth or index >= 7 * count // 8 or (index - eighth) % 3 == 2


def shape_and_placement(row: Row) -> tuple[ModelShape, Placement]:
    """The model of a row, and where its settings put it on one GPU."""
    arch, count, width = row["arch"], _size(row, "L"), _size(row, "E")
    heads, kv_heads, head, hidden = (_size(row, key) for key in ("H", "HK", "D", "FF"))
    experts, used, expert_hidden, window = (_size(row, key) for key in ("NE", "NU", "FE", "SW"))
    gpu = max(0, min(count, _size(row, "ngl") - 1))
    output = "gpu0" if _size(row, "ngl") >= 1 else "host"
    labels = tuple("host" if index < count - gpu else "gpu0" for index in range(count))
    files = Files(row["q"].lower())
    vocabulary = _size(row, "n")
    tied = row["tied"] == "True"
    files.add("host", "token_embd.weight", width, vocabulary, type=(row["out"] if tied else row["q"]).lower())
    files.add(output, "output_norm.weight", width)
    if not tied:
        files.add(output, "output.weight", width, vocabulary, type=row["out"].lower())
    mla = None
    ssm = None
    if arch == "deepseek2":
        mla = Mla(
            query_rank=_size(row, "QL"),
            kv_rank=_size(row, "KL"),
            rope=_size(row, "R"),
            nope=_size(row, "NOPE"),
            value=_size(row, "V"),
        )
    if arch == "mamba":
        ssm = Ssm(
            kind="mamba",
            inner=_size(row, "INNER"),
            state=_size(row, "STATE"),
            conv=_size(row, "CONV"),
            dt_rank=_size(row, "DT"),
        )
    layers = []
    for index, label in enumerate(labels):
        block = f"blk.{index}."
        larger = arch == "qwen3moe" if row["out"] == "" else row["out"] == "Q6_K" and _more_bits(index, count)
        more = "q6_k" if larger and files.matrix == "q4_k" else ""
        files.add(label, block + "attn_norm.weight", width)
        if ssm is not None:
            files.add(label, block + "ssm_in.weight", width, 2 * ssm.inner)
            files.add(label, block + "ssm_conv1d.weight", ssm.conv, ssm.inner, type="f32")
            files.add(label, block + "ssm_conv1d.bias", ssm.inner)
            files.add(label, block + "ssm_x.weight", ssm.inner, ssm.dt_rank + 2 * ssm.state)
            files.add(label, block + "ssm_dt.weight", ssm.dt_rank, ssm.inner)
            files.add(label, block + "ssm_dt.bias", ssm.inner)
            files.add(label, block + "ssm_a", ssm.state, ssm.inner, type="f32")
            files.add(label, block + "ssm_d", ssm.inner)
            files.add(label, block + "ssm_out.weight", ssm.inner, width)
            layers.append(Layer(state_r=(ssm.conv - 1) * ssm.inner, state_s=ssm.state * ssm.inner))
            continue
        if mla is not None:
            files.add(label, block + "attn_q_a.weight", width, mla.query_rank)
            files.add(label, block + "attn_q_a_norm.weight", mla.query_rank)
            files.add(label, block + "attn_q_b.weight", mla.query_rank, heads * (mla.nope + mla.rope))
            files.add(label, block + "attn_kv_a_mqa.weight", width, mla.kv_rank + mla.rope)
            files.add(label, block + "attn_kv_a_norm.weight", mla.kv_rank)
            files.add(label, block + "attn_k_b.weight", mla.nope, mla.kv_rank, heads)
            files.add(label, block + "attn_v_b.weight", mla.kv_rank, mla.value, heads)
            files.add(label, block + "attn_output.weight", heads * mla.value, width)
        else:
            files.add(label, block + "attn_q.weight", width, heads * head)
            files.add(label, block + "attn_k.weight", width, kv_heads * head)
            files.add(label, block + "attn_v.weight", width, kv_heads * head, type=more)
            files.add(label, block + "attn_output.weight", heads * head, width)
            if arch in ("gemma3", "qwen3moe"):
                files.add(label, block + "attn_q_norm.weight", head)
                files.add(label, block + "attn_k_norm.weight", head)
        files.add(label, block + "ffn_norm.weight", width)
        if arch == "gemma3":
            files.add(label, block + "post_attention_norm.weight", width)
            files.add(label, block + "post_ffw_norm.weight", width)
        sparse = experts > 0 and index >= _size(row, "LEAD")
        if sparse:
            where = "host" if index < _size(row, "ncmoe") else label
            files.add(label, block + "ffn_gate_inp.weight", width, experts, type="f32")
            files.add(where, block + "ffn_gate_exps.weight", width, expert_hidden, experts)
            files.add(where, block + "ffn_down_exps.weight", expert_hidden, width, experts, type=more)
            files.add(where, block + "ffn_up_exps.weight", width, expert_hidden, experts)
            if mla is not None:
                files.add(label, block + "exp_probs_b.bias", experts)
                files.add(label, block + "ffn_gate_shexp.weight", width, expert_hidden)
                files.add(label, block + "ffn_down_shexp.weight", expert_hidden, width)
                files.add(label, block + "ffn_up_shexp.weight", width, expert_hidden)
        else:
            files.add(label, block + "ffn_gate.weight", width, hidden)
            files.add(label, block + "ffn_down.weight", hidden, width, type=more)
            files.add(label, block + "ffn_up.weight", width, hidden)
        layers.append(
            Layer(
                heads=heads,
                kv_heads=1 if mla else kv_heads,
                key_length=mla.nope + mla.rope if mla else head,
                value_length=mla.value if mla else head,
                k_row=mla.kv_rank + mla.rope if mla else kv_heads * head,
                v_row=0 if mla else kv_heads * head,
                window=window if arch == "gemma3" and index % 6 < 5 else 0,
                feed_forward=0 if sparse else hidden,
                experts=experts if sparse else 0,
            )
        )
    shape = ModelShape(
        source="",
        format="gguf",
        architecture=arch,
        layers=tuple(layers),
        embedding=width,
        vocabulary=vocabulary,
        context=_size(row, "c"),
        experts=experts,
        experts_used=used,
        expert_feed_forward=expert_hidden,
        shared_experts=1 if mla else 0,
        leading_dense=_size(row, "LEAD"),
        tied=tied,
        mla=mla,
        ssm=ssm,
        tensors=tuple(files.tensors),
    )
    placement = Placement(
        layers=labels,
        output=output,
        tensors=tuple(files.labels),
        experts_on_host=tuple(range(min(count, _size(row, "ncmoe")))),
        overridden=_size(row, "ncmoe") > 0,
    )
    return shape, placement


def options(row: Row, kind: str) -> LlamaOptions:
    """The settings of a row on one GPU of this kind."""
    return LlamaOptions(
        ctx_size=_size(row, "c"),
        batch_size=_size(row, "b"),
        ubatch_size=_size(row, "ub"),
        parallel=_size(row, "np"),
        kv_unified=row["kvu"] == "1",
        flash_attn="on" if row["fa"] == "1" else "off",
        cache_type_k=row["ctk"],
        cache_type_v=row["ctv"],
        n_gpu_layers=_size(row, "ngl"),
        op_offload=row["opo"] == "1",
        kv_offload=row["kvo"] == "1",
        n_cpu_moe=_size(row, "ncmoe"),
        swa_full=row["swafull"] == "1",
        devices=(Device(label="gpu0", kind=kind),),  # type: ignore[arg-type]
    )


def errors(row: Row, kind: str, columns: str) -> tuple[float, float]:
    """Relative errors of the prediction on the device and on the host; the farther end of a range counts."""
    shape, placement = shape_and_placement(row)
    found = {"gpu": 0.0, "host": 0.0}
    # The table's CUDA has flash attention for q5_1, as a build has that was asked for it.
    era = Era(cuda_all_quants=row["ctk"] == row["ctv"] == "q5_1")
    for entry in compute_buffers(shape, options(row, kind), placement, era, dry_run=True):
        if entry.detail == "output buffer":
            continue
        side = "host" if entry.device == "host" else "gpu"
        truth = float(row[f"{columns}_{side}"]) * MIB
        ends = entry.bytes, entry.bytes if entry.at_most is None else entry.at_most
        # Printed to 0.01 MiB, which is all that a tiny buffer has.
        found[side] = max(0.0, *(abs(end - truth) - 0.005 * MIB for end in ends)) / (truth or 1.0)
    return found["gpu"], found["host"]
