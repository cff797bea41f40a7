"""How many tokens an answer may have: what was asked, if prompt and answer fit the model."""

from dataclasses import dataclass

from kvota.core.errors import ContextLengthExceeded, InvalidRequest, OutputTooLong
from kvota.node.served import ServedModel


@dataclass(frozen=True, slots=True)
class OutputBudget:
    """`max_model_len` bounds prompt and answer together. Nothing is ever cut to fit.

    The fields are the client's names of what may be at fault: "messages" and "max_tokens".
    """

    max_model_len: int
    prompt_field: str
    limit_field: str

    def granted(
        self, num_prompt: int, asked: int | None, minimum: int | None, default: int | None = None
    ) -> int:
        """The answer's limit. Nothing asked: `default`, or all that is left, whatever is less.
        None at all is an answer too: a prompt that is only scored may fill the model.

        Raises InvalidRequest, ContextLengthExceeded or OutputTooLong with the true numbers.
        """
        left = self.max_model_len - num_prompt
        if num_prompt == 0:
            raise InvalidRequest(
                f"`{self.prompt_field}` has no tokens; the model needs at least one.",
                param=self.prompt_field,
            )
        if left < (0 if asked == 0 else 1):
            room = "" if asked == 0 else " Leave room for at least one token of output."
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_model_len} tokens, and "
                f"`{self.prompt_field}` alone takes {num_prompt}.{room}",
                param=self.prompt_field,
            )
        if asked is not None:
            self._check(num_prompt, asked)
        limit = min(left, default or left) if asked is None else asked
        if minimum and minimum > limit:
            raise InvalidRequest(
                f"`min_tokens` is {minimum}, more than the {limit} tokens the answer may have.",
                param="min_tokens",
            )
        return limit

    def _check(self, num_prompt: int, asked: int) -> None:
        if asked > self.max_model_len:
            raise OutputTooLong(
                f"`{self.limit_field}` is {asked}; this model's maximum context length is "
                f"{self.max_model_len} tokens, prompt included.",
                param=self.limit_field,
            )
        if num_prompt + asked > self.max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"you requested {num_prompt + asked} tokens ({num_prompt} in the "
                f"{self.prompt_field}, {asked} in the answer). Shorten one of them.",
                param=self.limit_field,
            )


def refuse_hopeless(num_characters: int, model: ServedModel, prompt_field: str) -> None:
    """Refuse a text that cannot fit, before anybody spends time and memory on its tokens.

    No token adds more characters than its piece has bytes, so this refuses nothing that would
    fit. Raises ContextLengthExceeded.
    """
    least = -(-num_characters // model.tokenizer.longest_piece_bytes)
    if least > model.max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {model.max_model_len} tokens, and the "
            f"{prompt_field} of {num_characters} characters would be at least {least}.",
            param=prompt_field,
        )
