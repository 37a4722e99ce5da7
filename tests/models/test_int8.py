"""int8 models: they load on every backend, agree with their bf16 selves, and read our own prose about as well."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import specserve_kernels
import torch
from paged import Paged
from specserve_kernels import AttentionRows
from tiny import TinyLlama

from specserve.models.decoder import Decoder
from specserve.models.weights import load_decoder
from specserve.tokenizer import Tokenizer

TEXT = """
The ferry to the island left twice a day in summer and once, if the weather allowed it, in winter. Anna had taken it so
often that she no longer watched the coast grow small behind the boat. She sat below, next to the engine room, where it
was warm and smelled of coffee and diesel, and read the letters that people had asked her to carry. They were not
sealed. Nobody on the island sealed a letter, because that would have meant that there was something in it worth hiding,
and then everybody would have wanted to know what it was.

Her job was to look after the lighthouse, or rather after the machine that looked after the lighthouse. Forty years ago
three men had lived there with their families. They trimmed the lamp, wound the clockwork, wrote down the wind every
four hours and shot at gulls. Then a cable was laid along the bottom of the sea, and the three families moved away, one
after the other, and took their goats with them. What remained was a white tower with a grey box at its foot. The box
measured the light of the sky. When it became too dark the box switched on the lamp, and when it became bright again it
switched the lamp off. Once a month Anna opened the box, cleaned its small round window and closed it again.

It would have been possible to make a box with a window that cleaned itself. She had once explained to the harbour
office how this could be done, and had drawn a picture of it, with a little wiper and a bottle of soapy water. The man
behind the desk had looked at the picture for a long time. He said that it was a very good idea. He also said that as
long as there was no such wiper, the office had to send somebody to the island every month, and that it would be a pity
if nobody went there any more. Then he put the picture in a drawer, and both of them were content.

On this morning there was fog. The captain steered by the clock and by the sound of the bell at the end of the pier,
and a boy stood at the bow and shouted whenever he saw a fishing buoy. It took them three hours instead of one. When
Anna climbed up to the tower the lamp was burning, although it was almost noon, because for the box it was still night.
She sat down on the step, unpacked her bread and cheese, and waited. There is a particular kind of silence that belongs
to fog: you can hear the drops fall from the railing, and your own coat, and far away a door, but you cannot say where
any of it comes from. After an hour the wind turned. First the sea came back, then the rocks, then the roofs of the
village with their smoke standing straight up. Behind her, inside the tower, something clicked, and the lamp went out.

She cleaned the window anyway. Then she did what she did every month after the work was done: she walked once around
the island, which took two hours, and counted things. She counted the seals on the northern beach, the boats that were
being painted, the chimneys with smoke and the chimneys without. She wrote the numbers in a notebook that had belonged
to one of the three keepers, below his columns of wind. Nobody had asked her to do this, and she did not know what the
numbers were good for. But she had noticed that the years looked different when they were written down. There were
fewer chimneys with smoke than ten years ago, and more seals. In the spring of a year that she remembered as a very
bad one, because her mother had died in it, there had been more boats being painted than ever before or since.

In the evening, on the way back, the captain asked her what was new. She thought about it, and said that the light was
still working. He nodded, as if this were an answer that could have turned out otherwise, and poured her some coffee.
"""


@pytest.mark.parametrize("backend", ["reference", "torch", "native"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tiny_model_is_close_to_itself(tiny_llama: TinyLlama, backend: str, tied: bool) -> None:
    folder = tiny_llama(tied=tied, hidden=64)
    try:
        ops = specserve_kernels.load(backend)
    except specserve_kernels.BackendUnavailable as error:
        pytest.skip(str(error))
    ids = [7, 90, 201, 13, 13, 250, 5]
    plain = Paged(load_decoder(folder, ops, "bfloat16")).chunk(ids, 0)
    decoder = load_decoder(folder, ops, "bfloat16", quantization="int8")
    assert decoder.dtype is torch.bfloat16
    assert decoder.weights.embed.raw.dtype is decoder.weights.layers[0].down.raw.dtype is torch.int8
    got = Paged(decoder).chunk(ids, 0)
    assert got.isfinite().all()
    assert not torch.equal(got, plain)
    assert float((got - plain).norm() / plain.norm()) < 0.05


def test_unknown_quantization(tiny_llama: TinyLlama) -> None:
    with pytest.raises(ValueError, match="quantization is 'int3'; allowed: int8"):
        load_decoder(tiny_llama(), specserve_kernels.load("torch"), quantization="int3")


def nll(decoder: Decoder, ids: list[int]) -> float:
    """Mean negative log-likelihood of a text's tokens after its first, in one chunk."""
    count, page_size = len(ids), 16
    pages = -(-count // page_size)
    rows = AttentionRows(
        sequence=torch.zeros(count, dtype=torch.int32),
        prefix_len=torch.arange(1, count + 1, dtype=torch.int32),
        tail_slots=torch.zeros(count, 0, dtype=torch.int32),
        tail_len=torch.zeros(count, dtype=torch.int32),
        page_table=torch.arange(pages, dtype=torch.int32)[None],
    )
    kv = torch.zeros(decoder.config.kv_shape(pages, page_size), dtype=decoder.dtype)
    where = torch.arange(count)
    logits = decoder.logits(decoder.forward(torch.tensor(ids), where, where, rows, kv)[:-1])
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])))


@pytest.mark.demo
def test_perplexity_within_two_percent(demo_folder: Path) -> None:
    ops = specserve_kernels.load("auto")
    ids = Tokenizer(demo_folder).encode(TEXT.strip())
    assert len(ids) > 600
    bf16 = nll(load_decoder(demo_folder, ops, "bfloat16"), ids)
    int8 = nll(load_decoder(demo_folder, ops, "bfloat16", quantization="int8"), ids)
    assert math.exp(int8 - bf16) < 1.02
