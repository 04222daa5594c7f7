"""A shortcut through vLLM: between two completions that end, a rollout has nothing to decide.

vLLM looks at each request before and after each token: does it still fit, may it be served, does another wait, has it
ended? On a small model it is Python, not the GPU, that takes the time (benchmarks/README.md). In a rollout all
sequences are there from the start, so their memory is set aside once, and as long as none waits a step is: everyone up
to 16 tokens more. What a sequence draws after its end is dropped. All else goes vLLM's own way.

vLLM takes a scheduler class as an engine argument (`scheduler_cls`); `take_several` tells its model runner what such a
step means. Run with vLLM 0.26 and 0.31 on a GPU (tests/test_card.py) and 0.31 on a CPU; read for 0.22 to 0.30.
"""

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, LogprobsTensors, ModelRunnerOutput
from vllm.v1.request import Request

LOGPROBS = "logprobs"
TOKENS = 16  # of each sequence in a steady step, at most: the GPU works on one while Python looks at the one before


class SteadyStep(SchedulerOutput):
    """Some tokens more for each of the sequences of the step before, or of those that have not ended since."""

    tokens: int  # of each sequence

    def later(self, token: int) -> SchedulerOutput:
        """vLLM's own step for token `token` of this one, counted from 0; for token 0 this step serves itself."""
        then, start = SchedulerOutput.make_empty(), self.scheduled_cached_reqs
        then.num_scheduled_tokens = self.num_scheduled_tokens
        then.total_num_scheduled_tokens = self.total_num_scheduled_tokens
        then.num_common_prefix_blocks = self.num_common_prefix_blocks
        then.scheduled_cached_reqs = replace(
            start,
            new_block_ids=[None] * len(start.req_ids),
            num_computed_tokens=[n + token for n in start.num_computed_tokens],
            num_output_tokens=[n + token for n in start.num_output_tokens],
        )
        return then


class SteadyOutput(AsyncModelRunnerOutput):
    """What a `SteadyStep` brings, on its way from the GPU.

    Args:
        parts: outputs of one token or of several, one after the other.
    """

    def __init__(self, parts: list[Any]):
        self._parts = parts

    def get_output(self) -> ModelRunnerOutput:
        """The first token's output with the tokens of all, and with their log-probs as `drawn`: (B, tokens) or None."""
        outputs = [o.get_output() if isinstance(o, AsyncModelRunnerOutput) else o for o in self._parts]
        first, rows = outputs[0], zip(*(o.sampled_token_ids for o in outputs), strict=True)
        first.sampled_token_ids = [list(chain(*row)) for row in rows]
        first.drawn = None
        if first.logprobs is not None:
            first.drawn = np.concatenate([o.logprobs.logprobs for o in outputs], axis=1).tolist()
            first.logprobs = None
        return first


class FurtherTokens(AsyncModelRunnerOutput):
    """Tokens of a `SteadyStep` after its first, on their way from the GPU.

    Args:
        tokens: (B, tokens) int64.
        logprobs: theirs, (B, tokens) fp32, or None.
    """

    def __init__(self, tokens: torch.Tensor, logprobs: torch.Tensor | None):
        self._tokens = tokens.to("cpu", non_blocking=True)
        self._logprobs = None if logprobs is None else logprobs.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event(blocking=True)
        self._arrived.record()

    def get_output(self) -> ModelRunnerOutput:
        """The two as vLLM has them."""
        self._arrived.synchronize()
        tokens, logprobs = self._tokens.numpy(), None
        if self._logprobs is not None:
            logprobs = LogprobsLists(tokens, self._logprobs.numpy(), tokens[:, 0])  # the last are no ranks
        return ModelRunnerOutput([], {}, sampled_token_ids=tokens.tolist(), logprobs=logprobs)


