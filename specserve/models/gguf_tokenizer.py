"""A GGUF file's tokenizer as the files of a Hugging Face folder.

llama.cpp stores a byte-level BPE as tokens, merges, token types and the *name* of a pre-tokenizer, whose rules
live in its source. The names known here are written out as a `tokenizer.json`; an unknown one is refused, because
a wrong split gives plausible and wrong token ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from specserve.errors import ModelError

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")

Metadata = Callable[..., Any]
"""`get(key, default=None)` of a GGUF file's metadata."""

T = TypeVar("T", str, int)


def write_tokenizer(get: Metadata, folder: Path, max_len: int) -> dict[str, Any]:
    """Write tokenizer.json and tokenizer_config.json; returns the `bos_token_id`, `eos_token_id` … for config.json.

    `eos_token_id` is a list: the file's end of text, and its end of turn where it names one.

    Raises:
        ModelError: the tokenizer is no byte-level BPE, its pre-tokenizer is unknown, or its parts do not fit.
    """
    tokens = _list(get, "tokenizer.ggml.tokens", str)
    token_ids = _token_ids(get, len(tokens))
    _build(get, tokens, token_ids).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_len,
    }
    eos = token_ids.get("eos_token_id", [])
    named = {
        **token_ids,
        "eos_token_id": eos[0] if eos else None,
        "unk_token_id": _token_id(get, "unknown", len(tokens)),
    }
    for name in ("bos", "eos", "pad", "unk"):
        token_id = named.get(f"{name}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    template = get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"GGUF metadata: tokenizer.chat_template is {template!r:.80}; it must be text")
    if template:
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return token_ids


def _list(get: Metadata, key: str, kind: type[T]) -> list[T]:
    """A metadata array of `kind`; [] if it is absent."""
    value = get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise ModelError(f"GGUF metadata: {key} is {value!r:.80}; it must be an array of {kind.__name__}")
    for index, item in enumerate(value):
        if type(item) is not kind:
            raise ModelError(f"GGUF metadata: {key}[{index}] is {item!r:.80}; it must be {kind.__name__}")
    return value


def _token_id(get: Metadata, name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = get(key)
    if value is not None and (type(value) is not int or not 0 <= value < num_tokens):
        raise ModelError(
            f"GGUF metadata: {key} is {value!r:.80}; the vocabulary has {num_tokens} tokens, so it must be a whole"
            f" number from 0 to {num_tokens - 1}"
        )
    return value


def _token_ids(get: Metadata, num_tokens: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for target, name in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        token_id = _token_id(get, name, num_tokens)
        if token_id is not None:
            found[target] = token_id
    ends = [_token_id(get, name, num_tokens) for name in ("eos", "eot")]
    if ends != [None, None]:
        found["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    return found


def _build(get: Metadata, tokens: list[str], token_ids: dict[str, Any]) -> Tokenizer:
    kind, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ModelError(f"GGUF metadata: tokenizer.ggml.model is {kind!r:.80}; supported: 'gpt2' (byte-level BPE)")
    splitter = _pre_tokenizer(pre)
    merges = [merge.partition(" ")[::2] for merge in _list(get, "tokenizer.ggml.merges", str)]
    vocab = {token: index for index, token in enumerate(tokens)}
    if not tokens or len(vocab) != len(tokens):
        raise ModelError(f"GGUF metadata: {len(tokens)} tokens, {len(vocab)} of them distinct; all must be distinct")
    llama3 = pre in LLAMA3_NAMES
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=llama3))
    except Exception as error:  # the library raises bare exceptions
        raise ModelError(f"GGUF metadata: tokens and merges do not fit together: {error}") from None
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, tokens, _list(get, "tokenizer.ggml.token_type", int))
    add_bos = get("tokenizer.ggml.add_bos_token", llama3)
    if not isinstance(add_bos, bool):
        raise ModelError(f"GGUF metadata: tokenizer.ggml.add_bos_token is {add_bos!r:.80}; it must be a bool")
    if add_bos and "bos_token_id" in token_ids:
        tokenizer.post_processor = _bos_in_front(tokens[token_ids["bos_token_id"]], token_ids["bos_token_id"])
    return tokenizer


def _bos_in_front(bos: str, bos_id: int) -> Any:
    try:
        return processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    except Exception as error:  # the library raises bare exceptions
        raise ModelError(f"GGUF metadata: token {bos_id}, {bos!r:.80}, cannot begin a text: {error}") from None


def _pre_tokenizer(name: str | None) -> Any:
    """The splits that llama.cpp's `tokenizer.ggml.pre` names stand for."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match name:
        case "gpt-2":
            return byte_level
        case "smollm":
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        case _ if name in LLAMA3_NAMES:
            split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated")
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        case _:
            raise ModelError(
                f"GGUF metadata: tokenizer.ggml.pre is {name!r:.80}; supported: 'smollm', 'gpt-2', 'llama-bpe'"
            )


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control and unknown tokens are special (skipped in text); user-defined ones are only never split."""
    if types and len(types) != len(tokens):
        raise ModelError(f"GGUF metadata: {len(tokens)} tokens but {len(types)} token types")
    typed = list(zip(tokens, types, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in typed if kind in (CONTROL, UNKNOWN)]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token, kind in typed if kind == USER_DEFINED]
    )
