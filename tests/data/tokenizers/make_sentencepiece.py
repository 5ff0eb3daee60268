"""Makes `sentencepiece*.gguf` and `sentencepiece.json`: a small Llama-style vocabulary.

A BPE model with byte fallback is trained on the licence text and the test texts, then written as a
GGUF tokenizer of kind `llama`, once with the space put before a text and once without. The expected
ids are those of the sentencepiece library; where a control token is written in a text, those of the
parts around it (llama.cpp puts the space before each part).

    python make_sentencepiece.py

Needs sentencepiece 0.2 and gguf.
"""

import io
import json
import re
from pathlib import Path

import gguf
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as proto

HERE = Path(__file__).parent
TEXTS = json.loads((HERE / "texts.json").read_text("utf-8"))
CONTROL = {"<unk>": 0, "<s>": 1, "</s>": 2}


def train() -> bytes:
    licence = (HERE.parents[2] / "LICENSE").read_text("utf-8").splitlines()
    lines = [line for text in [*licence, *TEXTS] for line in text.splitlines() if line.strip()]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        num_threads=1,
    )
    return model.getvalue()


def processor(model: bytes, has_prefix: bool) -> sentencepiece.SentencePieceProcessor:
    changed = proto.ModelProto.FromString(model)
    changed.normalizer_spec.add_dummy_prefix = has_prefix
    return sentencepiece.SentencePieceProcessor(model_proto=changed.SerializeToString())


def write_gguf(model: bytes, has_prefix: bool, path: Path) -> None:
    pieces = proto.ModelProto.FromString(model).pieces
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([p.piece for p in pieces])
    writer.add_token_scores([p.score for p in pieces])
    writer.add_token_types([p.type for p in pieces])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(has_prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def encode(library: sentencepiece.SentencePieceProcessor, text: str) -> list[int]:
    ids: list[int] = []
    for part in re.split("(<unk>|</?s>)", text):
        ids += [CONTROL[part]] if part in CONTROL else library.encode(part)
    return ids


def main() -> None:
    model = train()
    cases = []
    libraries = {flag: processor(model, flag) for flag in (True, False)}
    write_gguf(model, True, HERE / "sentencepiece.gguf")
    write_gguf(model, False, HERE / "sentencepiece_no_prefix.gguf")
    for text in TEXTS:
        ids = {flag: encode(library, text) for flag, library in libraries.items()}
        cases.append({"text": text, "ids": ids[True], "ids_no_prefix": ids[False]})
    (HERE / "sentencepiece.json").write_text(json.dumps(cases, indent=0) + "\n", "utf-8")


main()
