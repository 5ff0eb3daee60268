"""From a wire message to what the engine takes: token ids and sampling parameters, checked.

Everything here is a function of the message and the bundle; nothing is started or kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ipc import messages as wire
from om_models.chat import ChatTemplate, ChatTemplateError
from om_models.tokenizer import Tokenizer, TokenizerError
from runtime_cache.engine.request import SamplingParams, TokenArray
from runtime_cache.errors import InvalidRequest, UnknownPrefix
from runtime_cache.ids import PrefixId

Prompted = wire.Generate | wire.Chat | wire.Tokenize | wire.Register

_NO_TOKENS = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Intake:
    """Reads prompts for one model.

    Attributes:
        chat_template: None if the model has none.
        vocab_size: of the model; token ids are below it.
        prefixes: the registered prefixes' token ids; the service adds and removes them.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    vocab_size: int
    prefixes: dict[PrefixId, TokenArray] = field(default_factory=dict)

    def prompt(self, message: Prompted) -> TokenArray:
        """The whole prompt's token ids [int32], a registered prefix included.

        May take long for long texts; may be called from any thread.

        Raises:
            InvalidRequest: empty, not tokenisable, refused by the template, or ids outside the
                vocabulary.
            UnknownPrefix: `prefix_id` names nothing.
        """
        prefix = self._prefix(message)
        tokens = self._own_tokens(message, has_prefix=prefix.size > 0)
        if prefix.size:
            tokens = np.concatenate([prefix, tokens])
        if not tokens.size and not isinstance(message, wire.Tokenize):
            raise InvalidRequest("the prompt is empty: give at least one token")
        return tokens

    def params(self, message: wire.AnswerRequest, *, seed: int) -> SamplingParams:
        """The engine's form of the sampling fields.

        Args:
            seed: used if the message brings none.

        Raises:
            InvalidRequest: a token id is outside the vocabulary.
        """
        bias = tuple((int(token), value) for token, value in message.logit_bias.items())
        self._check_ids("a key of `logit_bias`", (token for token, _ in bias))
        self._check_ids("`stop_token_ids`", message.stop_token_ids)
        return SamplingParams(
            max_tokens=message.max_tokens,
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            seed=seed if message.seed is None else message.seed,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=bias,
            stop=message.stop,
            stop_token_ids=frozenset(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            logprobs=message.logprobs,
        )

    def _prefix(self, message: Prompted) -> TokenArray:
        name = message.prefix_id if isinstance(message, wire.Generate) else None
        if name is None:
            return _NO_TOKENS
        # One look, since another thread may release it at any time.
        tokens = self.prefixes.get(PrefixId(name))
        if tokens is None:
            raise UnknownPrefix(f"no prefix `{name}` is registered; register it (again) first")
        return tokens

    def _own_tokens(self, message: Prompted, *, has_prefix: bool) -> TokenArray:
        if isinstance(message, wire.Chat):
            return self._conversation(message.messages, is_open=True)
        if isinstance(message, wire.Tokenize | wire.Register) and message.messages is not None:
            is_open = isinstance(message, wire.Tokenize)
            return self._conversation(message.messages, is_open=is_open)
        if not isinstance(message, wire.Tokenize) and message.prompt_ids is not None:
            return self._given_ids(message.prompt_ids)
        text = message.prompt if isinstance(message, wire.Generate) else message.text
        return self._encode(text or "", add_bos=not has_prefix)

    def _conversation(self, turns: Iterable[wire.ChatMessage], *, is_open: bool) -> TokenArray:
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template; use `generate`")
        plain = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            text = self.chat_template.render(plain, add_generation_prompt=is_open)
        except ChatTemplateError as error:
            raise InvalidRequest(f"messages: {error}") from error
        # The template writes the begin-of-text token itself where the model wants one.
        return self._encode(text, add_bos=False)

    def _encode(self, text: str, *, add_bos: bool) -> TokenArray:
        try:
            return self.tokenizer.encode(text, add_bos=add_bos)
        except TokenizerError as error:
            raise InvalidRequest(str(error)) from error

    def _given_ids(self, ids: tuple[int, ...]) -> TokenArray:
        tokens = np.asarray(ids, dtype=np.int32)
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            self._check_ids("`prompt_ids`", ids)
        return tokens

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"{name}: token id {token_id} is outside the vocabulary "
                    f"(0 to {self.vocab_size - 1})"
                )
