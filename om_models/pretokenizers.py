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

# By code point, since some of these letters do not survive a Unicode normalisation of this file.
_DEEPSEEK_LETTERS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD "
    "1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D "
    "1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 "
    "1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE "
    "2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 "
    "FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 "
    "118A0-118DF 1E900-1E943"
)
_DEEPSEEK_PUNCTUATION = "21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002"
_DEEPSEEK_ASIAN = "4E00-9FA5 800-4E00 AC00-D7FF"


def _letters(ranges: str) -> str:
    """The inside of a character class, from ranges of hexadecimal code points."""
    ends = [["\\x{" + code + "}" for code in item.split("-")] for item in ranges.split()]
    return "".join("-".join(pair) for pair in ends)


_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_letters(_DEEPSEEK_LETTERS)}]+",
    rf"\s?[{_letters(_DEEPSEEK_PUNCTUATION)}]+",
    r"\s+$",
    rf"[{_letters(_DEEPSEEK_ASIAN)}]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    rf"[{_letters(_DEEPSEEK_ASIAN)}]+",
    r"\p{N}",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    rf"[{_letters('4E00-9FA5 3040-309F 30A0-30FF')}]+",
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
