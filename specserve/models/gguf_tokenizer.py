"""A GGUF file's tokenizer as the files of a Hugging Face folder.

llama.cpp stores a byte-level BPE as tokens, merges, token types and the *name* of a pre-tokenizer, whose rules
live in its source. The names known here are written out as a `tokenizer.json`; an unknown one is refused, because
a wrong split gives plausible and wrong token ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def write_tokenizer(get: Metadata, folder: Path, max_len: int) -> dict[str, Any]:
    """Write tokenizer.json and tokenizer_config.json; returns the `bos_token_id`, `eos_token_id` … for config.json.

    `eos_token_id` is a list: the file's end of text, and its end of turn where it names one.

    Raises:
        ModelError: the tokenizer is no byte-level BPE, its pre-tokenizer is unknown, or its parts do not fit.
    """
    tokens = get("tokenizer.ggml.tokens") or []
    token_ids = _token_ids(get, len(tokens))
    _build(get, tokens, token_ids).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_len,
    }
    eos = token_ids.get("eos_token_id", [])
    named = {**token_ids, "eos_token_id": eos[0] if eos else None, "unk_token_id": get(_key("unknown"))}
    for name in ("bos", "eos", "pad", "unk"):
        token_id = named.get(f"{name}_token_id")
        if token_id is not None and token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    template = get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return token_ids


def _key(name: str) -> str:
    return f"tokenizer.ggml.{name}_token_id"


def _token_ids(get: Metadata, num_tokens: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for target, name in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if get(_key(name)) is not None:
            found[target] = int(get(_key(name)))
    ends = [int(get(_key(name))) for name in ("eos", "eot") if get(_key(name)) is not None]
    if ends:
        found["eos_token_id"] = list(dict.fromkeys(ends))
    for name, value in found.items():
        for token_id in value if isinstance(value, list) else [value]:
            if not 0 <= token_id < num_tokens:
                raise ModelError(f"GGUF metadata: {name} is {token_id}; the vocabulary has {num_tokens} tokens")
    return found


def _build(get: Metadata, tokens: list[str], token_ids: dict[str, Any]) -> Tokenizer:
    kind, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ModelError(f"GGUF metadata: tokenizer.ggml.model is {kind!r}; supported: 'gpt2' (byte-level BPE)")
    splitter = _pre_tokenizer(pre)
    merges = [tuple(merge.split(" ", 1)) for merge in get("tokenizer.ggml.merges") or []]
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
    _add_special_tokens(tokenizer, tokens, get("tokenizer.ggml.token_type") or [])
    if get("tokenizer.ggml.add_bos_token", llama3) and "bos_token_id" in token_ids:
        bos_id = token_ids["bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos_id]} $A",
            pair=f"{tokens[bos_id]} $A {tokens[bos_id]} $B",
            special_tokens=[(tokens[bos_id], bos_id)],
        )
    return tokenizer


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
                f"GGUF metadata: tokenizer.ggml.pre is {name!r}; supported: 'smollm', 'gpt-2', 'llama-bpe'"
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
