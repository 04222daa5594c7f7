"""Who samples: vLLM in this process, or transformers' generate where vLLM is not installed.

Both engines keep their own copy of the weights, so training must push its weights after every update
(`sync_weights_to_vllm`); that copy is the sampler of the importance-sampling literature.
"""

import gc
import hashlib
import importlib.util
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

# Must be set before vllm is imported: only an engine in this process lets its weights be written directly.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# Its warnings come by the dozen and mostly on every start or push; VLLM_LOGGING_LEVEL=INFO brings them back.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

if not torch.cuda.is_available():
    # vLLM compiles its CPU sampler with g++ at every start: seconds that a small model never gets back, and it fails
    # where the project's path holds a space.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from scripts import ranks
from scripts.cli import OwnStop
from scripts.lora import named_weights
from scripts.memory import ASLEEP, GIB, in_use, share_of_device
from scripts.prepared import ModelFilesError
from scripts.prompts import prompt_text
from scripts.settings import SettingsError


class Completion(NamedTuple):
    """One sampled completion; the end-of-sequence token, where there is one, is part of it."""

    token_ids: list[int]
    logprobs: list[float]  # of the sampled tokens under the sampler (nats), after temperature, top_p and top_k
    truncated: bool  # stopped by the length limit, not by an end-of-sequence token


@dataclass
class Sample:
    """One completion of one question, on its way through the five steps."""

    question: dict[str, str]  # the row: id, question, gold, answer
    prompt_ids: list[int]
    completion: Completion
    text: str


class Sampling(NamedTuple):
    """How to sample; every value is given, so that no model's defaults creep in."""

    n: int  # completions of each prompt
    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: every token
    logprobs: bool = True  # of the sampled tokens; an evaluation has no use for them, and they cost vLLM time
    seed: int = 0  # the same prompt under the same seed gets the same random numbers, whatever else is in the batch


class Sampler(Protocol):
    """What an evaluation needs."""

    name: str

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[list[Completion]]:
        """Sample `sampling.n` completions of each prompt (token ids)."""
        ...


class Engine(Sampler, Protocol):
    """A sampler with weights of its own, as the hand-written training needs it."""

    gib: float  # of device memory, awake

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the engine's weights with named tensors in the checkpoint's naming. Wakes it, if it sleeps.

        Raises:
            OwnStop: the engine holds other weights than were pushed.
        """
        ...

    def sleep(self) -> None:
        """Give the device's memory back until the next push; an engine that was not built to sleep stays as it is."""
        ...

    def wake(self, part: str) -> None:
        """Take the memory of `part` back, `weights` or `kv_cache`, where the engine sleeps. A push does so itself: what
        was in that memory is gone.

        Raises:
            OwnStop: there is no room.
        """
        ...

    def close(self) -> None:
        """Give everything back, for good."""
        ...


def build_engine(
    model_dir: Path,
    engine: Any,
    max_length: int,
    max_sequences: int,
    precision: str,
    compiled: bool = True,
    sleeps: bool = False,
) -> Engine:
    """The sampler for the model in `model_dir`.

    Args:
        engine: the engine section of the settings: name (`vllm`, `transformers`, or `auto`: vLLM where it is installed)
            and memory_gib (device memory for vLLM's weights, activations and KV cache; on a CPU, for the KV cache).
        max_length: longest prompt plus completion (tokens).
        max_sequences: sequences decoded at once.
        precision: `bf16` or `fp32`, of the engine's weights on a CPU.
        compiled: let vLLM compile the model and capture CUDA graphs. It pays over a training, not over one pass.
        sleeps: `sleep` is to free the engine's memory (vLLM on CUDA).

    Raises:
        SettingsError: the engine cannot be had, or does not fit.
    """
    name = engine.name
    if name == "auto":
        name = "vllm" if importlib.util.find_spec("vllm") else "transformers"
        if name == "transformers":
            print("engine: vLLM is not installed, so transformers' generate samples (slower)", flush=True)
    # On CUDA bf16 whatever the trainer's precision, as in the vLLM that TRL builds.
    dtype = torch.bfloat16 if precision == "bf16" or torch.cuda.is_available() else torch.float32
    if name == "vllm":
        if not importlib.util.find_spec("vllm"):
            raise SettingsError("engine.name: vllm is not installed here; set auto or transformers")
        return VLLMEngine(model_dir, engine.memory_gib, max_length, max_sequences, dtype, compiled, sleeps)
    return TransformersEngine(model_dir, max_sequences, dtype)


