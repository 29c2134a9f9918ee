"""Limits of a worker's core. They are fixed for the lifetime of a process."""

from dataclasses import dataclass

from ballast.common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Limits of one worker. The constructor raises ConfigError for a wrong value, naming the setting."""

    block_tokens: int
    max_model_len: int  # maximum tokens of a prompt and its output together
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    adapters: frozenset[str] = frozenset()  # names of the loaded adapters
    max_running_count: int = 64  # --max-num-seqs
    max_batch_tokens: int = 512  # --max-num-batched-tokens
    max_waiting_count: int = 64  # --max-num-queued-reqs
    max_waiting_tokens: int = 65_536  # `max_num_queued_tokens`
    # Fraction of the KV blocks reserved for the growth of running sequences. With a full cache, 0.05 causes a third to
    # a twentieth of the preemptions that 0 does, for 2 to 3 % more steps (benchmarks/results: worker-core).
    admission_reserve_fraction: float = 0.05
    swap_block_count: int = 0  # KV blocks in host memory for preempted sequences; 0: they are recomputed
    swaps_online: bool = True  # False: host blocks are for offline sequences only
    swap_blocks_per_step: int = 0  # 0: as many as can be copied during the step
    async_scheduling: bool = False  # a lone instance forms a batch before the tokens of the previous one are known
    prefix_caching: bool = False  # share the KV blocks of common prompt prefixes
    prefix_seed: bytes = b""  # hashed into keys: data other than tokens on which KV depends, and a secret
    handover_timeout_s: float = 10.0  # how long a moved request waits for its KV, and KV for its request
    max_moving_count: int = 1024  # maximum requests that wait for their KV

    def __post_init__(self) -> None:
        for name in ("block_tokens", "vocab_size", "max_running_count", "max_waiting_count", "max_waiting_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, got {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ConfigError("max_model_len", f"must leave room for a prompt and a token, got {self.max_model_len}")
        if self.max_batch_tokens < self.max_running_count:
            raise ConfigError(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs ({self.max_running_count}), so that every running request gets its"
                f" token in each step, got {self.max_batch_tokens}",
            )
        if self.handover_timeout_s <= 0.0 or self.max_moving_count < 0:
            raise ConfigError(
                "handover_timeout_s, max_moving_count",
                f"must be positive, and not negative, got {self.handover_timeout_s} and {self.max_moving_count}",
            )
        if self.swap_block_count < 0 or self.swap_blocks_per_step < 0:
            raise ConfigError(
                "swap_space_bytes, swap_blocks_per_step",
                f"must not be negative, got {self.swap_block_count} blocks and {self.swap_blocks_per_step}",
            )
        if not 0.0 <= self.admission_reserve_fraction < 1.0:
            raise ConfigError("admission_reserve_fraction", f"must be in [0, 1), got {self.admission_reserve_fraction}")
