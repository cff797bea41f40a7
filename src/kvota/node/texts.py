"""/tokenize and /detokenize: the tokenizer by itself, in vLLM's form."""

from functools import partial
from typing import Final

from kvota.core.errors import InvalidRequest
from kvota.node.intake import Intake
from kvota.node.prompts import ChatPrompt, encode_texts, written
from kvota.node.served import ServedModel
from kvota.node.settings import HttpSettings
from kvota.node.tools import plan_tools
from kvota.node.workbench import Seat, Workbench
from kvota.wire.checks import check_ending, check_token_ids, refuse_unsupported
from kvota.wire.messages import tool_use
from kvota.wire.openai import DetokenizeRequest, TokenizeRequest
from kvota.wire.responses import Detokenized, Tokenized

DETOKENIZED_MIN: Final = 131_072  # ids that any model writes as text; more if its context is longer


class Texts:
    """Both directions; nothing of it reaches the engine."""

    def __init__(self, intake: Intake, settings: HttpSettings, bench: Workbench) -> None:
        self._intake = intake
        self._settings = settings
        self._bench = bench

    async def tokenize(self, body: TokenizeRequest, num_bytes: int) -> Tokenized:
        """The ids of `prompt`, or of `messages` as chat would read them.

        Raises InvalidRequest where chat would, for fields that make another prompt.
        """
        refuse_unsupported(body)
        check_ending(body)
        model = self._intake.model_for(body.model)
        bench = self._bench.seat(num_bytes)
        ids = await self._ids(body, model, bench)
        names = await self._names(ids, model, bench) if body.return_token_strs else None
        return Tokenized(
            count=len(ids), max_model_len=model.max_model_len, tokens=ids, token_strs=names
        )

    async def detokenize(self, body: DetokenizeRequest, num_bytes: int) -> Detokenized:
        model = self._intake.model_for(body.model)
        if body.tokens is None:
            raise InvalidRequest("`tokens` is missing.", param="tokens")
        num_max = max(model.max_model_len, DETOKENIZED_MIN)
        if len(body.tokens) > num_max:
            raise InvalidRequest(
                f"`tokens` has {len(body.tokens)} ids; at most {num_max} are written as text.",
                param="tokens",
            )
        check_token_ids(body.tokens, model.vocab_size, "tokens")
        return Detokenized(await self._text(body.tokens, model, self._bench.seat(num_bytes)))

    async def _text(self, ids: list[int], model: ServedModel, bench: Seat) -> str:
        decode = partial(model.tokenizer.decode, ids, skip_special_tokens=False)
        return await written(decode, len(ids), "tokens", bench=bench, settings=self._settings)

    async def _names(self, ids: list[int], model: ServedModel, bench: Seat) -> list[str]:
        token_text = model.tokenizer.token_text
        return await written(
            lambda: list(map(token_text, ids)), len(ids), "prompt",
            bench=bench, settings=self._settings,
        )  # fmt: skip

    async def _ids(self, body: TokenizeRequest, model: ServedModel, bench: Seat) -> list[int]:
        if body.prompt is None:
            if body.messages is None:
                raise InvalidRequest("`prompt` or `messages` is missing.", param="prompt")
            prompt = ChatPrompt(model, body, plan_tools(tool_use(body), None, model))
            return await prompt.encode(bench, self._settings)
        adds_special = body.add_special_tokens is not False
        [ids] = await encode_texts(
            [body.prompt], adds_special=adds_special, model=model,
            bench=bench, settings=self._settings,
        )  # fmt: skip
        return ids