def rollout(
    engine: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[dict[str, str]],
    instruction: str,
    sampling: Sampling,
) -> list[Sample]:
    """Step 1: sample completions of each question; those of one question (its group) stand next to each other."""
    prompts = [
        tokenizer.encode(prompt_text(tokenizer, q["question"], instruction), add_special_tokens=False)
        for q in questions
    ]
    groups = engine.generate(prompts, sampling)
    flat = [(q, p, c) for q, p, group in zip(questions, prompts, groups, strict=True) for c in group]
    texts = tokenizer.batch_decode([c.token_ids for _, _, c in flat], skip_special_tokens=True)
    return [Sample(q, p, c, text) for (q, p, c), text in zip(flat, texts, strict=True)]


def sync_weights_to_vllm(model: torch.nn.Module, engine: Engine) -> None:
    """Step 5: push the trainer's weights into the engine, which casts them to its own dtype.

    A tied head goes along once, as the engine expects it, and LoRA adapters merged into their matrices.
    """
    engine.load_weights(named_weights(model))


class VLLMEngine:
    """vLLM's `LLM` in this process."""

    name = "vllm"

    def __init__(
        self,
        model_dir: Path,
        memory_gib: float,
        max_length: int,
        max_sequences: int,
        dtype: torch.dtype,
        compiled: bool,
        sleeps: bool,
    ):
        on_gpu = torch.cuda.is_available()
        if not on_gpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(memory_gib))))
        import vllm

        from scripts.grpo_scratch.scheduler import RolloutScheduler, take_several

        before = in_use()
        self._stop = stop_token_ids(model_dir)
        with engine_start_for_people(memory_gib):
            self._llm = vllm.LLM(
                model=str(model_dir),
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=max_length,
                max_num_seqs=max_sequences,
                generation_config="vllm",  # never the sampling defaults that a model brings along
                logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
                enable_prefix_caching=True,
                disable_log_stats=True,
                enforce_eager=not (on_gpu and compiled),
                scheduler_cls=RolloutScheduler,
                # torchrun has connected the processes, each of which keeps an engine of its own
                distributed_executor_backend="external_launcher" if ranks.count() > 1 else None,
                **(on_cuda(memory_gib, max_sequences, sleeps) if on_gpu else {}),
            )
        if not hasattr(self._llm.llm_engine, "model_executor"):
            raise SettingsError(
                "vLLM's engine runs in another process, so no weights can be pushed into it. "
                "Unset VLLM_ENABLE_V1_MULTIPROCESSING, or set it to 0, and start again."
            )
        self._runner = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        take_several(self._runner)
        self._sleeps = sleeps
        self._asleep = self._said = False
        self.gib = in_use() - before  # on the device, awake

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[list[Completion]]:
        return vllm_generate(self._llm, self._stop, prompts, sampling)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        pushed: dict[torch.Size, tuple[str, torch.Tensor]] = {}

        def watched() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                pushed[weight.shape] = name, weight  # one of each shape
                yield name, weight

        # First the memory for the weights, then the weights; the cache comes last, when the copies are gone.
        self.wake("weights")
        if torch.cuda.is_available():
            self._runner.model.load_weights(watched())
        else:
            # The CPU backend keeps repacked copies of its matrices, and a reload repacks the new weights. It passes
            # over a tied head, which the push names only as the embedding.
            self._runner.reload_weights(weights_iterator=iter([(name, w.clone()) for name, w in watched()]))
            head = self._runner.model.lm_head
            head.quant_method.process_weights_after_loading(head)
        self._check(pushed.values())
        # Cached keys and values of prompts were computed with the old weights.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not drop its prefix cache: requests were still running during the push")
        self.wake("kv_cache")

    def _check(self, pushed: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hold pushed weights against the engine's own, where it keeps one under the same name and unpacked."""
        own = dict(self._runner.model.named_parameters())
        for name, weight in pushed:
            held = own.get(name)
            if held is not None and held.shape == weight.shape and not torch.equal(held, weight.to(held)):
                raise OwnStop(
                    f"the engine did not take the push: its {name} is not the trainer's. It would sample from other "
                    "weights than are trained; please report your versions of vLLM and torch (manifest.json has them)"
                )

    def sleep(self) -> None:
        if not self._sleeps:
            return
        began, before = time.perf_counter(), in_use()
        self._llm.sleep(level=2)  # weights and cache; level 1 would keep a copy of weights that are old by then
        self._asleep = True
        if self._said:  # later on another program may take what is freed, and that is not the allocator's doing
            return
        freed = before - in_use()
        print(f"engine asleep: {freed:.1f} GiB freed in {time.perf_counter() - began:.2f} s", flush=True)
        if freed < 0.5 * (self.gib - ASLEEP):
            raise OwnStop(
                f"the sleeping engine freed {freed:.1f} of its {self.gib:.1f} GiB, so the policy has no room to learn; "
                "unset PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, or set engine.sleep: never"
            )

    def wake(self, part: str) -> None:
        if not self._asleep:
            return
        torch.cuda.empty_cache()  # what the trainer has freed but keeps for itself
        began, before = time.perf_counter(), in_use()
        try:
            self._llm.wake_up(tags=[part])
        except RuntimeError as error:
            raise OwnStop(
                f"the engine could not wake up ({first_line(error)}): {before:.1f} GiB of the GPU are in use by this "
                "training and others (nvidia-smi names them). Lower engine.memory_gib; the same command goes on from "
                "the last checkpoint"
            ) from error
        if not self._said:
            took = time.perf_counter() - began
            print(f"engine awake ({part}): {in_use() - before:.1f} GiB taken back in {took:.2f} s", flush=True)
        if part == "kv_cache":
            self._asleep, self._said = False, True

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        del self._runner, self._llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def on_cuda(memory_gib: float, max_sequences: int, sleeps: bool) -> dict[str, Any]:
    """vLLM's arguments for its share of the device's memory."""
    return {
        "gpu_memory_utilization": share_of_device(memory_gib),
        "max_num_batched_tokens": max(4096, max_sequences),  # as TRL; the default asks for activations of many more
        "enable_sleep_mode": sleeps,
    }


@contextmanager
def engine_start_for_people(memory_gib: float) -> Iterator[None]:
    """A device that is too full for vLLM, or a share of it that is too small, with the setting to change.

    A plain "out of memory" may be the policy's; `errors_for_people` has words for it.
    """
    free = torch.cuda.mem_get_info()[0] / GIB if torch.cuda.is_available() else math.inf
    too_large = (
        f"engine.memory_gib: the engine was to take {memory_gib:g} GiB, and {free:.1f} were free. Lower it, or end "
        "what else holds the GPU (nvidia-smi names it)"
    )
    if memory_gib > free:  # where it is more than the whole device, vLLM speaks of shares alone
        raise SettingsError(too_large)
    try:
        yield
    except (ValueError, RuntimeError) as error:
        said = first_line(error)
        if "desired GPU memory utilization" in said:  # TRL has loaded its policy by then
            raise SettingsError(f"{too_large}. vLLM said: {said}") from error
        if "cache blocks" in said or "KV cache" in said:
            raise SettingsError(
                f"engine.memory_gib: {memory_gib:g} GiB hold the weights, but not the keys and values of one sequence. "
                f"Raise it, or lower max_completion_tokens. vLLM said: {said}"
            ) from error
        raise


def first_line(error: Exception) -> str:
    """What an error says first."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class TransformersEngine:
    """transformers' `generate` on a copy of the model."""

    name = "transformers"

    def __init__(self, model_dir: Path, max_sequences: int, dtype: torch.dtype):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).to(device).eval()
        self._model.generation_config = GenerationConfig()  # never the sampling defaults that a model brings along
        self._stop = stop_token_ids(model_dir)
        self._batch = max_sequences
        self.gib = sum(p.numel() * p.element_size() for p in self._model.parameters()) / GIB

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[list[Completion]]:
        return transformers_generate(self._model, self._stop, prompts, sampling, self._batch)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, weight in weights:
                own[name].copy_(weight)

    def sleep(self) -> None:
        """Its weights are all that it has; they stay."""

    def wake(self, part: str) -> None:
        """It never sleeps."""

    def close(self) -> None:
        del self._model


