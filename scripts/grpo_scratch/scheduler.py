"""A shortcut through vLLM: between two completions that end, a rollout has nothing to decide.

vLLM looks at each request before and after each token: does it still fit, may it be served, does another wait, has it
ended? On a small model it is Python, not the GPU, that takes the time (benchmarks/README.md). In a rollout all
sequences are there from the start, so their memory is set aside once, and as long as none waits a step is: everyone up
to 16 tokens more. What a sequence draws after its end is dropped. All else goes vLLM's own way.

vLLM takes a scheduler class as an engine argument (`scheduler_cls`); `take_several` tells its model runner what such a
step means. Run with vLLM 0.26 on a GPU and 0.31 on a CPU; read for 0.22, and for 0.31 on a GPU.
"""

from itertools import chain
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import Request

LOGPROBS = "logprobs"
TOKENS = 16  # of each sequence in a steady step, at most: the GPU works on one while Python looks at the one before


class SteadyStep(SchedulerOutput):
    """One token more for each of the sequences of the step before, or of those that have not ended since."""

    further: "list[SteadyStep]"  # the same for each of the tokens after that one


class SteadyOutput(AsyncModelRunnerOutput):
    """What a `SteadyStep` brings, on its way from the GPU.

    Args:
        tokens: vLLM's output for each of the tokens.
    """

    def __init__(self, tokens: list[Any]):
        self._tokens = tokens

    def get_output(self) -> ModelRunnerOutput:
        """The first token's output with the tokens of all, and with their log-probs as `drawn`: (B, tokens) or None."""
        outputs = [o.get_output() if isinstance(o, AsyncModelRunnerOutput) else o for o in self._tokens]
        first, rows = outputs[0], zip(*(o.sampled_token_ids for o in outputs), strict=True)
        first.sampled_token_ids = [list(chain(*row)) for row in rows]
        first.drawn = None
        if first.logprobs is not None:
            first.drawn = list(zip(*(o.logprobs.logprobs[:, 0].tolist() for o in outputs), strict=True))
            first.logprobs = None
        return first


