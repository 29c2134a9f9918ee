"""Assembles a profile and its key."""

import platform
from pathlib import Path

import torch

from ballast.common.errors import BallastError
from ballast.service.logs import get_logger
from services.worker.cost_profile import CostProfile, Costs, Errors, HeldOut, LinkCosts, ProfileKey, now
from services.worker.engine.load import Engine
from services.worker.policy.cost_fit import CostForm
from services.worker.profiling.loopback import measure_link
from services.worker.profiling.measure import Measured
from services.worker.profiling.memory import copies, remap_s_per_gb

_CPU_INFO = Path("/proc/cpuinfo")


def key_of(engine: Engine) -> ProfileKey:
    device, ranks = engine.memory.kv.layer(0).device, engine.info.tensor_parallel_size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return ProfileKey(
        architecture=engine.info.architecture,
        parameter_count=engine.info.parameter_count,
        layer_count=engine.info.layer_count,
        kv_bytes_per_token=engine.info.kv_bytes_per_token,
        dtype=engine.info.dtype,
        device=name if ranks == 1 else f"{ranks} x {name}",
        torch=torch.__version__,
        threads=engine.threads,
        kernels="torch" if engine.kernels is None else "native",
    )


def build_profile(engine: Engine, measured: Measured) -> CostProfile:
    """Create a profile from the measured batches. Also measures links, copies and remapping; remapping leaves the
    engine without parameters.
    """
    fits = {form: measured.fit(form) for form in CostForm}
    held_out = {
        form: HeldOut(
            without_prefix=Errors.of(measured.errors(costs, prefix=False)),
            with_prefix=Errors.of(measured.errors(costs, prefix=True)),
        )
        for form, costs in fits.items()
    }
    return CostProfile(
        created_at=now(),
        model=engine.info.name,
        clock=measured.clock,
        key=key_of(engine),
        costs=Costs.of(fits[CostForm.EXTENDED]),
        sample_count=len(measured.samples),
        held_out=held_out,
        link=_link(),
        copies=copies(engine),
        remap_s_per_gb=remap_s_per_gb(engine),
    )


def _link() -> LinkCosts | None:
    """Measure the costs of a link. None if that fails, so that the other measurements, which took minutes, are not
    lost.
    """
    try:
        return measure_link()
    except BallastError as error:
        get_logger().warning("the link could not be measured", why=str(error))
        return None


def _cpu_name() -> str:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