def stop_token_ids(model_dir: Path) -> list[int]:
    """Tokens that end a completion, as TRL takes them: the tokenizer's, and those of generation_config.json.

    Raises:
        ModelFilesError: there are none.
    """
    try:
        eos = GenerationConfig.from_pretrained(model_dir).eos_token_id
    except OSError:  # a model without generation_config.json
        eos = AutoConfig.from_pretrained(model_dir).eos_token_id
    stop = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if (Path(model_dir) / "tokenizer_config.json").exists():
        of_tokenizer = AutoTokenizer.from_pretrained(model_dir).eos_token_id
        if of_tokenizer is not None and of_tokenizer not in stop:
            stop = [of_tokenizer, *stop]
    if not stop:
        raise ModelFilesError(
            f"{model_dir} names no eos_token_id, so no completion could end; set it in its config.json."
        )
    return stop


def vllm_generate(llm: Any, stop: list[int], prompts: list[list[int]], sampling: Sampling) -> list[list[Completion]]:
    """Sample with vLLM's `LLM`; log-probs come only from one with `RolloutScheduler`. See `Engine.generate`."""
    from vllm import SamplingParams

    from scripts.grpo_scratch.scheduler import LOGPROBS

    def params(seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            logprobs=0 if sampling.logprobs else None,  # 0: of the sampled token alone
            stop_token_ids=stop,
            detokenize=False,
        )

    def completion(request: Any) -> Completion:
        output = request.outputs[0]
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a completion by itself: {output.finish_reason}")
        logprobs = request.kv_transfer_params[LOGPROBS] if sampling.logprobs else []
        return Completion(list(output.token_ids), logprobs, truncated=output.finish_reason == "length")

    rows = [(prompt, request_seed(sampling.seed, prompt) + i) for prompt in prompts for i in range(sampling.n)]
    inputs = [{"prompt_token_ids": prompt} for prompt, _ in rows]
    requests = llm.generate(inputs, [params(seed) for _, seed in rows], use_tqdm=False)
    return grouped([completion(request) for request in requests], sampling.n)


