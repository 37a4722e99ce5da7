"""Text ↔ token ids for one model folder, and text that streams without ever tearing a character.

A folder's `tokenizer.json` does the splitting, its chat template the wording of a conversation, rendered in a
sandbox as transformers renders it (importing transformers itself would cost seconds at start). The incremental
decoder's pieces concatenate to exactly what decoding all ids at once gives, at a constant cost per token.
"""

from __future__ import annotations

import codecs
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
import tokenizers

from specserve.errors import FieldViolation, InvalidRequest, ModelError, ModelNotFound

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
PROBE = "specserve"


class Tokenizer:
    """One folder's tokenizer. Immutable after construction; safe to share between threads."""

    def __init__(self, folder: Path) -> None:
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json, generation_config.json.

        Raises:
            ModelNotFound: there is no tokenizer.json.
            ModelError: one of the files cannot be used.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelNotFound(f"{folder} has no tokenizer.json; only that tokenizer format is read")
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
            decoder = json.loads(path.read_text(encoding="utf-8")).get("decoder")
        except Exception as error:  # the library raises bare exceptions
            raise ModelError(f"{path} cannot be read: {error}") from None
        self._inner.no_truncation()
        self._inner.no_padding()
        self._byte_level = _is_byte_level(path, decoder)
        self._byte_fallback = "ByteFallback" in _decoder_types(decoder)
        added = self._inner.get_added_tokens_decoder()
        self._special = {token.content for token in added.values() if token.special}
        self._pieces: dict[int, bytes] = {}
        self.ascii_pieces: dict[int, str] = {}  # text of tokens that were seen and are plain ASCII
        config = _read_json(folder / "tokenizer_config.json")
        self._template_tokens = _template_tokens(config, _read_json(folder / "special_tokens_map.json"))
        self._template = _compile_template(folder, config)
        self.vocab_size: int = self._inner.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids: tuple[int, ...] = self._find_eos(folder)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with whatever the tokenizer puts in front of any text (a BOS, for some).

        Raises:
            InvalidRequest: the text holds half a surrogate pair, which is no character.
        """
        return self._encode(text, "prompt", add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the assistant is to answer.

        Args:
            messages: each with `role` and `content`, both text.

        Raises:
            InvalidRequest: the model has no chat template, a message is malformed, or the template refuses it.
        """
        if self._template is None:
            _refuse("messages", "this model has no chat template; send a plain prompt")
        if not messages:
            _refuse("messages", "is empty; give at least one message")
        for index, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    _refuse(f"messages[{index}].{key}", f"is {message.get(key)!r}; it must be text")
        try:
            text = self._render(messages, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            _refuse("messages", f"the model's chat template refuses them: {error}")
        # The template writes its own BOS, so the tokenizer must not add another.
        return self._encode(text, "messages", add_special_tokens=False)

    def encode_prediction(self, text: str) -> list[int]:
        """Token ids of text that an answer is expected to contain: nothing is put in front.

        Raises:
            InvalidRequest: the text holds half a surrogate pair, which is no character.
        """
        return self._encode(text, "speculation.prediction", add_special_tokens=False)

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell the words, at the start of a text and after a space, each once.

        Other spellings (a word cut into tokens differently) are not covered, as in vLLM. A word of whitespace only
        is taken as it is, at the start of a text and after a letter.
        """
        spellings = dict.fromkeys(ids for word in words for ids in self._spellings(word))
        return tuple(ids for ids in spellings if ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens and ids that the tokenizer does not know give nothing."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """What one token looks like by itself: its text, special tokens by name, "" for an unknown id.

        A token that holds part of a character gives U+FFFD; use `incremental` for text.
        """
        text: str = self._inner.decode([token_id], skip_special_tokens=False)
        return text

    def incremental(self) -> IncrementalDecoder:
        """A decoder for one answer, at its start."""
        return ByteLevelDecoder(self) if self._byte_level else PieceDecoder(self)

    def piece(self, token_id: int) -> str | None:
        """The vocabulary entry that contributes to text; None for special tokens and unknown ids."""
        token: str | None = self._inner.id_to_token(token_id)
        return None if token is None or token in self._special else token

    def piece_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds in a byte-level vocabulary; b"" for special tokens and unknown ids."""
        found = self._pieces.get(token_id)
        if found is None:
            piece = self.piece(token_id) or ""
            inside = all(char in BYTE_OF_CHAR for char in piece)
            found = bytes(BYTE_OF_CHAR[char] for char in piece) if inside else piece.encode("utf-8")
            self._pieces[token_id] = found
        return found

    def is_byte_piece(self, piece: str) -> bool:
        """Whether a vocabulary entry is one raw byte (`<0xE2>`) of a byte-fallback vocabulary."""
        return self._byte_fallback and BYTE_PIECE.fullmatch(piece) is not None

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        def ids(text: str) -> tuple[int, ...]:
            return tuple(self._encode(text, "bad_words", add_special_tokens=False))

        bare = word.lstrip()
        if bare:
            return [ids(bare), ids(" " + bare)]
        letter, inside = ids("a"), ids("a" + word)
        return [ids(word), inside[len(letter) :] if inside[: len(letter)] == letter else ()]

    def _encode(self, text: str, field: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            _refuse(field, f"has half a surrogate pair at character {error.start}; send valid Unicode")
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        assert self._template is not None
        return self._template.render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._template_tokens,
        )

    def _find_eos(self, folder: Path) -> tuple[int, ...]:
        size = self._model_vocab_size(folder)
        found: list[int] = []
        for name in ("config.json", "generation_config.json"):
            value = _read_json(folder / name).get("eos_token_id")
            for token_id in [] if value is None else value if isinstance(value, list) else [value]:
                if type(token_id) is not int or not 0 <= token_id < size:
                    raise ModelError(
                        f"{folder / name}: eos_token_id is {value!r:.80}; allowed: whole numbers from 0 to {size - 1},"
                        " one or a list"
                    )
                found.append(token_id)
        end_of_turn = self._end_of_turn()
        if end_of_turn is not None and end_of_turn < size:  # what the model cannot say ends nothing
            found.append(end_of_turn)
        return tuple(dict.fromkeys(found))

    def _model_vocab_size(self, folder: Path) -> int:
        """What config.json says, which may be padded beyond the tokenizer's; else the tokenizer's."""
        value = _read_json(folder / "config.json").get("vocab_size")
        if value is None:
            return self.vocab_size
        whole = type(value) is int or (isinstance(value, float) and value.is_integer())
        if not whole or value <= 0:
            raise ModelError(
                f"{folder / 'config.json'}: vocab_size is {value!r:.80}; it must be a whole number above 0"
            )
        return int(value)

    def _end_of_turn(self) -> int | None:
        """The special token that the chat template writes directly after an answer."""
        if self._template is None:
            return None
        try:
            turns = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
            text = self._render(turns, add_generation_prompt=False)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError):
            return None
        rest = text.rpartition(PROBE)[2].lstrip()
        for token in sorted(self._special, key=len, reverse=True):
            if rest.startswith(token):
                token_id: int | None = self._inner.token_to_id(token)
                return token_id
        return None


