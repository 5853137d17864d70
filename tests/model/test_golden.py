"""The golden numbers of spec Appendix A: three modes of the tiny model, and what happens inside it.

Printed digits are right to half a unit (5e-6); the two programs round float32 sums in another order, which costs up to
1e-5 more (``PRINTED``). In modes B and C a value that lies within that noise of a rounding boundary of FP8 or FP4 falls
on the other side and moves logits by up to 2e-3 at later positions: that is the mode and not an error, it happens
between float32 and float64 of this very program. Measured against the published numbers of mode B: positions 0 and 16
agree to 2e-5 in both carriers; float64 agrees to 2e-5 at position 299 and in the draft block too; position 128 differs by
2e-3 in float64 and 6e-4 in float32. Those few are held to ``FLIPPED``. Inside the model one printed value is touched: entry
0 of layer 2 pools 128 tokens, some of them behind a flip in layer 1, and is off by 2.4e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hal_model.load import Wanted
from hal_model.model import Model, backbone, draft, head
from hal_model.state import Limits, State

PRINTED = 5e-6 + 1e-5
AVERAGED = 5e-6  # means over all positions
FLIPPED = 3e-3

Calls = dict[str, list[tuple[tuple[Any, ...], Any]]]
Recorder = Callable[[], AbstractContextManager[Calls]]


@dataclass(frozen=True)
class Run:
    """One prefill of the golden ids with everything that happened in it."""

    logits: Tensor
    streams: Tensor
    draft: Tensor
    calls: Calls

    def out(self, operator: str, nth: int = 0) -> Any:
        return self.calls[operator][nth][1]

    def args(self, operator: str, nth: int = 0) -> tuple[Any, ...]:
        return self.calls[operator][nth][0]


def run(model: Model, state: State, ids: list[int], recorded: Recorder) -> Run:
    """Prefill all of ``ids``, then the draft block on all but the last; outside the record, so that layers count 0 to 4."""
    step = state.prepare([(state.open(), ids)])
    with torch.inference_mode():
        with recorded() as calls:
            streams = backbone(model, state.caches, step)
            logits = head(model, streams)
        shorter = state.prepare([(state.open(), ids[:-1])])
        drafted = draft(model, state.caches, streams[:-1], torch.tensor(ids[1:]), shorter)
    return Run(logits, streams, drafted, calls)


@pytest.fixture(scope="module")
def a(structural: Model, state_of: Callable[..., State], golden_ids: list[int], recorded: Recorder) -> Run:
    """Mode A: float32, no rounding of state rows."""
    return run(structural, state_of(structural), golden_ids, recorded)


@pytest.fixture(scope="module")
def b(
    golden_checkpoint: Path,
    open_model: Callable[..., Model],
    state_of: Callable[..., State],
    golden_ids: list[int],
    recorded: Recorder,
) -> Run:
    """Mode B: float32, state rows rounded."""
    model = open_model(golden_checkpoint)
    return run(model, state_of(model), golden_ids, recorded)


@pytest.fixture(scope="module")
def b64(
    golden_checkpoint: Path,
    open_model: Callable[..., Model],
    state_of: Callable[..., State],
    golden_ids: list[int],
    recorded: Recorder,
) -> Run:
    """Mode B in float64."""
    model = open_model(golden_checkpoint, Wanted(torch.float64))
    return run(model, state_of(model), golden_ids, recorded)


def close(seen: Tensor, text: str, within: float = PRINTED) -> None:
    """``seen`` agrees with the numbers in ``text`` (commas, semicolons and slashes separate them)."""
    right = torch.tensor([float(n) for n in text.replace(";", ",").replace("/", ",").split(",")], dtype=torch.float64)
    worst = (seen.flatten().double() - right).abs().max().item()
    assert worst <= within, f"off by {worst:.2e}, allowed {within:.2e}: {seen.flatten().tolist()}, right is {text}"


def both(row: Tensor) -> Tensor:
    """What the appendix prints of a 128-wide row: dims 0 to 3 and 64 to 67."""
    return torch.cat((row[:4], row[64:68]))


# --- mode A, end to end (A.2)


def argmaxes(logits: Tensor, positions: Sequence[int]) -> list[int]:
    return logits[list(positions)].argmax(-1).tolist()


POSITIONS = (0, 3, 4, 15, 16, 127, 128, 255, 299)
ARGMAXES = [110, 459, 297, 177, 375, 333, 237, 4, 138]


def test_mode_a_predicts_the_published_tokens(a: Run) -> None:
    assert argmaxes(a.logits, POSITIONS) == ARGMAXES


@pytest.mark.parametrize(
    ("position", "right"),
    [
        (0, "-1.74857, 0.23663, 0.80971, -0.73794, 1.21605, 0.22071, 0.93292, -0.85183"),
        (16, "2.09477, -0.82918, 0.39855, -0.61331, -0.29641, -0.91350, -1.07537, 1.48233"),
        (128, "0.10088, -1.98309, 0.31414, 0.03040, -0.76489, -1.10711, -0.29567, -0.14613"),
        (299, "-0.18415, -1.26029, -0.16034, -1.34524, 0.40492, 0.41350, -1.10512, 1.62189"),
    ],
)
def test_mode_a_logits(a: Run, position: int, right: str) -> None:
    close(a.logits[position, :8], right)


def test_mode_a_mean_sizes_of_logits_and_streams(a: Run) -> None:
    close(a.logits.abs().mean(), "0.80437976", AVERAGED)
    sizes = torch.stack([a.out("decoder_layer", i).abs().mean() for i in range(5)])
    close(sizes, "0.90707, 1.27375, 1.51973, 1.67873, 1.84411", 5e-6 + AVERAGED)


def test_mode_a_streams_of_the_last_token_after_layer_0(a: Run) -> None:
    close(a.out("decoder_layer")[299, 0, :4], "0.23456, -1.28680, -0.43696, -0.78541")


def picks(r: Run, token: int) -> list[int]:
    """Entries that layer 1 chose for ``token``."""
    row = r.out("index_topk")[token]
    return sorted(row[row >= 0].tolist())


def test_mode_a_index_picks_of_layer_1(a: Run) -> None:
    assert picks(a, 299) == [14, 16, 30, 38, 45, 47, 49, 61]
    assert picks(a, 20) == [0, 1, 2, 3, 4]


def test_mode_a_routing_of_the_last_token_in_layer_3(a: Run) -> None:
    ids, weights = a.out("gate_topk", 1)  # layers 2, 3, 4 route by score
    assert ids[299].tolist() == [6, 4]
    close(weights[299], "0.7592446, 0.7407554", 1e-6)


def test_mode_a_draft_block(a: Run) -> None:
    close(a.draft[-1, :8], "0.47989, -0.48715, -0.27283, 0.47889, 0.88104, 0.93243, 0.70693, 0.27184")
    assert a.draft[-1].argmax() == 140
    close(a.draft.abs().mean(), "0.79812", 5e-6 + AVERAGED)


# --- modes A and B, inside (A.3); token 5 unless said otherwise


def test_mixing_of_the_first_site(a: Run) -> None:
    streams, fn = a.args("hc_mix")[:2]
    v = streams[5].flatten()
    mixes = (fn @ v) * torch.rsqrt(v.square().mean() + 1e-6)
    right = (
        "0.45509, 1.55527, 0.49358, -0.04013, 0.43183, 1.76072, -0.94740, 0.63040, 0.36071, -1.18031, -0.60377, 1.11249,"
        "0.79671, 0.10965, 0.00970, -0.13044, -0.25367, -0.64534, -1.16649, -0.17232, -1.25778, -0.38062, -1.27026, "
        "-0.10392"
    )
    close(mixes, right)
    _, post, comb = a.out("hc_mix")
    close(post[5], "1.07485, 1.64328, 0.55300, 1.19085")
    close(
        comb[5],
        "0.26695, 0.05585, 0.15132, 0.52588 / 0.43798, 0.27607, 0.23080, 0.05515 /"
        "0.21162, 0.27707, 0.29421, 0.21709 / 0.08346, 0.39101, 0.32366, 0.20188",
    )
    close(a.out("hc_pre")[5, :4], "0.28909, 0.30184, -1.41994, 0.10150")
    close(a.out("hc_enter")[0][5, :4], "0.23043, 0.24442, -1.08244, 0.08733")


def test_query_and_key_of_layer_0(a: Run) -> None:
    close(a.out("linear_dense", 0)[5, :4], "-0.61420, -0.47663, -2.30802, 0.39683")
    close(a.out("linear_dense", 1)[5, :4], "-0.76528, -2.08217, -0.60847, 1.26761")
    query = a.out("query_norm_rope")[5, 0]
    close(both(query), "-0.75055, -2.04209, -0.59676, 1.24321; -0.31136, 0.25140, 0.79289, -0.01489")
    row = a.args("write_rows")[2][5]
    close(both(row), "-1.15266, -2.39818, -0.06724, 0.40811; -0.60076, -1.41365, 1.68371, -1.53679")


@dataclass(frozen=True)
class Inside:
    """A printed intermediate: where it is in the run, and its value in modes A and B."""

    name: str
    of: Callable[[Run], Tensor]
    a: str
    b: str
    flips: float = 0.0  # allowed on top in mode B


def entry(nth: int, j: int) -> Callable[[Run], Tensor]:
    """Entry ``j`` of the ``nth`` compressor: layer 1 main, layer 1 index, layer 2, layer 3 main and index, layer 4."""
    return lambda r: both(r.out("compress_entries", nth)[j])


INSIDE = [
    Inside(
        "o of head 0 before inverse rotation",
        lambda r: both(r.out("sparse_attention")[5, 0]),
        "-0.22258, 0.13730, -0.29198, 0.46305; 0.15315, -0.14276, -0.34749, 0.08239",
        "-0.21848, 0.10882, -0.27673, 0.49340; 0.14532, -0.14648, -0.33209, 0.07528",
    ),
    Inside(
        "o of head 0 after inverse rotation",
        lambda r: r.out("rope", 2)[5, 0, 64:68],
        "0.18034, 0.10637, 0.23819, -0.26609",
        "0.18168, 0.09780, 0.22961, -0.25147",
    ),
    Inside(
        "attention output",
        lambda r: r.out("attention")[5, :4],
        "0.31005, -0.60716, -0.45484, 0.18354",
        "0.30769, -0.60555, -0.44323, 0.17254",
    ),
    Inside(
        "streams after the attention site",
        lambda r: r.out("hc_post")[5, [0, 3], :4],
        "0.46607, -0.51393, -1.14122, 0.24391 / 0.50204, -0.58436, -1.19399, 0.26520",
        "0.46354, -0.51221, -1.12875, 0.23209 / 0.49923, -0.58245, -1.18016, 0.25210",
    ),
    Inside(
        "router scores of layer 0",
        lambda r: F.softplus(r.args("gate_hash")[0][5], threshold=20.0).sqrt(),
        "0.91146, 1.01874, 0.65538, 1.07934, 0.44582, 0.77330, 0.73487, 0.84775",
        "0.91081, 1.01139, 0.65368, 1.07463, 0.44644, 0.77069, 0.73391, 0.84631",
    ),
    Inside(
        "hash weights of layer 0",
        lambda r: r.out("gate_hash")[1][5],
        "0.89241, 0.60759",
        "0.89129, 0.60871",
    ),
    Inside(
        "expert output of layer 0",
        lambda r: r.out("moe")[5, :4],
        "1.48928, -0.54527, -0.17388, 0.80619",
        "1.49936, -0.54456, -0.18479, 0.78828",
    ),
    Inside(
        "streams after layer 0",
        lambda r: r.out("decoder_layer")[5, [0, 3], :4],
        "1.01308, -0.63079, -1.13435, 0.53737 / 1.70566, -0.98851, -1.30354, 0.91559",
        "1.01324, -0.62890, -1.12840, 0.51928 / 1.69806, -0.98053, -1.29726, 0.88157",
    ),
    Inside(
        "layer 1 entry 0",
        entry(0, 0),
        "0.09124, -0.16520, -0.53360, -2.31177; 0.20773, -0.90055, 0.31503, -0.08475",
        "0.11719, -0.17188, -0.50000, -2.25000; 0.20719, -0.92290, 0.32627, -0.08602",
    ),
    Inside(
        "layer 1 entry 1",
        entry(0, 1),
        "-0.19327, -1.12178, 0.61021, 0.68801; -0.02329, 1.30782, 0.87638, -0.20315",
        "-0.18750, -1.12500, 0.62500, 0.68750; -0.00548, 1.27175, 0.88047, -0.20150",
    ),
    Inside(
        "layer 1 entry 74",
        entry(0, 74),
        "-0.01238, 1.33385, -0.47472, 1.74817; -1.74149, -2.60136, -1.08542, 0.32352",
        "0.00879, 1.37500, -0.46875, 1.75000; -1.75501, -2.60046, -1.09967, 0.36223",
    ),
    Inside(
        "layer 1 index key 0",
        entry(1, 0),
        "0.00940, -0.20476, -1.27600, -0.53318; 0.84596, -1.08966, 0.86735, 1.58942",
        "-0.75, 0.75, -1, -2; 0.75, 0, 0.25, 0.75",
    ),
    Inside(
        "layer 1 index key 1",
        entry(1, 1),
        "-0.11130, -0.70793, -0.53196, 0.11245; 2.30983, 0.39414, 2.27720, -0.60681",
        "1.5, -0.75, -1, 0.25; -1.5, 0.5, 0.5, -0.5",
    ),
    Inside(
        "layer 1 index key 74",
        entry(1, 74),
        "-0.58080, -0.14419, 1.32386, 1.15504; 1.14619, -0.43691, -0.72971, -0.78347",
        "0.5, 0.5, 0, 0.5; -0.5, 0, 2, 0",
    ),
    Inside(
        "index query of token 20, head 0",
        lambda r: r.args("index_topk")[0][20, 0, :4],
        "-1.55508, -1.47237, -1.45056, -1.07458",
        "-2, 0.75, -1.5, -0.75",
    ),
    Inside(
        "index weights of token 20",
        lambda r: r.args("index_topk")[1][20, :4],
        "0.01372, 0.00814, 0.01088, -0.02212",
        "0.01348, 0.00804, 0.01081, -0.02233",
    ),
    Inside(
        "index scores of token 20",
        lambda r: scores(r, 20),
        "0.63873, 0.16187, 0.32285, -0.18746, -0.28807",
        "0.54451, 0.17810, 0.38796, -0.12473, -0.39256",
    ),
    Inside(
        "8th and 9th best index score of token 299",
        lambda r: scores(r, 299).sort(descending=True).values[7:9],
        "1.13392, 1.12373",
        "1.12358, 1.06299",
    ),
    Inside(
        "layer 2 entry 0",
        entry(2, 0),
        "0.05662, 0.74434, 2.02501, 1.00048; 2.56721, 1.12485, -0.45029, -1.71056",
        "0.125, 0.6875, 2, 0.9375; 2.43524, 1.18552, -0.47731, -1.72036",
        flips=5e-5,
    ),
    Inside(
        "layer 2 entry 1",
        entry(2, 1),
        "1.38000, 1.22649, -0.62002, -1.07734; -1.89211, 0.14846, -1.04697, 1.12117",
        "1.5, 1.25, -0.5, -1; -1.99403, 0.11576, -0.94700, 1.12811",
    ),
]


def scores(r: Run, token: int) -> Tensor:
    """Index scores of the entries that ``token`` sees in layer 1, from its queries, weights and keys (spec §2.7)."""
    q, w = (r.args("index_topk")[i][token] for i in (0, 1))
    keys = r.out("compress_entries", 1)[: (token + 1) // 4]
    total: Tensor = (F.relu(keys @ q.T) * w).sum(-1)
    return total


@pytest.mark.parametrize("inside", INSIDE, ids=lambda i: i.name)
def test_inside_mode_a(a: Run, inside: Inside) -> None:
    close(inside.of(a), inside.a)


@pytest.mark.parametrize("inside", INSIDE, ids=lambda i: i.name)
def test_inside_mode_b(b: Run, inside: Inside) -> None:
    close(inside.of(b), inside.b, PRINTED + inside.flips)


def test_hash_experts_of_layer_0(a: Run) -> None:
    assert a.out("gate_hash")[0][5].tolist() == [3, 6]


# --- mode B, end to end (A.2)


@pytest.mark.parametrize("carrier", ["b", "b64"])
def test_mode_b_predicts_the_published_tokens(carrier: str, request: pytest.FixtureRequest) -> None:
    r = request.getfixturevalue(carrier)
    assert argmaxes(r.logits, POSITIONS) == ARGMAXES
    assert r.draft[-1].argmax() == 140
    assert picks(r, 299) == [14, 16, 28, 30, 45, 47, 49, 61]
    assert picks(r, 20) == [0, 1, 2, 3, 4]


B0 = "-1.76795, 0.22317, 0.83731, -0.69479, 1.17020, 0.23565, 0.88309, -0.84790"
B16 = "2.08393, -0.84227, 0.30782, -0.58543, -0.30156, -0.91055, -1.11042, 1.52426"
B128 = "-0.10734, -1.72710, 0.28045, -0.41597, -0.65516, -1.16068, -0.05984, -0.02332"
B299 = "-0.21124, -1.30006, -0.50096, -1.42247, 0.47590, 0.65199, -0.95824, 1.64778"
B_DRAFT = "0.43179, -0.57101, -0.12018, 0.59139, 1.01998, 0.82473, 0.65423, 0.14041"


def test_mode_b_logits_before_the_first_flip(b: Run, b64: Run) -> None:
    for r in (b, b64):
        close(r.logits[0, :8], B0)
        close(r.logits[16, :8], B16)


def test_mode_b_logits_where_one_carrier_has_no_flip(b64: Run) -> None:
    close(b64.logits[299, :8], B299, 3e-5)


def test_mode_b_logits_with_flips_stay_near(b: Run, b64: Run) -> None:
    for r in (b, b64):
        close(r.logits[128, :8], B128, FLIPPED)
        close(r.logits[299, :8], B299, FLIPPED)
        close(r.draft[-1, :8], B_DRAFT, FLIPPED)


def test_mode_b_mean_sizes(b: Run) -> None:
    close(b.logits.abs().mean(), "0.80551275", 5e-6)
    sizes = torch.stack([b.out("decoder_layer", i).abs().mean() for i in range(5)])
    close(sizes, "0.90634, 1.27286, 1.51938, 1.67912, 1.84634", 2e-5)
    close(b.draft.abs().mean(), "0.79804", 1e-4)


def test_mode_b_streams_of_the_last_token_after_layer_0(b: Run) -> None:
    close(b.out("decoder_layer")[299, 0, :4], "0.24110, -1.29424, -0.43300, -0.78505")


# --- mode C (A.4)


@pytest.fixture(scope="module")
def c(
    quantised_checkpoint: Path,
    open_model: Callable[..., Model],
    state_of: Callable[..., State],
    golden_ids: list[int],
    chunked: Callable[..., Tensor],
) -> Tensor:
    """Mode C: weights and activations quantised as released, 24 tokens.

    The carrier is float64: with float32 sums the order of addition, which differs between CPUs, flips single roundings.
    """
    model = open_model(quantised_checkpoint, Wanted(torch.float64))
    return chunked(model, state_of(model, Limits(1, 32, 32)), golden_ids[:24])


def test_mode_c_predicts_the_published_tokens(c: Tensor) -> None:
    assert argmaxes(c, (0, 3, 4, 15, 16, 23)) == [373, 206, 316, 253, 325, 18]


@pytest.mark.parametrize(
    ("position", "right"),
    [
        (0, "0.46609, -0.47062, -0.23420, 1.68525, 1.03198, 0.58273, 0.24989, -0.14212"),
        (16, "-0.53280, 1.26672, 0.30454, -0.81552, -0.51479, -0.15788, 0.37021, -0.08020"),
        (23, "-0.79504, 0.43160, -0.86531, 0.48096, 0.95862, 0.20147, 1.72635, -1.02638"),
    ],
)
def test_mode_c_logits(c: Tensor, position: int, right: str) -> None:
    close(c[position, :8], right)


def test_mode_c_mean_size(c: Tensor) -> None:
    close(c.abs().mean(), "0.79870725", AVERAGED)