@torch.no_grad()
def transformers_generate(
    model: PreTrainedModel, stop: list[int], prompts: list[list[int]], sampling: Sampling, batch: int
) -> list[list[Completion]]:
    """Sample with transformers' `generate`, `batch` sequences at once; see `Engine.generate`."""
    config = GenerationConfig(
        max_new_tokens=sampling.max_tokens,
        eos_token_id=stop,
        pad_token_id=stop[0],
        do_sample=False,  # the tokens are drawn by Draws
        repetition_penalty=1.0,
    )
    greedy = sampling.temperature == 0
    warpers: list[LogitsProcessor] = [] if greedy else [TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k and not greedy:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1 and not greedy:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    rows = [(ids, request_seed(sampling.seed, ids) + i) for ids in prompts for i in range(sampling.n)]
    flat: list[Completion] = []
    for start in range(0, len(rows), batch):
        chunk = [ids for ids, _ in rows[start : start + batch]]
        length = max(map(len, chunk))
        # left padding, so that every prompt ends where its completion begins
        ids = torch.tensor([[stop[0]] * (length - len(p)) + p for p in chunk], device=model.device)  # (B, P)
        mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in chunk], device=model.device)  # (B, P)
        draws = Draws([] if greedy else [seed for _, seed in rows[start : start + batch]], model.device)
        out = model.generate(
            input_ids=ids, attention_mask=mask, generation_config=config, logits_processor=[*warpers, draws]
        )
        tokens = out[:, length:].tolist()  # (B, T)
        logprobs = torch.stack(draws.logprobs, dim=1).tolist()  # (B, T)
        for row, row_logprobs in zip(tokens, logprobs, strict=True):
            end = next((i + 1 for i, token in enumerate(row) if token in stop), None)
            flat.append(Completion(row[:end], row_logprobs[:end] if sampling.logprobs else [], truncated=end is None))
    return grouped(flat, sampling.n)


def grouped(completions: list[Completion], n: int) -> list[list[Completion]]:
    """Completions, n of each prompt in turn -> by prompt."""
    return [completions[i : i + n] for i in range(0, len(completions), n)]


class Draws(LogitsProcessor):
    """Draws each row's next token with random numbers of its own and keeps the token's log-prob; greedy without seeds.

    argmax of p / E, E exponentially distributed, is a draw from p; vLLM's sampler draws so, too.
    """

    def __init__(self, seeds: list[int], device: torch.device):
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.logprobs: list[torch.Tensor] = []  # (B,) a token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """(B, V) scores, warped already -> (B, V) scores that leave the drawn token alone."""
        logprobs = scores.float().log_softmax(-1)  # (B, V)
        weights = logprobs.exp()
        for row, generator in zip(weights, self._generators, strict=False):
            row /= torch.empty_like(row).exponential_(generator=generator)
        drawn = weights.argmax(-1, keepdim=True)  # (B, 1)
        self.logprobs.append(logprobs.gather(-1, drawn).squeeze(-1))
        return torch.full_like(scores, -torch.inf).scatter(-1, drawn, 0.0)


def request_seed(seed: int, prompt: list[int]) -> int:
    """Where a prompt's random numbers begin. Its completions take this seed and those after it.

    It depends on nothing else, so a step that is done again, or split over processes, draws with the same numbers (and
    a question that a step draws twice, where an epoch ends, gets the same completions twice).
    """
    digest = hashlib.sha256(f"{seed} {prompt}".encode()).digest()
    return int.from_bytes(digest[:7], "big")  # well inside 64 bits
