"""From a wire message to what the engine takes: token ids and sampling parameters, checked.

Nothing is started here. What is kept is one tenant's: its registered prefixes, and the ids behind
the texts its requests brought forth (`recall`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ipc import messages as wire
from om_models.chat import ChatTemplateError, Renderer
from om_models.tokenizer import Tokenizer, TokenizerError
from runtime_cache.engine.request import SamplingParams, TokenArray
from runtime_cache.errors import InvalidRequest, UnknownPrefix
from runtime_cache.ids import PrefixId
from runtime_cache.recall import Recall
from runtime_cache.text_memory import TextMemory, TokenizedText

Prompted = wire.Generate | wire.Chat | wire.Tokenize | wire.Register

_NO_TOKENS = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt that has been read.

    Attributes:
        tokens: ids [int32], a registered prefix included.
        spelled: the text they stand for, so that the answer can be remembered; None for ids, for
            what follows a registered prefix, and for a text that nothing is to be remembered of.
        is_chat: the chat template has laid it out.
    """

    tokens: TokenArray
    spelled: TokenizedText | None = None
    is_chat: bool = False


@dataclass(frozen=True)
class Intake:
    """Reads one tenant's prompts for one model.

    Attributes:
        chat_template: None if the model has none.
        vocab_size: of the model; token ids are below it.
        prefixes: the registered prefixes' token ids; the service adds and removes them.
        memory: the ids behind the answers so far; None: every text is tokenised afresh.
    """

    tokenizer: Tokenizer
    chat_template: Renderer | None
    vocab_size: int
    prefixes: dict[PrefixId, TokenArray] = field(default_factory=dict)
    memory: TextMemory | None = field(default_factory=TextMemory)

    def may_wait(self, message: Prompted) -> bool:
        """Whether reading it waits for the process of the chat template."""
        has_turns = isinstance(message, wire.Chat) or (
            isinstance(message, wire.Tokenize | wire.Register) and message.messages is not None
        )
        return has_turns and self.chat_template is not None and self.chat_template.may_wait

    def read(self, message: Prompted) -> Prompt:
        """The whole prompt's token ids.

        A text that goes on from an answer has the ids of that answer in it (`recall`). Always
        tokenised afresh are what is to be registered, since equal texts have one name, what
        follows a registered prefix, and what is not to use the cache.

        May take long for long texts; may be called from any thread.

        Raises:
            InvalidRequest: empty, not tokenisable, refused by the template, or ids outside the
                vocabulary.
            UnknownPrefix: `prefix_id` names nothing.
        """
        prefix = self._prefix(message)
        prompt = self._own(message, has_prefix=prefix.size > 0)
        if prefix.size:
            prompt = Prompt(np.concatenate([prefix, prompt.tokens]))
        if not prompt.tokens.size and not isinstance(message, wire.Tokenize):
            raise InvalidRequest("the prompt is empty: give at least one token")
        return prompt

    def remember(self, prompt: Prompt, answer: Sequence[int]) -> None:
        """Keep the ids of an answer, finished or not, for prompts that go on from its text.

        Args:
            answer: all its ids. Those whose text was not shown do no harm: no text can mean a
                special token, and a prompt has a stop string's ids only if it has the string.
        """
        if self.memory is None or prompt.spelled is None:
            return
        is_continuation = not prompt.is_chat or self._has_space_before_answers
        Recall(self.tokenizer, self.memory).remember(
            prompt.spelled, answer, is_continuation=is_continuation
        )

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

    def _own(self, message: Prompted, *, has_prefix: bool) -> Prompt:
        """What the message itself brings."""
        if isinstance(message, wire.Chat):
            return self._conversation(message, message.messages)
        if isinstance(message, wire.Tokenize | wire.Register) and message.messages is not None:
            return self._conversation(message, message.messages)
        if not isinstance(message, wire.Tokenize) and message.prompt_ids is not None:
            return Prompt(self._given_ids(message.prompt_ids))
        text = message.prompt if isinstance(message, wire.Generate) else message.text
        memory = None if has_prefix else self._memory_for(message)
        return self._encode(text or "", memory, add_bos=not has_prefix, is_chat=False)

    def _conversation(self, message: Prompted, turns: Iterable[wire.ChatMessage]) -> Prompt:
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template; use `generate`")
        plain = [{"role": turn.role, "content": turn.content} for turn in turns]
        # More turns may follow a registered beginning.
        is_open = not isinstance(message, wire.Register)
        try:
            text = self.chat_template.render(plain, add_generation_prompt=is_open)
        except ChatTemplateError as error:
            raise InvalidRequest(f"messages: {error}") from error
        if self.memory is not None:
            _ = self._has_space_before_answers  # asked now, since `remember` must not wait
        # The template writes the begin-of-text token itself where the model wants one.
        return self._encode(text, self._memory_for(message), add_bos=False, is_chat=True)

    @cached_property
    def _has_space_before_answers(self) -> bool:
        """Whether the chat template itself writes the space that a chat's answer is shown without.

        Llama 2's does, Mistral's does not.
        """
        question = {"role": "user", "content": "a"}
        answer = {"role": "assistant", "content": "b"}
        if self.chat_template is None:
            return False
        try:
            opened = self.chat_template.render([question])
            whole = self.chat_template.render([question, answer], add_generation_prompt=False)
        except ChatTemplateError:
            return False
        return whole.startswith(f"{opened} b")

    def _memory_for(self, message: Prompted) -> TextMemory | None:
        """The memory if this message may be read with it."""
        is_fresh = isinstance(message, wire.Register) or (
            isinstance(message, wire.AnswerRequest) and not message.use_cache
        )
        return None if is_fresh else self.memory

    def _encode(
        self, text: str, memory: TextMemory | None, *, add_bos: bool, is_chat: bool
    ) -> Prompt:
        try:
            if memory is None:
                return Prompt(self.tokenizer.encode(text, add_bos=add_bos))
            recall = Recall(self.tokenizer, memory)
            found = recall.encode(text, add_bos=add_bos, is_chat=is_chat)
        except TokenizerError as error:
            raise InvalidRequest(str(error)) from error
        if not isinstance(found, TokenizedText):
            return Prompt(found)
        return Prompt(found.tokens, found, is_chat)

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
