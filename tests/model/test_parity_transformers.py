"""An independent judge: the structural model equals ``deepseek_v4`` of Transformers in float32 at every position.

Two random models that hold every kind of layer. The judge always runs one full prefill; ours runs full, in chunks, token by
token and mixed. Experts and index entries are discrete, so the tests first show that no choice hangs on rounding noise:
the gap between the last one chosen and the first one not chosen exceeds ``MARGIN`` everywhere (seeds are chosen so).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from hal_model.checkpoint import init_checkpoint
from hal_model.config import PRESETS, ModelConfig
from hal_model.model import Model
from hal_model.state import Limits, State

POSITIONS = 640  # 160 entries of ratio 4, far more than are chosen; 5 of ratio 128
WITHIN = 1e-5
#: brings the head to the deviation that the release's initializer_range (0.02) gives it. A power of two, so exact on both
#: sides. With a head of unit gain the largest difference was 8.1e-6 on one CPU and 1.0e-5 on another: float32 noise.
HEAD = 0.25
MARGIN = 2e-5  # choices agree as long as scores do to 1e-5

pytestmark = pytest.mark.usefixtures("unchecked")

Chunked = Callable[[Model, State, Sequence[int], Sequence[int]], Tensor]
Calls = dict[str, list[tuple[tuple[Any, ...], Any]]]

NARROW = replace(
    PRESETS["tiny"],
    num_hidden_layers=4,
    num_hash_layers=1,
    num_nextn_predict_layers=0,
    compress_ratios=(0, 4, 128, 4),
    draft_ratios=(),
)
#: other widths, compressed layers first, a clamp that bites, another rotation
OTHER = replace(
    NARROW,
    vocab_size=300,
    hidden_size=128,
    num_hash_layers=2,
    num_attention_heads=4,
    head_dim=192,
    o_groups=2,
    o_lora_rank=64,
    n_routed_experts=6,
    num_experts_per_tok=3,
    routed_scaling_factor=2.5,
    swiglu_limit=0.75,
    sliding_window=40,
    index_n_heads=16,
    index_head_dim=64,
    index_topk=12,
    rope_theta=5000.0,
    compress_rope_theta=80000.0,
    rope_scaling=replace(NARROW.rope_scaling, factor=4.0, original_max_position_embeddings=128),
    compress_ratios=(128, 4, 0, 4),
)
CASES = {"narrow": (NARROW, 8), "other": (OTHER, 1)}


@dataclass(frozen=True)
class Case:
    """A model, its token ids, and the judge's logits [POSITIONS, V]."""

    model: Model
    ids: list[int]
    judge: Tensor


_RENAMES = (
    (".attn.", ".self_attn."),
    (".ffn.", ".mlp."),
    (".indexer.compressor.", ".compressor.indexer."),
    ("embed.weight", "embed_tokens.weight"),
    ("hc_head_", "hc_head.hc_"),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("hc_attn_", "attn_hc."),
    ("hc_ffn_", "ffn_hc."),
    ("attn_sink", "sinks"),
    (".indexer.weights_proj", ".compressor.indexer.scorer.weights_proj"),
    (".self_attn.indexer.wq_b", ".self_attn.compressor.indexer.q_b_proj"),
    ("compressor.norm", "compressor.kv_norm"),
    ("compressor.indexer.norm", "compressor.indexer.kv_norm"),
    ("ape", "position_bias"),
    ("wq_a", "q_a_proj"),
    ("wq_b", "q_b_proj"),
    ("wkv", "kv_proj"),
    ("wgate", "gate_proj"),
    ("wo_a", "o_a_proj"),
    ("wo_b", "o_b_proj"),
    ("q_norm", "q_a_norm"),
    ("gate.bias", "gate.e_score_correction_bias"),
    ("shared_experts.w1", "shared_experts.gate_proj"),
    ("shared_experts.w2", "shared_experts.down_proj"),
    ("shared_experts.w3", "shared_experts.up_proj"),
)


def judges_name(name: str) -> str:
    """An official name as Transformers spells it (spec §4.5)."""
    if name == "head.weight":
        return "lm_head.weight"
    for old, new in _RENAMES:
        name = name.replace(old, new)
    return f"model.{name}"


def judges_weights(folder: Path, experts: int) -> dict[str, Tensor]:
    """The checkpoint's tensors for the judge: renamed, experts stacked."""
    stored: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    out = {judges_name(n): t for n, t in stored.items() if ".experts." not in n}
    for prefix in {m[1] for n in stored if (m := re.match(r"(.*\.experts\.)", n))}:
        w1, w2, w3 = (
            torch.stack([stored[f"{prefix}{e}.{w}.weight"] for e in range(experts)]) for w in ("w1", "w2", "w3")
        )
        name = judges_name(prefix)
        out |= {f"{name}gate_up_proj": torch.cat((w1, w3), dim=1), f"{name}down_proj": w2}
    return out