class IncrementalDecoder:
    """Text of one answer as its ids arrive; all pushes and the flush concatenate to `decode(all ids)`."""

    def push(self, token_id: int) -> str:
        """The text that is certain now; "" while a character is incomplete."""
        raise NotImplementedError

    def flush(self) -> str:
        """What is held back, incomplete characters as U+FFFD. Nothing may be pushed afterwards."""
        raise NotImplementedError

    def copy(self) -> IncrementalDecoder:
        """An independent decoder in the same state."""
        raise NotImplementedError


class ByteLevelDecoder(IncrementalDecoder):
    """For byte-level vocabularies: every token is bytes, and the text is their UTF-8 with U+FFFD for errors."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ascii = tokenizer.ascii_pieces
        self._inside = False  # a character

    def push(self, token_id: int) -> str:
        # most tokens are ASCII, whose text depends on nothing before it
        if not self._inside and (known := self._ascii.get(token_id)) is not None:
            return known
        piece = self._tokenizer.piece_bytes(token_id)
        text = self._utf8.decode(piece)
        self._inside = bool(self._utf8.getstate()[0])
        if piece.isascii():
            self._ascii[token_id] = piece.decode("ascii")
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def copy(self) -> ByteLevelDecoder:
        twin = ByteLevelDecoder(self._tokenizer)
        twin._utf8.setstate(self._utf8.getstate())
        twin._inside = self._inside
        return twin


class PieceDecoder(IncrementalDecoder):
    """For vocabularies of text pieces (sentencepiece): new text is what the held ids add after the last piece.

    A run of raw-byte pieces is held until a text piece ends it: one wrong byte turns the whole run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Ids already given out, decoded again with the held ones so that a leading space is treated as inside.
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        piece = self._tokenizer.piece(token_id)
        if piece is None:
            return ""
        self._held.append(token_id)
        if not piece or self._tokenizer.is_byte_piece(piece):
            return ""
        text = self._added_text()
        self._context, self._held = [token_id], []
        return text

    def flush(self) -> str:
        text = self._added_text()
        self._held = []
        return text

    def copy(self) -> PieceDecoder:
        twin = PieceDecoder(self._tokenizer)
        twin._context, twin._held = list(self._context), list(self._held)
        return twin

    def _added_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._held)[len(before) :]


def _byte_table() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, as char → byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF_CHAR = _byte_table()


def _decoder_types(decoder: Any) -> list[str]:
    if not isinstance(decoder, dict):
        return []
    inner = [kind for part in decoder.get("decoders", []) for kind in _decoder_types(part)]
    return inner if decoder.get("type") == "Sequence" else [str(decoder.get("type"))]


def _is_byte_level(path: Path, decoder: Any) -> bool:
    types = _decoder_types(decoder)
    if "ByteLevel" in types and types != ["ByteLevel"]:
        raise ModelError(f"{path}: the decoder mixes {types}; supported: ByteLevel alone, or decoders without it")
    return types == ["ByteLevel"]


def _read_json(path: Path) -> dict[str, Any]:
    """An optional JSON object; {} if the file is absent."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; it must be a JSON object")
    return value


def _template_tokens(config: Mapping[str, Any], legacy: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that templates may name: text, or objects with a `content`."""
    found: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config.get(name) or legacy.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """`chat_template.jinja` if there is one, else the config's template, or its one named "default"."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except ValueError as error:
            raise ModelError(f"{path} is not UTF-8 text: {error}") from None
    source = config.get("chat_template")
    if isinstance(source, list):
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[-1].get("template") if named else None
    return source if isinstance(source, str) else None


def _compile_template(folder: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
    """Settings, filters and globals as in transformers, so that templates written for it render alike."""
    source = _template_source(folder, config)
    if not source:
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    # jinja2's own two can be talked into reaching Python internals; a template may come from anybody.
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    environment.globals["namespace"] = _Namespace
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(f"{folder}: the chat template is not valid: {error}") from None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the answer for training; here it only stands for its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without underscored attributes."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template may not store {name!r}")
        super().__setitem__(name, value)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Without jinja2's HTML escaping: a prompt is no web page."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _refuse(field: str, description: str) -> NoReturn:
    raise InvalidRequest([FieldViolation(field, description)])