def take_several(runner: Any) -> None:
    """Have vLLM's model runner take all tokens of a `SteadyStep`, one after the other.

    vLLM's GPU runner keeps two of each buffer, for two steps in flight, where up to 32 tokens are now. So within a step
    nothing may change but what grows: no request comes, none goes, none gets other settings.
    """
    execute, sample = runner.execute_model, runner.sample_tokens
    steps: list[SteadyStep] = []

    def execute_model(step: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        steps[:] = [step, *step.further] if isinstance(step, SteadyStep) else []
        return execute(step, *args, **kwargs)

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        if not steps:
            return output
        tokens = [output]
        for step in steps[1:]:
            execute(step)
            tokens.append(sample(*args, **kwargs))
        steady = SteadyOutput(tokens)
        return steady if isinstance(output, AsyncModelRunnerOutput) else steady.get_output()

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


class RolloutScheduler(AsyncScheduler):
    """vLLM's scheduler that takes a `SteadyStep` where it can. The tokens of such steps are handed on together.

    The log-probs of the sampled tokens come with a request's last token, as `kv_transfer_params[LOGPROBS]` of its
    output: a list of numbers, where vLLM would make an object a token.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # One kind of attention for all layers, a cache that may hold what it held, nobody else who decides on tokens;
        # other models and settings go vLLM's way.
        self._plain = (
            len(self.kv_cache_config.kv_cache_groups) == 1
            and not self.needs_kv_cache_zeroing
            and not self.num_spec_tokens
            and self.connector is None
        )
        self._scheduled: set[str] = set()  # requests of the step before
        self._reserved: set[str] = set()  # requests that have all the memory that they may need
        self._stop: set[int] = set()  # tokens that may end one of them
        self._held: dict[str, list[int]] = {}  # tokens of a request that were not handed on
        self._logprobs: dict[str, list[float]] = {}  # of all its tokens so far

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """The next step."""
        if not self.requests:  # those that were aborted left something
            for state in (self._reserved, self._held, self._logprobs):
                state.clear()
        tokens = self._tokens_ahead() if self._plain else 0
        new_blocks = self._reserve() if tokens else None
        if new_blocks is None:
            step = super().schedule(*args, **kwargs)
        else:
            step = self._steady_step(new_blocks)
            step.further = [self._steady_step({}) for _ in range(tokens - 1)]
        self._scheduled = set(step.num_scheduled_tokens)
        return step

    def update_from_output(self, step: SchedulerOutput, output: ModelRunnerOutput) -> Any:
        """Take in a step's tokens."""
        if isinstance(step, SteadyStep):
            taken = 1 + len(step.further)
            # vLLM takes these off the tokens in flight.
            step.num_scheduled_tokens = dict.fromkeys(step.num_scheduled_tokens, taken)
            index, tokens = output.req_id_to_index, output.sampled_token_ids
            rows = [(self.requests[name], index[name]) for name in step.num_scheduled_tokens if name in self.requests]
            # Who is no longer reserved was preempted, and what it drew since does not count.
            if all(r.request_id in self._reserved and self._stop.isdisjoint(tokens[row]) for r, row in rows):
                for request, row in rows:
                    request.append_output_token_ids(tokens[row])
                    request.num_output_placeholders -= taken
                    if hasattr(request, "num_in_flight_tokens"):  # not in vLLM 0.22
                        request.num_in_flight_tokens -= taken
                    self._held.setdefault(request.request_id, []).extend(tokens[row])
                    if output.drawn:
                        self._logprobs[request.request_id].extend(output.drawn[row])
                return {}
        outputs = super().update_from_output(step, output)
        for of_client in outputs.values():
            for one in of_client.outputs:
                self._hand_on(one, output)
        return outputs

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._reserved.discard(request.request_id)  # it loses its blocks
        return super()._preempt_request(request, *args, **kwargs)

    def _tokens_ahead(self) -> int:
        """How many tokens more all can get before vLLM has to decide: nobody waits, all decode, none is at its end."""
        running, waiting = self.get_request_counts()
        if waiting or not all(r.request_id in self._scheduled and not r.is_prefill_chunk for r in self.running):
            return 0
        left = [self._limit(r) - 1 - r.num_tokens - r.num_output_placeholders for r in self.running]
        return max(0, min([TOKENS, *left])) if running else 0

    def _limit(self, request: Request) -> int:
        """Tokens of the prompt and of the longest completion."""
        return min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)

    def _reserve(self) -> dict[str, Any] | None:
        """Set aside all the memory that the running requests may need, once for each.

        Returns:
            New blocks by request; None where there are not enough.
        """
        fresh = [r for r in self.running if r.request_id not in self._reserved]
        left = {r.request_id: self._limit(r) - r.num_computed_tokens for r in fresh}  # tokens
        manager = self.kv_cache_manager
        if sum(n // self.block_size + 1 for n in left.values()) > manager.block_pool.get_num_free_blocks():
            return None
        new_blocks = {}
        for request in fresh:
            name = request.request_id
            new_blocks[name] = manager.allocate_slots(request, 1, num_lookahead_tokens=left[name] - 1)
            self._reserved.add(name)
            self._stop |= request.sampling_params.all_stop_token_ids
        return new_blocks

    def _steady_step(self, new_blocks: dict[str, Any]) -> SteadyStep:
        names = [r.request_id for r in self.running]
        self._reserved.intersection_update(names)
        step = SteadyStep.make_empty()
        step.num_scheduled_tokens = dict.fromkeys(names, 1)
        step.total_num_scheduled_tokens = len(names)
        step.num_common_prefix_blocks = [0] * len(self.kv_cache_config.kv_cache_groups)
        step.finished_req_ids = self.finished_req_ids
        step.scheduled_cached_reqs = CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[new_blocks[n].get_block_ids(allow_none=True) if n in new_blocks else None for n in names],
            num_computed_tokens=[r.num_computed_tokens for r in self.running],
            num_output_tokens=[r.num_output_tokens + r.num_output_placeholders for r in self.running],
        )
        self._update_after_schedule(step)
        return step

    def _hand_on(self, one: Any, output: ModelRunnerOutput) -> None:
        """Put what was held back of a request before its tokens of this step; log-probs wait for its end."""
        drawn = getattr(output, "drawn", None)
        logprobs = self._logprobs.setdefault(one.request_id, [])
        if drawn:
            logprobs += drawn[output.req_id_to_index[one.request_id]][: len(one.new_token_ids)]
        elif one.new_logprobs is not None:
            logprobs += one.new_logprobs.logprobs[:, 0].tolist()
            one.new_logprobs = None
        one.new_token_ids = self._held.pop(one.request_id, []) + one.new_token_ids
        if one.finish_reason is not None:
            # the one field that vLLM passes to the request's output as it is
            one.kv_transfer_params = {LOGPROBS: self._logprobs.pop(one.request_id)}