def judge_of(c: ModelConfig, folder: Path) -> Callable[[Tensor], Any]:
    """The judge with the checkpoint's weights; a name that does not fit is an error."""
    own = c.to_dict()
    for field in ("architectures", "model_type", "topk_method", "expert_dtype"):
        own.pop(field, None)
    yarn = own.pop("rope_scaling")
    rope = {"rope_type": yarn.pop("type"), **yarn}
    own |= {"attn_implementation": "eager", "experts_implementation": "eager"}
    model: Any = DeepseekV4ForCausalLM(DeepseekV4Config(**own, rope_parameters=rope))
    model.load_state_dict(judges_weights(folder, c.n_routed_experts), strict=True)
    judge: Callable[[Tensor], Any] = model.float().train(False)
    return judge


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, open_model: Callable[..., Model]
) -> Case:
    config, seed = CASES[request.param]
    folder = tmp_path_factory.mktemp("parity") / request.param
    init_checkpoint(config, folder, seed=seed, experts="f32", dense="f32")
    ids = random.Random(seed).choices(range(config.vocab_size), k=POSITIONS)
    with torch.inference_mode():
        logits = judge_of(config, folder)(torch.tensor([ids])).logits[0]
        ours = open_model(folder, quantised_state=False)
        ours.weights.lm_head.mul_(HEAD)
    return Case(ours, ids, logits * HEAD)


@pytest.fixture
def state(case: Case, state_of: Callable[..., State]) -> State:
    return state_of(case.model, Limits(1, POSITIONS, POSITIONS))


def agree(case: Case, ours: Tensor) -> None:
    apart = (ours - case.judge[: ours.shape[0]]).abs().amax(-1)
    worst = int(apart.argmax())
    assert apart.max() <= WITHIN, f"logits differ by {apart.max():.2e} at position {worst}, allowed {WITHIN:.0e}"


def index_gap(arguments: tuple[Any, ...]) -> float:
    """Smallest distance between the k-th and the next visible index score over the queries of one call."""
    q, weights, keys, pages, _, visible, k, page = arguments
    j = torch.arange(int(visible.max()))
    held = keys[pages[0].long()[j // page] * page + j % page]
    scores = torch.stack([(F.relu(one @ held.T) * w[:, None]).sum(0) for one, w in zip(q, weights, strict=True)])
    best = scores.masked_fill(j >= visible[:, None], -torch.inf).sort(descending=True).values
    return float((best[:, k - 1] - best[:, k])[visible > k].min())


def gate_gap(arguments: tuple[Any, ...]) -> float:
    """Smallest distance between the last chosen and the first not chosen biased router score."""
    logits, bias, k, _ = arguments
    best = (F.softplus(logits).sqrt() + bias).sort(descending=True).values
    return float((best[:, k - 1] - best[:, k]).min())


def test_full_prefill_and_no_choice_hangs_on_noise(
    case: Case, state: State, chunked: Chunked, recorded: Callable[[], AbstractContextManager[Calls]]
) -> None:
    with recorded() as calls:
        agree(case, chunked(case.model, state, case.ids, ()))
    assert min(index_gap(a) for a, _ in calls["index_topk"]) > MARGIN
    assert min(gate_gap(a) for a, _ in calls["gate_topk"]) > MARGIN


@pytest.mark.parametrize(
    "cuts",
    [(1, 2, 3, 4, 5), (5, 10), (15, 16, 17), (17, 33), (127, 128, 129), (255, 256, 257), (129, 258, 387, 516), (639,)],
    ids=str,
)
def test_chunked_prefill(case: Case, state: State, chunked: Chunked, cuts: tuple[int, ...]) -> None:
    agree(case, chunked(case.model, state, case.ids, cuts))


@pytest.mark.parametrize("seed", range(2))
def test_chunked_prefill_at_random_cuts(case: Case, state: State, chunked: Chunked, seed: int) -> None:
    draw = random.Random(seed)
    agree(case, chunked(case.model, state, case.ids, sorted(draw.sample(range(1, POSITIONS), 6))))


def test_token_by_token(case: Case, state: State, chunked: Chunked) -> None:
    agree(case, chunked(case.model, state, case.ids[:165], range(1, 165)))


@pytest.mark.parametrize("prompt", [126, 509])
def test_prefill_then_decode_then_prefill(case: Case, state: State, chunked: Chunked, prompt: int) -> None:
    agree(case, chunked(case.model, state, case.ids, range(prompt, prompt + 12)))
