"""What llama.cpp knows about each architecture beyond the keys in the file: windows, recurrent blocks, caches.

One row per architecture that differs from a plain decoder. Facts are from llama.cpp's sources of October 2026:
``src/llama-arch.cpp`` (names, recurrent and hybrid ones), ``src/models/*.cpp`` (``load_arch_hparams``: windows and
their periods, which are often not in the file; ``load_arch_tensors``: blocks that are not loaded) and
``llama-model.cpp:create_memory`` (which blocks get which cache).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

import msgspec


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Which blocks see a sliding window, and how far.

    :ivar period: of ``period`` blocks, one sees everything: the last, or the first where ``dense_first``.
    :ivar pattern: what ``attention.sliding_window_pattern`` may be: an integer that replaces the period (an array is
        ignored), an array with a flag for each block, or either.
    :ivar needs_key: without ``attention.sliding_window`` there are no windows. :ivar zero_disables: a window of 0 in
        the file means none. :ivar default: tokens where the key is missing. :ivar fixed: tokens whatever the key says.
    :ivar blocks: only models of so many blocks have windows; 0: all. :ivar attention: every attention block has one.
    """

    kind: Literal["standard", "chunked", "symmetric"] = "standard"
    period: int = 0
    dense_first: bool = False
    pattern: Literal["period", "flags", "either"] = "period"
    needs_key: bool = False
    zero_disables: bool = False
    default: int = 0
    fixed: int = 0
    blocks: int = 0
    attention: bool = False


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of one architecture; the defaults are those of a plain decoder.

    :ivar recurrent: which blocks keep a recurrent state: all, those without KV heads, those with neither KV heads nor
        a feed-forward, all but every ``interval``-th, or all beside attention. :ivar state: the form of that state.
    :ivar indexer: which blocks have a sparse-attention indexer with a cache.
    :ivar cache: ``none``: runs without one (encoders and diffusion models); ``compressed``: DeepSeek-V4's.
    :ivar extra_cached: the main model's cache has room for extra prediction blocks (MTP) too.
    :ivar extra_loaded: whether tensors of those blocks are loaded: always, when speculation with them is asked for,
        or never. :ivar extra_alone: the cache of a prediction context holds those blocks only, not all.
    :ivar latent: reads the ``*_mla`` keys. :ivar kv_from_start: blocks that have a cache, the later ones reuse theirs;
        ``None``: all do; 0: all but the last ``attention.shared_kv_layers``.
    :ivar copies_output: the embedding table is copied as output matrix where the file has none.
    :ivar loops: its blocks run ``num_loops`` times, with a cache each time. :ivar router: has one more block, with a
        cache of one head. :ivar rollback: keeps more states per sequence for speculation that takes drafts back.
    :ivar draft: only ever a helper of another model.
    """

    window: Window | None = None
    recurrent: Literal["none", "all", "no-kv-heads", "no-kv-heads-no-ff", "interval", "both"] = "none"
    interval: int = 4
    state: Literal["ssm", "wkv", "shortconv", "kda", "lightning"] = "ssm"
    ssm: str = ""
    indexer: Literal["none", "all", "typed", "glm", "after-dense", "attention"] = "none"
    cache: Literal["plain", "none", "compressed"] = "plain"
    causal: bool = True
    extra_cached: bool = True
    extra_loaded: Literal["always", "asked", "never"] = "always"
    extra_alone: bool = False
    latent: bool = False
    kv_from_start: int | None = None
    copies_output: bool = True
    loops: bool = False
    router: bool = False
    rollback: bool = False
    draft: bool = False


PLAIN = Architecture()
_ENCODER = Architecture(cache="none", causal=False, copies_output=False)
_DIFFUSION = Architecture(cache="none", causal=False)
_RECURRENT = Architecture(recurrent="all")
_HEADLESS = Architecture(recurrent="no-kv-heads")
_DELTA = Architecture(
    recurrent="interval", ssm="gated-delta", extra_cached=False, extra_loaded="asked", extra_alone=True, rollback=True
)
_PERIOD_4 = Window(period=4)
_OPTIONAL_4 = Window(period=4, needs_key=True, zero_disables=True)

_SPECIAL: dict[str, Architecture] = {
    "afmoe": Architecture(window=_OPTIONAL_4),
    "arwkv7": Architecture(recurrent="all", state="wkv", ssm="rwkv"),
    "bailingmoe2": Architecture(extra_loaded="never"),
    "bailingmoe3": Architecture(
        recurrent="no-kv-heads",
        state="kda",
        ssm="kda",
        latent=True,
        extra_loaded="asked",
        extra_alone=True,
        rollback=True,
    ),
    "bert": _ENCODER,
    "bitnet": Architecture(copies_output=False),
    "cohere2": Architecture(window=_PERIOD_4),
    "cohere2moe": Architecture(window=Window(period=4, pattern="either", dense_first=True), extra_loaded="asked"),
    "deepseek2": Architecture(latent=True, extra_loaded="asked"),
    "deepseek32": Architecture(latent=True, indexer="all", extra_cached=False, extra_loaded="asked", extra_alone=True),
    "deepseek4": Architecture(
        window=Window(attention=True),
        cache="compressed",
        indexer="attention",
        extra_loaded="asked",
        extra_alone=True,
        rollback=True,
    ),
    "dflash": Architecture(window=Window(pattern="flags", needs_key=True, zero_disables=True), draft=True),
    "dots3note": Architecture(
        window=Window(pattern="flags"),
        latent=True,
        indexer="typed",
        extra_cached=False,
        extra_loaded="never",
        extra_alone=True,
    ),
    "dream": _DIFFUSION,
    "eagle3": Architecture(draft=True, copies_output=False),
    "eurobert": _ENCODER,
    "exaone-moe": Architecture(window=Window(period=4, default=128), extra_loaded="never"),
    "exaone4": Architecture(window=Window(period=4, default=4096, blocks=64), extra_loaded="never"),
    "falcon-h1": Architecture(recurrent="both", ssm="mamba2"),
    "gemma-embedding": Architecture(window=Window(period=6, kind="symmetric"), cache="none", causal=False),
    "gemma2": Architecture(window=Window(period=2, default=4096)),
    "gemma3": Architecture(window=Window(period=6, needs_key=True, zero_disables=True)),
    "gemma3n": Architecture(window=Window(period=5), kv_from_start=20),
    "gemma4": Architecture(window=Window(pattern="flags"), kv_from_start=0),
    "gemma4-assistant": Architecture(window=Window(pattern="flags"), draft=True),
    "glm-dsa": Architecture(latent=True, indexer="glm", extra_cached=False, extra_loaded="asked", extra_alone=True),
    "glm4": Architecture(extra_loaded="never"),
    "glm4moe": Architecture(extra_loaded="asked"),
    "gpt-oss": Architecture(window=Window(period=2)),
    "granite_swa": Architecture(window=Window(pattern="flags")),
    "granitehybrid": Architecture(recurrent="no-kv-heads", ssm="mamba2"),
    "graniteswitch": Architecture(router=True),
    "hy_v3": Architecture(extra_cached=False, extra_loaded="asked", extra_alone=True),
    "jamba": Architecture(recurrent="no-kv-heads", ssm="mamba"),
    "jina-bert-v2": _ENCODER,
    "jina-bert-v3": _ENCODER,
    "kimi-k3": Architecture(recurrent="no-kv-heads", state="kda", ssm="kda", latent=True),
    "kimi-linear": Architecture(recurrent="no-kv-heads", state="kda", ssm="kda", latent=True),
    "laguna": Architecture(window=Window(period=4, needs_key=True, zero_disables=True, dense_first=True)),
    "lfm2": Architecture(
        recurrent="no-kv-heads",
        state="shortconv",
        ssm="shortconv",
        window=Window(needs_key=True, zero_disables=True, attention=True),
        rollback=True,
    ),
    "lfm2moe": Architecture(recurrent="no-kv-heads", state="shortconv", ssm="shortconv", rollback=True),
    "llada": _DIFFUSION,
    "llada-moe": _DIFFUSION,
    "llama4": Architecture(window=Window(period=4, kind="chunked", fixed=8192, zero_disables=True)),
    "mamba": Architecture(recurrent="all", ssm="mamba"),
    "mamba2": Architecture(recurrent="all", ssm="mamba2"),
    "mellum": Architecture(window=Window(period=4, pattern="either", needs_key=True, zero_disables=True)),
    "mimo2": Architecture(window=Window(pattern="flags"), extra_cached=False, extra_loaded="asked", extra_alone=True),
    "minimax-01": Architecture(
        recurrent="interval", interval=8, state="lightning", ssm="lightning", extra_cached=False
    ),
    "minimax-m3": Architecture(indexer="after-dense"),
    "mistral4": Architecture(latent=True, extra_loaded="asked"),
    "modern-bert": Architecture(
        window=Window(period=3, dense_first=True, kind="symmetric", needs_key=True, zero_disables=True),
        cache="none",
        causal=False,
        copies_output=False,
    ),
    "muse-glimmer": Architecture(window=Window(period=4, pattern="either")),
    "nanbeige": Architecture(loops=True),
    "nemotron_h": Architecture(recurrent="no-kv-heads-no-ff", ssm="mamba2", rollback=True),
    "nemotron_h_moe": Architecture(
        recurrent="no-kv-heads-no-ff", ssm="mamba2", extra_loaded="asked", extra_alone=True, rollback=True
    ),
    "neo-bert": _ENCODER,
    "nomic-bert": _ENCODER,
    "nomic-bert-moe": _ENCODER,
    "olmo2": Architecture(window=_OPTIONAL_4),
    "plamo2": Architecture(recurrent="no-kv-heads", ssm="mamba2"),
    "plamo3": Architecture(window=Window(period=8, needs_key=True, zero_disables=True)),
    "qwen35": _DELTA,
    "qwen35moe": _DELTA,
    "qwen3next": Architecture(
        recurrent="interval", ssm="gated-delta", extra_cached=False, extra_loaded="asked", extra_alone=True
    ),
    "qwen4exp": Architecture(
        recurrent="interval", ssm="gated-delta", indexer="attention", extra_cached=False, rollback=True
    ),
    "rnd1": _DIFFUSION,
    "rwkv6": Architecture(recurrent="all", state="wkv", ssm="rwkv"),
    "rwkv6qwen2": Architecture(recurrent="all", state="wkv", ssm="rwkv"),
    "rwkv7": Architecture(recurrent="all", state="wkv", ssm="rwkv"),
    "smallthinker": Architecture(
        window=Window(period=4, fixed=4096, dense_first=True, needs_key=True, zero_disables=True)
    ),
    "step35": Architecture(
        window=Window(pattern="flags"),
        extra_cached=False,
        extra_loaded="asked",
        extra_alone=True,
        copies_output=False,
    ),
    "wavtokenizer-dec": _ENCODER,
}

_ORDINARY = (
    "llama deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder refact bloom stablelm qwen qwen2 qwen2moe qwen2vl "
    "qwen3 qwen3moe qwen3vl qwen3vlmoe phi2 phi3 phimoe plamo codeshell orion internlm2 minicpm minicpm3 gemma "
    "starcoder2 xverse command-r dbrx olmo olmoe openelm arctic deepseek deepseek2-ocr chatglm t5 t5encoder jais jais2 "
    "nemotron exaone granite granitemoe chameleon plm bailingmoe dots1 arcee ernie4_5 ernie4_5-moe hunyuan-moe "
    "hunyuan-dense hunyuan_vl smollm3 seed_oss grovemoe apertus minimax-m2 cogvlm pangu-embedded mistral3 paddleocr "
    "llama-embed maincoder talkie qwen3tts pockettts"
)

ARCHITECTURES = MappingProxyType({**dict.fromkeys(_ORDINARY.split(), PLAIN), **_SPECIAL})
