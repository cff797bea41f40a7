"""From a decoded body to engine requests: names, token ids, limits, sampling.

    body ─▶ checks ─▶ model known? ─▶ template ─▶ token ids ─▶ fits? ─▶ grammar ─▶ Request(s)

Everything that can be refused is refused here, before the engine hears of it. Work that would
hold up the event loop goes to the workbench.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from kvota.core.errors import InvalidRequest
from kvota.core.request import Request, SamplingParams
from kvota.edge.arrival import Arrival
from kvota.model.tool_grammar import CallGrammar
from kvota.node.answer import Answer, Heading
from kvota.node.budget import OutputBudget
from kvota.node.chat_answer import ChatAnswer, ChatWish
from kvota.node.completion_answer import CompletionAnswer, CompletionWish
from kvota.node.logprobs import TokenNames
from kvota.node.pricing import CLIENT_ID, TENANT, WEIGHT
from kvota.node.prompts import ChatPrompt, encode_texts, given_prompts, written
from kvota.node.sampling import drawn_seed, sampling_params
from kvota.node.served import GrammarCompiler, NewConstraint, ServedModel
from kvota.node.settings import HttpSettings
from kvota.node.tools import ToolPlan, plan_tools
from kvota.node.workbench import Seat, Workbench
from kvota.wire import checks
from kvota.wire.messages import tool_use
from kvota.wire.openai import ChatRequest, CompletionRequest, GenerationFields

COMPLETION_TOKENS_DEFAULT = 16  # as OpenAI and vLLM; chat may use all that is left


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An HTTP request, understood: what the engine does and how the answer is written."""

    model: str  # the served name
    requests: tuple[Request, ...]
    answer: Answer
    is_stream: bool
    wants_usage: bool  # a usage chunk at the end of the stream
    wants_running_usage: bool  # and usage so far on every chunk

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def num_choices(self) -> int:
        return sum(request.n for request in self.requests)