def take_several(runner: Any) -> None:
    """Have vLLM's model runner take all tokens of a `SteadyStep`, one after the other.

    vLLM's GPU runner keeps two of each buffer, for two steps in flight, where up to 32 tokens are now. So within a step
    nothing may change but what grows: no request comes, none goes, none gets other settings.
    """
    execute, sample = runner.execute_model, runner.sample_tokens
    steady: SteadyStep | None = None  # the step in hand, where it is one
    replayed: Any = None  # the shape (`BatchExecutionDescriptor`) whose CUDA graph gave its first token, if one did
    # FlashInfer lays out a token's work in one buffer on the host, which is still read while the token is queued.
    plans_on_host = any(group.backend.get_name() == "FLASHINFER" for groups in runner.attn_groups for group in groups)

    def execute_model(step: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        nonlocal steady, replayed
        steady, replayed = step if isinstance(step, SteadyStep) else None, None
        return execute(step, *args, **kwargs)

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        batch = runner.execute_model_state.input_batch if replayed else None  # gone with the next line
        parts = [sample(*args, **kwargs)]
        if steady is None:
            return parts[0]
        if replayed and steady.tokens > 1:
            parts.append(further_tokens(runner, batch, replayed, steady.tokens - 1))
        else:
            for token in range(1, steady.tokens):
                if plans_on_host:
                    torch.cuda.current_stream().synchronize()
                execute(steady.later(token))
                parts.append(sample(*args, **kwargs))
        output = SteadyOutput(parts)
        return output if isinstance(parts[0], AsyncModelRunnerOutput) else output.get_output()

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
    if not (torch.cuda.is_available() and hasattr(runner, "postprocess_sampled")):  # vLLM's second runner, since 0.23
        return
    score_sampled_tokens_alone()
    model = runner.model_state
    plain = type(model).__name__ == "DefaultModelState" and model.rope_state is None and not runner.supports_mm_inputs
    if plain and not plans_on_host:
        replay = runner.cudagraph_manager.run_fullgraph

        def run_fullgraph(shape: Any) -> Any:
            nonlocal replayed
            replayed = shape
            return replay(shape)

        runner.cudagraph_manager.run_fullgraph = run_fullgraph


@torch.inference_mode()
def further_tokens(runner: Any, batch: Any, shape: Any, count: int) -> FurtherTokens:
    """More tokens for each sequence of a batch, by vLLM's own kernels: those alone whose input has changed.

    It is what vLLM's runner does for a token in `execute_model` and `sample_tokens`, less looking through the requests,
    copying what stays, and handing on each token by itself.

    Args:
        runner: vLLM's `GPUModelRunner` (the second).
        batch: its `InputBatch` of the token before; lengths and places of logits are changed here.
        shape: whose CUDA graph gave that token (`BatchExecutionDescriptor`).
        count: tokens.
    """
    from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens, prepare_pos_seq_lens

    states, buffers, tables = runner.req_states, runner.input_buffers, runner.block_tables
    index, starts, padded = batch.idx_mapping, batch.query_start_loc, batch.num_reqs_after_padding
    blocks = tuple(table[:padded] for table in tables.input_block_tables)  # as the first token left them
    batch.logits_indices = slice(0, batch.num_reqs)  # one row a sequence: a view, where vLLM gathers
    tokens, logprobs = [], []
    for _ in range(count):
        prepare_pos_seq_lens(index, starts, states.num_computed_tokens.gpu, buffers.positions, buffers.seq_lens)
        combine_sampled_and_draft_tokens(
            buffers.input_ids,
            index,
            states.last_sampled_tokens,
            starts,
            batch.seq_lens,
            states.prefill_len.gpu,
            states.draft_tokens,
            batch.cu_num_logits,
            batch.num_reqs,
        )
        batch.seq_lens_cpu_upper_bound[: batch.num_reqs] += 1
        slots = tables.compute_slot_mappings(index, starts, batch.positions, batch.num_tokens_after_padding)
        runner.model_state.prepare_attn(batch, shape.cg_mode, blocks, slots, runner.attn_groups, runner.kv_cache_config)
        hidden = runner.cudagraph_manager.run_fullgraph(shape)  # (padded B, H)
        drawn, num_sampled, num_rejected = runner.sample(hidden, batch, None)
        runner.postprocess_sampled(index, drawn.sampled_token_ids, num_sampled, num_rejected, starts)
        tokens.append(drawn.sampled_token_ids)  # (B, 1) int64
        if drawn.logprobs_tensors is not None:
            logprobs.append(drawn.logprobs_tensors.logprobs[:, :1])  # (B, 1) fp32: of the token drawn
    return FurtherTokens(torch.cat(tokens, 1), torch.cat(logprobs, 1) if logprobs else None)


def score_sampled_tokens_alone() -> None:
    """Have vLLM take a sampled token's log-prob, where no other is asked for, in wider strides and without its rank.

    vLLM's kernels go through the vocabulary twice, a thousand logits at a time with 128 threads a sequence, and once
    more for the ranks: 140 of the 1,390 us that a token of 64 sequences takes an H200. With this it is 27.
    """
    from vllm.v1.worker.gpu.sample import logprob, sampler

    if not hasattr(sampler, "compute_topk_scores"):  # before vLLM 0.26
        return
    kernel, scores = logprob._topk_log_softmax_kernel, sampler.compute_topk_scores

    def compute_topk_scores(
        logits: torch.Tensor, num_logprobs: int, sampled: torch.Tensor, *args: Any, **kwargs: Any
    ) -> LogprobsTensors:
        if num_logprobs or kwargs.get("max_per_req_token_ids") or kwargs.get("logits_mode"):
            return scores(logits, num_logprobs, sampled, *args, **kwargs)
        ids = sampled[:, None]  # (B, 1)
        logprobs = torch.empty_like(ids, dtype=torch.float32)
        stride = {"topk_ids_stride": ids.stride(0)} if "topk_ids_stride" in kernel.arg_names else {}  # vLLM 0.31
        kernel[(len(ids),)](
            output_ptr=logprobs,
            logits_ptr=logits,
            logits_stride=logits.stride(0),
            topk_ids_ptr=ids,
            topk=1,
            vocab_size=logits.shape[1],
            BLOCK_SIZE=8192,
            TOPK_BLOCK_SIZE=1,
            num_warps=16,
            **stride,
        )
        return LogprobsTensors(ids, logprobs, sampled)  # the last are no ranks, and nobody reads them

    sampler.compute_topk_scores = compute_topk_scores


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
            step = self._steady_step(new_blocks, tokens)
        self._scheduled = set(step.num_scheduled_tokens)
        return step

    def update_from_output(self, step: SchedulerOutput, output: ModelRunnerOutput) -> Any:
        """Take in a step's tokens."""
        if isinstance(step, SteadyStep):
            taken = step.tokens
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

    def _steady_step(self, new_blocks: dict[str, Any], tokens: int) -> SteadyStep:
        names = [r.request_id for r in self.running]
        self._reserved.intersection_update(names)
        step = SteadyStep.make_empty()
        step.tokens = tokens
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
        for _ in range(tokens):
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
