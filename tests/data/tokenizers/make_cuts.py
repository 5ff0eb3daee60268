"""Makes `cuts.json`: how transformers cuts the texts of `texts.json` into words before merging.

    python make_cuts.py

Needs transformers 5.24 with torch (made with 5.24.0 and torch 2.13.0). The patterns are those of
its GGUF loader for the families' vocabularies; SmolLM2's is in its own `tokenizer.json`: single
digits, then GPT-2's cut.
"""

import json
from pathlib import Path

from tokenizers import Regex, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

HERE = Path(__file__).parent
NAMES = ("llama-bpe", "qwen2", "tekken")


def cutters() -> dict[str, pre_tokenizers.PreTokenizer]:
    found = {
        n: pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[n]), "isolated") for n in NAMES
    }
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    return {**found, "smollm": pre_tokenizers.Sequence([digits, words])}


def words(cutter: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [text[first:end] for _, (first, end) in cutter.pre_tokenize_str(text)]


def main() -> None:
    texts = json.loads((HERE / "texts.json").read_text("utf-8"))
    cuts = {name: [words(cutter, text) for text in texts] for name, cutter in cutters().items()}
    (HERE / "cuts.json").write_text(json.dumps(cuts, indent=0) + "\n", "utf-8")


main()