class Intake:
    """Prepares requests for one model. `served` may raise Refused while the model loads."""

    def __init__(
        self, served: Callable[[], ServedModel], settings: HttpSettings, bench: Workbench,
        chance: Random,
    ) -> None:  # fmt: skip
        self._served = served
        self._settings = settings
        self._bench = bench
        self._chance = chance

    def model_for(self, name: str | None) -> ServedModel:
        """The model if it answers to `name`; no name means the only model there is."""
        model = self._served()
        if name:
            model.require(name)
        return model

    async def chat(self, body: ChatRequest, arrival: Arrival) -> Prepared:
        checks.check_chat(body)
        model, bench = self.model_for(body.model), self._bench.seat(arrival.num_bytes)
        form = checks.output_form(body)
        tools = plan_tools(tool_use(body), form, model, whole_calls=_tells_whole_calls(body))
        wanted = (body.top_logprobs or 0) if body.logprobs else None
        sampling = sampling_params(body, model, wanted, self._chance)
        prompt = await ChatPrompt(model, body, tools).encode(bench, self._settings)
        request = self._request(
            body, arrival, prompt, _chat_limit(body, len(prompt), model),
            sampling=sampling,
            prompt_logprobs=body.prompt_logprobs,
            new_constraint=await self._constraint(body, model, tools, bench),
        )  # fmt: skip
        wish = ChatWish(
            n=request.n,
            logprobs=body.logprobs is True,
            prompt_logprobs=body.prompt_logprobs is not None,
            token_ids=bool(body.return_token_ids),
            stop_ids=frozenset(body.stop_token_ids or ()),
            new_splitter=tools.new_splitter if tools else None,
        )
        heading = Heading(id=f"chatcmpl-{arrival.id}", created=arrival.created, model=model.name)
        answer = ChatAnswer(heading, wish, _names(model, body), prompt)
        return _prepared(body, model, (request,), answer)

    async def completion(self, body: CompletionRequest, arrival: Arrival) -> Prepared:
        checks.check_completion(body)
        model, bench = self.model_for(body.model), self._bench.seat(arrival.num_bytes)
        sampling = sampling_params(body, model, body.logprobs, self._chance)
        given = given_prompts(body, model)
        prompts = given.ids or await self._encode(given.texts or [], body, model, bench)
        limits = _completion_limits(body, prompts, model)
        _check_num_prompt_logprobs(body, prompts)
        constraint = await self._constraint(body, model, None, bench)
        requests = tuple(
            self._request(
                body, arrival, prompt, limit,
                sampling=self._own_luck(sampling) if body.seed is None else sampling,
                prompt_logprobs=_prompt_logprobs(body),
                new_constraint=constraint,
                index=index,
            )
            for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        )  # fmt: skip
        heading = Heading(id=f"cmpl-{arrival.id}", created=arrival.created, model=model.name)
        wish, names = _completion_wish(body), _names(model, body)
        echoes = given.texts or await self._written(prompts, names, bench) if wish.echo else ()
        answer = CompletionAnswer(heading, wish, names, prompts, echoes)
        return _prepared(body, model, requests, answer)

    def _own_luck(self, sampling: SamplingParams) -> SamplingParams:
        """For one of several prompts: the same prompt twice is two samples, like n = 2."""
        return replace(sampling, seed=drawn_seed(self._chance))

    async def _encode(
        self, texts: list[str], body: CompletionRequest, model: ServedModel, bench: Seat
    ) -> list[list[int]]:
        return await encode_texts(
            texts,
            adds_special=body.add_special_tokens is not False,
            model=model,
            bench=bench,
            settings=self._settings,
        )

    async def _written(
        self, prompts: Sequence[Sequence[int]], names: TokenNames, bench: Seat
    ) -> list[str]:
        return await written(
            lambda: [names.text(ids) for ids in prompts],
            sum(map(len, prompts)),
            "prompt",
            bench=bench,
            settings=self._settings,
        )

    def _request(
        self, body: GenerationFields, arrival: Arrival, prompt: Sequence[int], max_tokens: int,
        *, sampling: SamplingParams, prompt_logprobs: int | None,
        new_constraint: NewConstraint | None, index: int = 0,
    ) -> Request:  # fmt: skip
        return Request(
            id=f"{arrival.id}-{index}",
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            arrived_s=arrival.arrived_s,
            n=body.n or 1,
            stop=checks.stop_strings(body),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            prompt_logprobs=prompt_logprobs,
            cache_salt=body.cache_salt or "",
            use_prefix_cache=body.use_prefix_cache is not False,
            band=arrival.band,
            queue_deadline_s=arrival.queue_deadline_s,
            deadline_s=arrival.deadline_s,
            new_constraint=new_constraint,
            labels=_labels(arrival),
        )

    async def _constraint(
        self, body: GenerationFields, model: ServedModel, tools: ToolPlan | None, bench: Seat
    ) -> NewConstraint | None:
        """The grammar that the output must follow, compiled; None for free text."""
        form = checks.output_form(body)
        compile_it: Callable[[], NewConstraint | None]
        if tools is not None and tools.must_call:
            compile_it, param = tools.compile_forced, "tools"
        elif form is not None:
            compile_it, param = _compilation(form, model, tools), form.param
        elif tools is not None and tools.use.is_strict:
            compile_it, param = tools.compile_guided, "tools"
        else:
            return None
        return await bench.run(
            compile_it,
            limit_s=self._settings.grammar_timeout_s,
            what="compiling what the output must follow",
            param=param,
        )


def _tells_whole_calls(body: ChatRequest) -> bool:
    """Whether half a call must not be told: nobody reads it while it is written.

    Or a stop string may end it: in a stream, what was told cannot be taken back.
    """
    options = body.stream_options
    is_read_whole = not body.stream or bool(options and options.whole_tool_calls)
    return is_read_whole or bool(checks.stop_strings(body))


