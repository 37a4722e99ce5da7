"""Encoding and templates as transformers does them, and streamed text that never tears a character."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TinyLlama
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from specserve.errors import InvalidRequest, ModelError, ModelNotFound
from specserve.tokenizer import Tokenizer

MIXED = "Hello world\n\n  12345 été 🙂👩‍👩‍👧 日本語 \t<|im_end|> and the rest\r\n…"
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello 🙂"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "the world?"},
]


@pytest.fixture(scope="module")
def byte_level(tiny_llama: TinyLlama) -> Tokenizer:
    return Tokenizer(tiny_llama())


def write_sentencepiece(folder: Path) -> Path:
    """A byte-fallback vocabulary with the decoder of Llama 2: ▁ is a space, a run of bytes is all or nothing."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = ["▁", "▁▁", "▁Hello", "▁world", "a", "b", "▁a", "é", "日", "🙂", "<0x", "�", "!", "\n", "▁b▁"]
    vocab = {token: i for i, token in enumerate([*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    inner.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_sentencepiece(tmp_path_factory.mktemp("spm") / "model"))


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The same vocabulary under the newer Metaspace decoder."""
    folder = write_sentencepiece(tmp_path_factory.mktemp("meta") / "model")
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    inner.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def stream(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = tokenizer.incremental()
    return "".join([decoder.push(token_id) for token_id in ids] + [decoder.flush()])


# Ids beyond the vocabulary are in: a model's embedding may be padded.
IDS = st.lists(st.integers(0, 320), max_size=40)
BYTES = st.lists(st.sampled_from([*range(3, 12), 0, 2, 229, 233, 250, 243, 162, 133, 155]), max_size=30)


@given(ids=IDS | BYTES)
@settings(max_examples=400, deadline=None)
def test_byte_level_pieces_concatenate_to_the_whole(byte_level: Tokenizer, ids: list[int]) -> None:
    assert stream(byte_level, ids) == byte_level.decode(ids)


@given(data=st.binary(max_size=24), cut=st.integers(0, 24))
@settings(max_examples=400, deadline=None)
def test_any_bytes_stream_as_they_decode(byte_level: Tokenizer, data: bytes, cut: int) -> None:
    ids = [byte_id(byte_level, byte) for byte in data]
    ids.insert(min(cut, len(ids)), 2)  # a skipped special token does not end a character
    assert byte_level.decode(ids) == data.decode("utf-8", errors="replace")
    assert stream(byte_level, ids) == byte_level.decode(ids)


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    return next(i for i in range(3, 259) if tokenizer.piece_bytes(i) == bytes([byte]))


SPM_IDS = st.lists(
    st.integers(0, 280) | st.sampled_from([3 + b for b in "é日🙂".encode()]) | st.integers(259, 276), max_size=40
)


@given(ids=SPM_IDS)
@settings(max_examples=600, deadline=None)
def test_sentencepiece_pieces_concatenate_to_the_whole(sentencepiece: Tokenizer, ids: list[int]) -> None:
    assert stream(sentencepiece, ids) == sentencepiece.decode(ids)


@given(ids=SPM_IDS)
@settings(max_examples=300, deadline=None)
def test_metaspace_pieces_concatenate_to_the_whole(metaspace: Tokenizer, ids: list[int]) -> None:
    assert stream(metaspace, ids) == metaspace.decode(ids)


@given(text=st.text(max_size=20))
@settings(max_examples=200, deadline=None)
def test_text_survives_the_round_trip_and_no_half_character_is_pushed(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    decoder = byte_level.incremental()
    pushed = [decoder.push(token_id) for token_id in ids]
    assert "".join(pushed) == byte_level.decode(ids)
    assert decoder.flush() == ""


def test_emoji_over_four_tokens_comes_in_one_piece(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    decoder = byte_level.incremental()
    ids = byte_level.encode("🙂")
    assert len(ids) == 4
    assert [decoder.push(token_id) for token_id in ids] == ["", "", "", "🙂"]
    decoder = sentencepiece.incremental()
    run = [3 + byte for byte in "🙂".encode()]
    assert [decoder.push(token_id) for token_id in [*run, 263]] == ["", "", "", "", "🙂a"]


def test_a_wrong_byte_spoils_its_whole_run_only_in_byte_fallback(sentencepiece: Tokenizer) -> None:
    run = [3 + byte for byte in "é".encode()] + [3 + 0xFF]
    assert stream(sentencepiece, run) == sentencepiece.decode(run) == "���"


def test_flush_gives_what_is_incomplete(byte_level: Tokenizer) -> None:
    decoder = byte_level.incremental()
    assert [decoder.push(token_id) for token_id in byte_level.encode("a🙂")[:3]] == ["a", "", ""]
    assert decoder.flush() == "�"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_copies_are_independent(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = [token_id for token_id in range(200, 270) if tokenizer.piece(token_id)]
    for cut in range(len(ids)):
        decoder = tokenizer.incremental()
        before = "".join(decoder.push(token_id) for token_id in ids[:cut])
        twin = decoder.copy()
        assert twin.push(tokenizer.encode("a")[-1]) is not None
        twin.flush()
        after = "".join([decoder.push(token_id) for token_id in ids[cut:]] + [decoder.flush()])
        assert before + after == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_cost_does_not_grow_with_length(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = [263, 264, 265] * 10_000
    started = time.perf_counter()
    stream(tokenizer, ids)
    assert time.perf_counter() - started < 5.0  # 30,000 tokens; decoding everything each time takes minutes


@pytest.mark.filterwarnings("ignore")
def test_equal_to_transformers(byte_level: Tokenizer, tiny_llama: TinyLlama) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_llama())
    assert byte_level.encode(MIXED) == theirs(MIXED)["input_ids"]
    assert byte_level.decode(byte_level.encode(MIXED)) == theirs.decode(
        theirs(MIXED)["input_ids"], skip_special_tokens=True
    )
    rendered = theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert byte_level.encode_chat(CHAT) == rendered
    assert byte_level.vocab_size == len(theirs)


def test_eos_is_the_union_of_config_generation_config_and_template(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    assert Tokenizer(tiny_llama()).eos_token_ids == (2, 0)
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama(), folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    (folder / "generation_config.json").unlink()
    assert Tokenizer(folder).eos_token_ids == (0, 2)
    set_template(folder, None)
    assert Tokenizer(folder).eos_token_ids == (0,)
    (folder / "config.json").write_text("{}")
    assert Tokenizer(folder).eos_token_ids == ()


WRONG_EOS: dict[str, tuple[Any, str]] = {
    "text": ("2", "eos_token_id is '2'; allowed: whole numbers from 0 to {last}, one or a list"),
    "texts": ([2, "0"], r"eos_token_id is \[2, '0'\]; allowed"),
    "bool": (True, "eos_token_id is True; allowed"),
    "fraction": (2.0, "eos_token_id is 2.0; allowed"),
    "negative": (-1, "eos_token_id is -1; allowed"),
    "outside": ([0, 10**6], r"eos_token_id is \[0, 1000000\]; allowed: whole numbers from 0 to {last}"),
    "enormous": (10**400, r"eos_token_id is 1000.{{0,80}}; allowed"),
    "object": ({"id": 2}, "eos_token_id is {{'id': 2}}; allowed"),
    "nested": ([[2]], r"eos_token_id is \[\[2\]\]; allowed"),
}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("case", list(WRONG_EOS))
def test_wrong_eos_ids_are_refused_by_file(folder: Path, file: str, case: str) -> None:
    value, message = WRONG_EOS[case]
    raw = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**raw, "eos_token_id": value}))
    last = json.loads((folder / "config.json").read_text())["vocab_size"] - 1
    with pytest.raises(ModelError, match=file.replace(".", r"\.") + ": " + message.format(last=last)):
        Tokenizer(folder)


def test_eos_ids_are_checked_against_the_models_vocabulary(folder: Path) -> None:
    size = Tokenizer(folder).vocab_size
    config = json.loads((folder / "config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": size + 5}))
    with pytest.raises(ModelError, match=f"from 0 to {size - 1}"):
        Tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": size + 6}))  # padded, as many models are
    assert Tokenizer(folder).eos_token_ids == (2, size + 5)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=rf"generation_config\.json: eos_token_id is {size + 5}; .* to {size - 1}"):
        Tokenizer(folder)
    for wrong in ("300", True, 0, -1, 2.5, float("inf")):
        (folder / "config.json").write_text(json.dumps({**config, "vocab_size": wrong}))
        with pytest.raises(ModelError, match=r"config\.json: vocab_size is .*; it must be a whole number above 0"):
            Tokenizer(folder)


def test_bad_words_of_text_and_of_whitespace(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    def pieces(tokenizer: Tokenizer, *words: str) -> list[list[str | None]]:
        return [[tokenizer.piece(token_id) for token_id in ids] for ids in tokenizer.bad_word_ids(words)]

    assert pieces(byte_level, "the", " the") == [["the"], ["Ġthe"]]
    assert pieces(byte_level, "\n", " ", "\n\n") == [["Ċ"], ["Ġ"], ["Ċ", "Ċ"]]
    assert pieces(byte_level, "") == []
    assert pieces(sentencepiece, "\n") == [["▁", "\n"], ["\n"]]


def set_template(folder: Path, template: Any, **more: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template, **more}))


@pytest.fixture
def folder(tiny_llama: TinyLlama, tmp_path: Path) -> Path:
    shutil.copytree(tiny_llama(), tmp_path / "model")
    return tmp_path / "model"


def chat_text(folder: Path, messages: list[dict[str, str]] = CHAT) -> str:
    tokenizer = Tokenizer(folder)
    return "".join(tokenizer.token_text(token_id) for token_id in tokenizer.encode_chat(messages))


def test_template_features(folder: Path) -> None:
    hello = [{"role": "user", "content": "a"}]
    set_template(
        folder, [{"name": "tools", "template": "x"}, {"name": "default", "template": "{{ messages | tojson }}"}]
    )
    assert chat_text(folder, hello) == '[{"role": "user", "content": "a"}]'
    set_template(folder, "{{ bos_token }}{{ eos_token }}", bos_token={"content": "<|im_start|>"})
    assert chat_text(folder, hello) == "<|im_start|><|im_end|>"
    set_template(folder, "{% for m in messages %}\n  {% generation %}\n{{ m.content }}{% endgeneration %}{% endfor %}")
    assert chat_text(folder, hello) == "a"
    set_template(folder, "{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}{{ dict(a=3).a }}")
    assert chat_text(folder, hello) == "23"
    set_template(folder, "{{ strftime_now('%Y') }}")
    assert chat_text(folder, hello).isdigit()
    (folder / "chat_template.jinja").write_text("from the file")
    assert chat_text(folder, hello) == "from the file"


def test_templates_run_in_a_sandbox(folder: Path) -> None:
    for attack in ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"):
        set_template(folder, attack)
        with pytest.raises(InvalidRequest, match="chat template refuses them"):
            chat_text(folder)


BAD_MESSAGES: dict[str, tuple[Any, str]] = {
    "none": ([], "messages: is empty"),
    "no_role": ([{"content": "a"}], r"messages\[0\]\.role: is None; it must be text"),
    "content": ([CHAT[0], {"role": "user", "content": 5}], r"messages\[1\]\.content: is 5"),
    "surrogate": ([{"role": "user", "content": "\ud83d"}], "half a surrogate pair"),
}


@pytest.mark.parametrize("case", list(BAD_MESSAGES))
def test_bad_messages_name_their_field(byte_level: Tokenizer, case: str) -> None:
    messages, message = BAD_MESSAGES[case]
    with pytest.raises(InvalidRequest, match=message):
        byte_level.encode_chat(messages)


def test_templates_may_refuse_and_may_be_absent(folder: Path) -> None:
    set_template(folder, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="refuses them: roles must alternate"):
        Tokenizer(folder).encode_chat(CHAT)
    set_template(folder, None)
    with pytest.raises(InvalidRequest, match="has no chat template; send a plain prompt"):
        Tokenizer(folder).encode_chat(CHAT)
    set_template(folder, [{"name": ["default"], "template": "x"}, {"name": "other", "template": "y"}])
    with pytest.raises(InvalidRequest, match="has no chat template; send a plain prompt"):
        Tokenizer(folder).encode_chat(CHAT)
    set_template(folder, "{% if %}")
    with pytest.raises(ModelError, match="chat template is not valid"):
        Tokenizer(folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja is not UTF-8 text"):
        Tokenizer(folder)


def test_half_a_surrogate_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="prompt: has half a surrogate pair at character 1"):
        byte_level.encode("a\ud83d")


def test_nothing_is_put_in_front_of_a_prediction(folder: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    start = inner.token_to_id("<|im_start|>")
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    inner.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("a word") == [start, *tokenizer.encode_prediction("a word")]
    with pytest.raises(InvalidRequest, match=r"speculation\.prediction: has half a surrogate pair at character 1"):
        tokenizer.encode_prediction("a\ud83d")


def test_padding_and_truncation_of_the_file_are_off(folder: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    inner.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer(folder).encode("zzzzzz")) == 6
    assert len(Tokenizer(folder).encode("z")) == 1


def test_unusable_folders(folder: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    inner.pre_tokenizer = pre_tokenizers.ByteLevel()
    inner.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"the decoder mixes \['ByteLevel', 'Strip'\]"):
        Tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match=r"has no tokenizer\.json"):
        Tokenizer(folder)


def test_token_text(byte_level: Tokenizer) -> None:
    assert byte_level.token_text(2) == "<|im_end|>"
    assert byte_level.token_text(byte_level.encode(" the")[0]) == " the"
    assert byte_level.token_text(100_000) == ""
