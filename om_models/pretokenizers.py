"""How byte-level vocabularies cut text into words before merging, by the names GGUF uses.

A GGUF file carries only a name (`tokenizer.ggml.pre`); the patterns behind it are those of the
models' own `tokenizer.json` files. A name that is not here is an error: a wrong cut gives wrong
token ids without any sign of it.

Source: `llama_vocab` of llama.cpp (`src/llama-vocab.cpp`) for the names, their patterns, whether a
word that is a token as a whole skips merging, and whether BOS is added when the file does not say.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_WHITESPACE}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_WHITESPACE}"

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_PUNCTUATION_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}|{_PUNCTUATION_SLASH}|{_WHITESPACE}"
)
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_PUNCTUATION_SLASH}|{_WHITESPACE}"
)

_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    "ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭ"
    "Ꚁ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _DEEPSEEK_CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_WHITESPACE}",
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut text.

    Attributes:
        patterns: applied one after the other, each inside the pieces of the one before; what a
            pattern does not match stays as a piece.
        ignores_merges: a piece that is a token as a whole is that token, whatever the merges say.
        adds_bos: BOS comes first where the file does not say.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The library's object: the cuts, then bytes written in GPT-2's alphabet."""
        cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in self.patterns]
        to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, to_letters])


_STARCODER_KIND = PreTokenizer((r"\p{N}", _GPT2))
_GPT2_KIND = PreTokenizer((_GPT2,))
_LLAMA3_KIND = PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True)
_QWEN2_KIND = PreTokenizer((_QWEN2,))
_GPT4O_KIND = PreTokenizer((_GPT4O,))
_DEEPSEEK_V3_KIND = PreTokenizer(_DEEPSEEK_V3)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion"), _GPT2_KIND),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _STARCODER_KIND,
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _LLAMA3_KIND,
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    "glm4": PreTokenizer((_LLAMA3,), ignores_merges=True),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open"), _QWEN2_KIND
    ),
    "tekken": PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O_KIND),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_V3_KIND),
}