def _labels(arrival: Arrival) -> Mapping[str, Any]:
    """What the desk and the views say of whose request it is."""
    return {CLIENT_ID: arrival.client_id, TENANT: arrival.tenant, WEIGHT: arrival.weight}


def _chat_limit(body: ChatRequest, num_prompt: int, model: ServedModel) -> int:
    field, asked = "max_tokens", body.max_tokens
    if body.max_completion_tokens is not None:
        field, asked = "max_completion_tokens", body.max_completion_tokens
    budget = OutputBudget(model.max_model_len, prompt_field="messages", limit_field=field)
    return budget.granted(num_prompt, asked, body.min_tokens)


def _completion_limits(
    body: CompletionRequest, prompts: Sequence[Sequence[int]], model: ServedModel
) -> list[int]:
    """For each prompt; 0 is allowed, for an echo alone."""
    budget = OutputBudget(model.max_model_len, prompt_field="prompt", limit_field="max_tokens")
    return [
        budget.granted(
            len(prompt), body.max_tokens, body.min_tokens, default=COMPLETION_TOKENS_DEFAULT
        )
        for prompt in prompts
    ]


def _completion_wish(body: CompletionRequest) -> CompletionWish:
    return CompletionWish(
        n=body.n or 1,
        echo=bool(body.echo),
        logprobs=body.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        stop_ids=frozenset(body.stop_token_ids or ()),
    )


def _prompt_logprobs(body: CompletionRequest) -> int | None:
    """How many per prompt token: an echo shows them too."""
    echoed = body.logprobs if body.echo else None
    return max((k for k in (echoed, body.prompt_logprobs) if k is not None), default=None)


def _check_num_prompt_logprobs(body: CompletionRequest, prompts: Sequence[Sequence[int]]) -> None:
    num_top = _prompt_logprobs(body)
    if num_top is not None:
        param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        num_tokens = sum(map(len, prompts)) * (body.n or 1)
        checks.check_num_prompt_logprobs(num_tokens, num_top, param)


def _compilation(
    form: checks.Form, model: ServedModel, tools: ToolPlan | None
) -> Callable[[], NewConstraint]:
    """Of the form alone, or of the form and tool calls instead of it."""
    grammar = model.grammar
    if grammar is None:
        raise InvalidRequest(f"`{form.param}`: this model has no grammars.", param=form.param)
    if tools is None:
        return lambda: _compiled(form, grammar, None)
    return lambda: tools.compile_beside(lambda calls: _compiled(form, grammar, calls))


def _compiled(
    form: checks.Form, grammar: GrammarCompiler, calls: CallGrammar | None
) -> NewConstraint:
    match form.kind:
        case checks.FormKind.JSON_OBJECT:
            return grammar.json_object(param=form.param, calls=calls)
        case checks.FormKind.JSON_SCHEMA:
            return grammar.json_schema(form.value, param=form.param, calls=calls)
        case checks.FormKind.REGEX:
            return grammar.regex(form.value, param=form.param, calls=calls)
        case checks.FormKind.CHOICE:
            return grammar.choice(form.value, param=form.param, calls=calls)
        case checks.FormKind.GRAMMAR:
            return grammar.grammar(form.value, param=form.param, calls=calls)


def _prepared(
    body: GenerationFields, model: ServedModel, requests: tuple[Request, ...], answer: Answer
) -> Prepared:
    options = body.stream_options
    return Prepared(
        model=model.name,
        requests=requests,
        answer=answer,
        is_stream=bool(body.stream),
        wants_usage=bool(options and options.include_usage),
        wants_running_usage=bool(
            options and options.include_usage and options.continuous_usage_stats
        ),
    )


def _names(model: ServedModel, body: GenerationFields) -> TokenNames:
    hides = body.skip_special_tokens is not False
    return TokenNames(model.tokenizer, hidden=model.hidden_ids if hides else frozenset())
