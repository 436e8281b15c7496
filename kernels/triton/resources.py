"""What every kernel takes of a GPU, found without one.

    python -m octavo.kernels.triton.resources [WORD ...]

compiles every variant in `octavo.kernels.triton.variants` whose name holds one of the words (all
of them without words) ahead of time for each target, and prints registers, shared memory and
spills. The compilers come with Triton. The exit status is 1 when a limit is passed.

A variant calls a public wrapper with tensors that have shapes and no memory; the launches it makes
are caught where Triton would compile them. So this compiles what the server compiles.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from octavo.kernels.triton.host import DeviceFacts, assume_device
from octavo.kernels.triton.variants import VARIANTS, Variant

_MOST_THREADS = 1024
"""Of one program, on all GPUs."""


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU architecture, and what the host side would find on it."""

    gpu: GPUTarget
    facts: DeviceFacts


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), DeviceFacts("sm_80", 163 * 1024, reads_fp8=False)),
    "sm_89": Target(GPUTarget("cuda", 89, 32), DeviceFacts("sm_89", 99 * 1024, reads_fp8=True)),
    "sm_90": Target(GPUTarget("cuda", 90, 32), DeviceFacts("sm_90", 227 * 1024, reads_fp8=True)),
    "sm_100": Target(GPUTarget("cuda", 100, 32), DeviceFacts("sm_100", 227 * 1024, reads_fp8=True)),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), DeviceFacts("gfx942", 64 * 1024, True)),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with everything that its compilation depends on."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        """Name of the kernel's function, without the marks of a private one."""
        return str(self.kernel.fn.__name__).strip("_").removesuffix("_kernel")

    @property
    def key(self) -> str:
        """Equal for launches that compile to the same program."""
        return f"{self.name} {self.signature} {self.constants} {self.attributes} {self.options}"


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one program: registers per thread, bytes of shared memory, bytes or registers spilled."""

    registers: int
    shared: int
    spills: int


class _NoDevice:
    """Stands where Triton asks for the device to compile for."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target.gpu

    def get_current_device(self) -> str:
        # Triton keeps what it has compiled by device.
        return self._target.facts.name

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def caught(target: Target, launches: list[Launch]) -> Iterator[None]:
    """Within it, launches are added to the list instead of being compiled and run."""

    def catch(fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: ANN401
        options = {name: compile[name] for name in ("num_warps", "num_stages")}
        launches.append(
            Launch(
                fn.jit_function,
                compile["signature"],
                compile["constants"],
                compile["configs"][0],
                options,
            )
        )
        return True

    before = driver._active
    driver.set_active(_NoDevice(target))
    try:
        with knobs.runtime.scope(), assume_device(target.facts):
            knobs.runtime.jit_cache_hook = catch
            yield
    finally:
        driver._active = before


def launches_of(call: Callable[[], object], target: Target) -> list[Launch]:
    """The kernels that `call` would launch on `target`."""
    launches: list[Launch] = []
    with caught(target, launches):
        call()
    return launches


def resources_of(launch: Launch, target: Target) -> Resources:
    """Compiles for `target` and reads what the assembler reports."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    compiled = triton.compile(source, target=target.gpu, options=launch.options)
    if target.gpu.backend == "hip":
        text = compiled.asm["amdgcn"]
        # Scalar registers spill into lanes of vector registers, not to memory: they do not count.
        found = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s*(\d+)", text))
        return Resources(
            int(found["vgpr_count"]), compiled.metadata.shared, int(found["vgpr_spill_count"])
        )
    with tempfile.TemporaryDirectory() as directory:
        binary = Path(directory, "kernel.cubin")
        binary.write_bytes(compiled.asm["cubin"])
        report = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    usage = {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", report)}
    return Resources(usage["REG"], compiled.metadata.shared, usage["STACK"] + usage["LOCAL"])


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: what `launch` of `variant` takes of `target`."""

    variant: Variant
    launch: Launch
    target: str
    used: Resources

    @property
    def fits(self) -> bool:
        """Whether threads and shared memory suffice and, on the main path, nothing is spilled."""
        target = TARGETS[self.target]
        threads = self.launch.options["num_warps"] * target.gpu.warp_size
        held = threads <= _MOST_THREADS and self.used.shared <= target.facts.shared_memory
        return held and (self.used.spills == 0 or self.variant.may_spill)

    def __str__(self) -> str:
        options = f"{self.launch.options['num_warps']}/{self.launch.options['num_stages']}"
        return (
            f"{self.variant.name:<32} {self.launch.name:<12} {self.target:<6} {options:>5} "
            f"{self.used.registers:>5} {self.used.shared:>7} {self.used.spills:>6}"
            f"{'' if self.fits else '  over the limit'}"
        )


HEADER = f"{'variant':<32} {'kernel':<12} {'target':<6} {'w/st':>5} {'regs':>5} {'smem':>7} spills"


def table(variants: Iterable[Variant], targets: Iterable[str]) -> Iterator[Row]:
    """Rows for each variant and target; a launch that several variants make is compiled once."""
    targets = tuple(targets)
    seen = set()
    for variant in variants:
        for name in targets:
            target = TARGETS[name]
            if variant.needs_fp8 and not target.facts.reads_fp8:
                continue
            for launch in launches_of(variant.call, target):
                if (name, launch.key) not in seen:
                    seen.add((name, launch.key))
                    yield Row(variant, launch, name, resources_of(launch, target))


def main(words: list[str]) -> int:
    """Prints the table; returns the exit status."""
    sys.stdout.write(HEADER + "\n")
    chosen = [v for v in VARIANTS if not words or any(word in v.name for word in words)]
    all_fit = True
    for row in table(chosen, TARGETS):
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
        all_fit &= row.fits
    return 0 if all_fit else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
