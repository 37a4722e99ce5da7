"""The table that comes with specserve: read as it was written, and refused when it is not one for the target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from specserve_drafts import eagle
from specserve_drafts.successors import SUCCESSORS_FILE, pair_of, read_successors, shipped_successors
from torch import Tensor

from specserve.errors import WeightsError
from specserve.models.decoder import Decoder

SINGLES = torch.tensor([[1, 2], [2, -1], [-1, -1]], dtype=torch.int32)
PAIRS = torch.tensor([[0, 1], [2, 2]], dtype=torch.int32)
AFTER_PAIRS = torch.tensor([[2, 0], [1, -1]], dtype=torch.int32)


def narrow(table: Tensor) -> Tensor:
    return torch.where(table < 0, 0xFFFF, table).to(torch.uint16)


@pytest.mark.parametrize("stored", [lambda table: table, narrow])
def test_a_table_is_read_as_it_was_written(tmp_path: Path, stored) -> None:
    tensors = {"successors": stored(SINGLES), "pairs": stored(PAIRS), "pair_successors": stored(AFTER_PAIRS)}
    save_file(tensors, tmp_path / "t")
    table = read_successors(tmp_path / "t", 3)
    assert [list(table.after(token_id)) for token_id in range(5)] == [[1, 2], [2], [], [], []]
    found = {(a, b): list(table.after_pair(pair_of(a, b))) for a in range(-1, 3) for b in range(3)}
    assert {pair: ids for pair, ids in found.items() if ids} == {(0, 1): [2, 0], (2, 2): [1]}


def test_pairs_may_be_missing(tmp_path: Path) -> None:
    save_file({"successors": SINGLES}, tmp_path / "t")
    table = read_successors(tmp_path / "t", 3)
    assert table.after(0) == [1, 2] and table.after_pair(pair_of(0, 1)) == ()


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"other": SINGLES}, "holds no tensor 'successors'; it has other"),
        ({"successors": torch.zeros(4, 2, dtype=torch.int32)}, r"successors is \(4, 2\) of ids up to 0; wanted: \(3, "),
        ({"successors": torch.full((3, 2), 3, dtype=torch.int32)}, "ids up to 3; wanted: .* of ids below 3"),
        ({"successors": torch.zeros(3, dtype=torch.int32)}, r"successors is \(3,\)"),
        ({"successors": SINGLES, "pairs": PAIRS}, "holds no tensor 'pair_successors'"),
        ({"successors": SINGLES, "pairs": SINGLES[:, :1], "pair_successors": SINGLES}, r"pairs is \(3, 1\)"),
        ({"successors": SINGLES, "pairs": PAIRS, "pair_successors": SINGLES}, r"pair_successors is \(3, 2\)"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, tensors: Mapping[str, Tensor], said: str) -> None:
    save_file({name: table.clone().contiguous() for name, table in tensors.items()}, tmp_path / "t")
    with pytest.raises(WeightsError, match=said):
        read_successors(tmp_path / "t", 3)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"nothing")
    with pytest.raises(WeightsError, match="cannot be read"):
        read_successors(tmp_path / "t", 3)


def test_it_lies_beside_the_head_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Target:
        fingerprint = "f" * 8

        class config:
            vocab_size = 3

    target: Decoder = Target()  # type: ignore[assignment]
    monkeypatch.setattr(eagle, "SHIPPED_HEADS", tmp_path)
    assert shipped_successors(target) is None
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "provenance.json").write_text('{"target_fingerprint": "ffffffff"}')
    assert shipped_successors(target) is None, "a head may come without one"
    save_file({"successors": SINGLES}, tmp_path / "head" / SUCCESSORS_FILE)
    table = shipped_successors(target)
    assert table is not None and table.after(0) == [1, 2]
    target.fingerprint = "another"  # type: ignore[misc]
    assert shipped_successors(target) is None
